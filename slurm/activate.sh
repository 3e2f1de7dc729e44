# Every job file sets `script` and sources this file. It checks the job, activates the Python
# environment, and sets MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS. If it cannot, it says what to
# do, and returns 2.
#
# If it does not find your environment, export one of these before sbatch, or in your ~/.bashrc:
#   COURSE_ENV       folder of a virtual environment, or name of a conda environment
#   COURSE_MODULES   names for `module load`, such as "python/3.11 cuda/12.6", loaded first
# Without COURSE_ENV, it takes the first of these that has the packages of the script: the active
# environment, which sbatch passes on; .venv; a conda environment named multigpu.

error() {
    echo "error: $1" >&2
    return 2
}

# ---- the job ------------------------------------------------------------------------------------
[ -n "$SLURM_JOB_ID" ] || error "this is a job file: give it to Slurm, with sbatch $0." || return
# A copy of the script can lie beside the copy of its job file.
[ -f "$script" ] || [ -n "$SCRIPT" ] || script=${script##*/}
[ -f "$script" ] ||
    error "there is no $script in $PWD: go to the folder that has it, and submit there." || return
# Only a process on a compute node has SLURMD_NODENAME; the shell of salloc can be on a login node.
[ -z "$SLURMD_NODENAME" ] || [ -n "$SLURM_GPUS_ON_NODE" ] ||
    error "Slurm gave this job no GPU: ask for some by --gpus-per-node, or by --gres=gpu:2." || return

# ---- the Python environment ---------------------------------------------------------------------
packages=$(grep -oE '^(import|from) (torch|tensorflow|sklearn|multigpu)\b' "$script" | cut -d ' ' -f 2)
packages=$(echo $(sort -u <<<"${packages:-torch}")) # in one line
has_packages() { # in another folder than this one, from which Python also imports
    (cd / && python -c '
import sys, importlib.util
sys.exit(None in map(importlib.util.find_spec, sys.argv[1:]))' $packages) 2>/dev/null
}
conda_activate() { # `conda activate` is a shell function, which a batch job does not inherit
    { eval "$("${CONDA_EXE:-conda}" shell.bash hook)" && conda activate "$1"; } 2>/dev/null
}
[ -z "$COURSE_MODULES" ] || module load $COURSE_MODULES ||
    error "COURSE_MODULES is '$COURSE_MODULES', which fails: see \`module avail\`." || return
if [ -n "$COURSE_ENV" ] && [ -f "$COURSE_ENV/bin/activate" ]; then
    source "$COURSE_ENV/bin/activate"
elif [ -n "$COURSE_ENV" ]; then
    conda_activate "$COURSE_ENV" ||
        error "COURSE_ENV is '$COURSE_ENV', which is no virtual and no conda environment." || return
elif ! has_packages; then
    [ -f .venv/bin/activate ] && source .venv/bin/activate
    has_packages || conda_activate multigpu
fi
has_packages ||
    error "no Python with $packages, which $script imports (python is $(command -v python ||
        echo missing)): submit again with COURSE_ENV=FOLDER before sbatch, where FOLDER is an \
environment that has it." || return

# ---- the classroom cluster ----------------------------------------------------------------------
# Slurm counts GPUs on its nodes, but there is no CUDA. The job file of a script that needs CUDA
# starts again here, with as many virtual GPUs. For your own script: NEEDS_CUDA=yes before sbatch.
if [ "$SLURM_CLUSTER_NAME/$NEEDS_CUDA" = multigpu-classroom/yes ] && [ -z "$MULTIGPU_VIRTUAL" ]; then
    unset COURSE_ENV COURSE_MODULES # they are active
    exec multigpu virtual --gpus "$SLURM_GPUS_ON_NODE" --gpus-per-node "$SLURM_GPUS_ON_NODE" \
        --between-nodes Ethernet25 bash "$0" "$@"
fi
if [ "$SLURM_CLUSTER_NAME/$NEEDS_CUDA$MULTIGPU_VIRTUAL" = multigpu-classroom/ ] &&
    grep -qE "[\"']nccl[\"']|[\"']cuda|\.cuda\(" "$script" &&
    ! grep -qE 'is_available|device_count|accelerator' "$script"; then
    echo "note: this cluster has no CUDA. If $script needs it, submit again with NEEDS_CUDA=yes before" \
        "sbatch: it then runs on virtual GPUs." >&2
fi

# ---- where the ranks meet -----------------------------------------------------------------------
# On the first node, which runs this file, at the address that Slurm uses. A MASTER_ADDR that is set
# already is kept. The port is the job's own; if another program uses it, the next one.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
export MASTER_ADDR=${MASTER_ADDR:-$address} MASTER_PORT=$((15000 + SLURM_JOB_ID % 10000))
while (exec 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do
    MASTER_PORT=$((MASTER_PORT + 1))
done
# If the first collective hangs, NCCL may use a network that the nodes do not share: print what it
# chooses, and name the right network (`ip link` lists them).
#export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=ib0

# ---- threads ------------------------------------------------------------------------------------
# A process gets as many threads as its task has cores. Else it would start one per core of the
# node, and the processes of a node would slow each other down. On the classroom cluster cores are
# simulated, too: one thread.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
[ "$SLURM_CLUSTER_NAME" != multigpu-classroom ] || OMP_NUM_THREADS=1

echo "$(command -v python) on $SLURM_JOB_NODELIST, rendezvous: $MASTER_ADDR:$MASTER_PORT"
