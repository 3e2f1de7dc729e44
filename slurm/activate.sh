# Sourced by every job file: activate the Python environment of the course on this cluster.
#
# Two variables have priority; set them with `sbatch --export=ALL,…` or in your ~/.bashrc:
#   COURSE_MODULES   names for `module load`, such as "python/3.11 cuda/12.6". They are loaded first, because a
#                    virtual environment can need them.
#   COURSE_ENV       path of a virtual environment, or name or path of a conda environment
# Without COURSE_ENV the first of these that has torch and multigpu is used: the environment that is active already
# (sbatch passes it on), the repository's .venv, a conda environment named multigpu.
# If none of them has, it prints one sentence and returns 1: job files use `source slurm/activate.sh || exit`.
# A job to which Slurm gave no GPU ends here, too: it would train on the CPUs without a word.

course_has_python() {
    # -P excludes the current directory, in which multigpu is always found. It needs Python 3.11, as the course does.
    python -P -c 'import sys; from importlib.util import find_spec as f; sys.exit(not (f("torch") and f("multigpu")))' \
        2>/dev/null
}

course_conda_activate() {
    # `conda activate` is a shell function, which a batch job does not inherit: the program conda prints it.
    local program=${CONDA_EXE:-$(type -P conda)} functions
    if [ "$(type -t conda)" != function ]; then
        [ -n "$program" ] && functions=$("$program" shell.bash hook 2>/dev/null) && eval "$functions" || return 1
    fi
    conda activate "$1" 2>/dev/null
}

course_activate() {
    local root
    # Only processes on a compute node have SLURMD_NODENAME; the shell of salloc on a login node does not.
    if [ -n "${SLURMD_NODENAME:-}" ] && [ -z "${SLURM_GPUS_ON_NODE:-}" ]; then
        echo "error: Slurm gave this job no GPU: ask for some with --gpus-per-node, or with --gres=gpu:2." >&2
        return 2
    fi
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    if [ -n "${COURSE_MODULES:-}" ]; then
        # shellcheck disable=SC2086  # it holds several names
        if ! { type module && module load $COURSE_MODULES; } >/dev/null 2>&1; then
            echo "error: COURSE_MODULES is '$COURSE_MODULES', which \`module load\` cannot load: see \`module avail\`." >&2
            return 1
        fi
    fi
    if [ -n "${COURSE_ENV:-}" ]; then
        if [ -f "$COURSE_ENV/bin/activate" ]; then
            source "$COURSE_ENV/bin/activate"
        elif ! course_conda_activate "$COURSE_ENV"; then
            echo "error: COURSE_ENV is '$COURSE_ENV', which is neither a virtual environment's folder nor a conda environment." >&2
            return 1
        fi
        if ! course_has_python; then
            echo "error: COURSE_ENV is '$COURSE_ENV', which has no torch or no multigpu: run \`pip install -e .\` in it." >&2
            return 1
        fi
    elif ! course_has_python; then
        if [ -f "$root/.venv/bin/activate" ] && source "$root/.venv/bin/activate" && course_has_python; then
            :
        elif ! { course_conda_activate multigpu && course_has_python; }; then
            echo "error: no Python environment with torch and multigpu: run \`make run\` in $root, or set COURSE_ENV to yours." >&2
            return 1
        fi
    fi
    echo "environment: $(command -v python)"
}

course_activate
