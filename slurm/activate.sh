# Sourced by every job file: find the Python environment of the course, wherever this cluster keeps it.
#
# A site's own choice comes first, in two variables that `sbatch --export=ALL,…` or your ~/.bashrc can set:
#   COURSE_MODULES   names for `module load`, such as "python/3.11 cuda/12.6"; a venv may need them, so they come first
#   COURSE_ENV       path of a virtual environment, or name or path of a conda environment
# Without COURSE_ENV the first that has torch and multigpu is taken: the environment that is active already (sbatch
# hands it on), the repository's .venv, a conda environment named multigpu.
# Where there is none: one sentence and status 1, so that a job file can say `source slurm/activate.sh || exit`.

course_has_python() {
    # -P leaves out the current directory, in which multigpu is always found. It came with Python 3.11, which we need.
    python -P -c 'import sys; from importlib.util import find_spec as f; sys.exit(not (f("torch") and f("multigpu")))' \
        2>/dev/null
}

course_conda_activate() {
    # `conda activate` is a shell function, which a batch job does not inherit: ask the program for it.
    local program=${CONDA_EXE:-$(type -P conda)} functions
    if [ "$(type -t conda)" != function ]; then
        [ -n "$program" ] && functions=$("$program" shell.bash hook 2>/dev/null) && eval "$functions" || return 1
    fi
    conda activate "$1" 2>/dev/null
}

course_activate() {
    local root
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    if [ -n "${COURSE_MODULES:-}" ]; then
        # shellcheck disable=SC2086  # several names, on purpose
        if ! { type module && module load $COURSE_MODULES; } >/dev/null 2>&1; then
            echo "error: COURSE_MODULES is '$COURSE_MODULES', but \`module load\` does not load it: see \`module avail\`." >&2
            return 1
        fi
    fi
    if [ -n "${COURSE_ENV:-}" ]; then
        if [ -f "$COURSE_ENV/bin/activate" ]; then
            source "$COURSE_ENV/bin/activate"
        elif ! course_conda_activate "$COURSE_ENV"; then
            echo "error: COURSE_ENV is '$COURSE_ENV', neither a virtual environment's folder nor a conda environment." >&2
            return 1
        fi
        if ! course_has_python; then
            echo "error: COURSE_ENV is '$COURSE_ENV', which lacks torch or multigpu: run \`pip install -e .\` in it." >&2
            return 1
        fi
    elif ! course_has_python; then
        if [ -f "$root/.venv/bin/activate" ] && source "$root/.venv/bin/activate" && course_has_python; then
            :
        elif ! { course_conda_activate multigpu && course_has_python; }; then
            echo "error: no Python environment with torch and multigpu: \`make run\` in $root makes one, COURSE_ENV can name yours." >&2
            return 1
        fi
    fi
    echo "environment: $(command -v python)"
}

course_activate
