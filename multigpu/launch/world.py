"""This process's rank, node and world size, read from the variables that the launcher set.

torchrun, srun, mpirun and horovodrun each set different variables. `find_world` looks for all
of these, torchrun's first, and raises UserError for values that contradict each other.
"""

import hashlib
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from multigpu.errors import UserError, pluralize


@dataclass(frozen=True)
class World:
    """One process's place among all processes of a run.

    rank          0 … size - 1, unique in the run
    size          number of processes in the run (the world size)
    local_rank    0 … local_size - 1, unique on the node: it picks the GPU
    local_size    number of processes of the run on this node
    launcher      "python", "torchrun", "srun", "mpirun", "horovodrun", "spawn" or "ddp"
    address       the host name or address of rank 0
    port          the given port of rank 0; if None, rank 0 chooses one, see rendezvous.py
    job           an identifier of this run, the same on all its processes
    nodes         number of nodes; if the launcher does not set it, it is computed as if each
                  node had as many processes as this node
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "python"
    address: str = "127.0.0.1"
    port: int | None = None
    job: str = ""
    nodes: int = 1


# The launcher, then its names for: rank, world size, local rank, local world size.
# mpirun comes before Slurm: in a Slurm job, mpirun starts its helpers with srun, so the ranks
# inherit srun's variables.
LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    (
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH and Intel MPI
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def find_world(environ: Mapping[str, str] = os.environ, gpus_each: int = 1) -> World:
    """This process's place by the launcher's variables; without any, a world of one process.

    `gpus_each` is the number of GPUs that a rank uses; under srun, each task must have that
    many. Raises UserError if the variables contradict each other; the error's text names
    what to change.
    """
    for launcher, *names in LAUNCHERS:
        present = [name for name in names if environ.get(name, "") != ""]
        # srun --mpi=pmi2 sets PMI_RANK too, but no local rank. Then Slurm's own variables are
        # read.
        if not present or ("PMI_RANK" in names and "MPI_LOCALRANKID" not in present):
            continue
        if present == ["RANK", "WORLD_SIZE", "LOCAL_RANK"]:
            # Older tutorials start one command per rank with these three variables, on one
            # node. torchrun sets all four.
            environ = {**environ, "LOCAL_WORLD_SIZE": environ["WORLD_SIZE"]}
            present = names
        missing = [name for name in names if name not in present]
        if missing:
            raise UserError(
                f"{present[0]} is set but {missing[0]} is not: start the script with "
                f"{launcher}, which sets both, or unset {present[0]} to run one process."
            )
        # spawning.py and relaunch.py set torchrun's variables and this one.
        launcher = environ.get("MULTIGPU_LAUNCHER", launcher)
        world = _checked_world(launcher, names, *(integer(environ, name) for name in names))
        if launcher == "torchrun" and "GROUP_WORLD_SIZE" in environ:
            world = replace(world, nodes=integer(environ, "GROUP_WORLD_SIZE"))
        return _with_address(world, environ)
    return _slurm(environ, gpus_each)


def _slurm(environ: Mapping[str, str], gpus_each: int) -> World:
    """The place that srun gave this process; without srun, a world of one process.

    Raises UserError if a job has several tasks, but srun did not start this process. A batch
    script and an interactive shell have SLURM_NTASKS too, but each is only one process, which
    would wait for the other ranks forever. Only a step, which srun starts, has
    SLURM_STEP_NUM_TASKS.
    """
    if "SLURM_JOB_ID" not in environ and "SLURM_PROCID" not in environ:
        return World()
    tasks = integer(environ, "SLURM_NTASKS", 1)
    if not started_by_srun(environ):
        if tasks <= 1:
            return World()
        job_name = environ.get("SLURM_JOB_NAME", "")
        raise UserError(
            f"this process was started in the shell of the Slurm job {job_name!r}, not by "
            f"srun. The job has {tasks} tasks, but no other rank would start: write 'srun "
            f"python …' for one rank per task, or 'torchrun --nproc-per-node=… …'."
        )
    step_tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get(
        "SLURM_TASKS_PER_NODE", str(tasks)
    )
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    counts = tasks_per_node(step_tasks)
    node = integer(environ, "SLURM_NODEID", 0)
    if not 0 <= node < len(counts):
        raise UserError(
            f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE={step_tasks} lists "
            f"{len(counts)} nodes."
        )
    local_size = counts[node]
    names = ("SLURM_PROCID", size_name, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    world = _checked_world(
        "srun", names, *(integer(environ, name) for name in names[:3]), local_size
    )
    gpus = integer(environ, "SLURM_GPUS_ON_NODE", 0)
    if gpus and gpus != local_size * gpus_each:
        tasks = f"'--ntasks-per-node={gpus // gpus_each}' or " if gpus % gpus_each == 0 else ""
        raise UserError(
            f"Slurm gave this node {pluralize(gpus, 'GPU')}, but srun started "
            f"{pluralize(local_size, 'task')} on it, and each rank needs "
            f"{pluralize(gpus_each, 'GPU')}: give "
            f"{tasks}'--gpus-per-node={local_size * gpus_each}' to srun, or write it into "
            f"the job file's #SBATCH line.",
            already_reported=world.local_rank != 0,
        )
    return _with_address(replace(world, nodes=len(counts)), environ)


def started_by_srun(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of srun; a command in its shell (--pty bash) is not."""
    step = "SLURM_STEP_NUM_TASKS" in environ or integer(environ, "SLURM_PROCID", 0) > 0
    return step and "SLURM_PTY_PORT" not in environ


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's short form: "2(x3),1" means [2, 2, 2, 1].

    Raises UserError for another form.
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise UserError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}, expected something like '2(x2)': "
                f"start the job again, with srun."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _checked_world(
    launcher: str, names: tuple | list, rank: int, size: int, local_rank: int, local_size: int
) -> World:
    """The World of these numbers. Raises UserError if they contradict each other."""
    if size < 1:
        raise UserError(f"{names[1]} is {size}: a run has at least one process.")
    if not 0 <= rank < size:
        raise UserError(
            f"{names[0]} is {rank}, but with {names[1]}={size} ranks go from 0 to {size - 1}."
        )
    if not 0 <= local_rank < local_size:
        raise UserError(
            f"{names[2]} is {local_rank}, but with {names[3]}={local_size} local ranks go "
            f"from 0 to {local_size - 1}."
        )
    if local_size > size:
        raise UserError(
            f"{names[3]} is {local_size}, more than the whole world ({names[1]}={size})."
        )
    return World(rank, size, local_rank, local_size, launcher, nodes=-(-size // local_size))


def _with_address(world: World, environ: Mapping[str, str]) -> World:
    """Add the address and port of rank 0, and the identifier of the run."""
    address = environ.get("MASTER_ADDR")
    port = None
    if "MASTER_PORT" in environ:
        port = integer(environ, "MASTER_PORT")
        if not 0 < port < 65536:
            raise UserError(f"MASTER_PORT is {port}: a port lies between 1 and 65535.")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    if world.launcher == "srun":
        job = f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_STEP_ID', '0')}"
    if address is None and world.local_size < world.size:
        if world.launcher != "srun":
            raise UserError(
                f"{world.launcher} started {world.size} ranks on several nodes, but "
                f"MASTER_ADDR, the address of rank 0, is not set: export MASTER_ADDR=<first "
                f"node> MASTER_PORT=<free port> and pass both on (Open MPI: mpirun -x "
                f"MASTER_ADDR)."
            )
        address = _slurm_address(environ)
    # Without a job id all ranks are on one node and have the same parent: the launcher.
    return replace(
        world, address=address or "127.0.0.1", port=port, job=job or str(os.getppid())
    )


def _slurm_address(environ: Mapping[str, str]) -> str:
    """Slurm's own address of the step's first node, so no host name has to be resolved."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    try:
        first = _output("scontrol", "show", "hostnames", nodes).split()[0]
        return re.search(r"NodeAddr=(\S+)", _output("scontrol", "show", "node", first))[1]
    except (OSError, subprocess.SubprocessError, IndexError, TypeError):
        raise UserError(
            f"scontrol does not report which of the nodes {nodes!r} is the first: export "
            f"MASTER_ADDR=<first node> before srun (MASTER_PORT too, if the ranks cannot "
            f"agree on one)."
        ) from None


def is_rank_zero(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the process that prints for all ranks.

    It reads the launcher's variables without checking them.
    """
    names = [rank for _, rank, *_ in LAUNCHERS] + ["SLURM_PROCID"]
    return next((environ[name] for name in names if environ.get(name)), "0") == "0"


def port_candidates(job: str, count: int = 20) -> list[int]:
    """`count` ports to try for a run, the same on all its ranks.

    They start at 15000 + the last four digits of the Slurm job's id (Lightning's formula). A
    job without a number gets one by hashing its name.
    """
    number = re.match(r"\d+", job)
    start = int(number[0]) if number else int(hashlib.sha256(job.encode()).hexdigest(), 16)
    return [15000 + (start + i) % 10000 for i in range(count)]


def _output(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=True
    ).stdout


def integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The variable `name` as a number.

    Raises UserError if it is not a whole number, or if it is missing and has no default.
    """
    text = environ.get(name, default)
    try:
        return int(text)
    except (TypeError, ValueError):
        raise UserError(
            f"{name} is {text!r}, expected a whole number: unset it, or start with a launcher."
        ) from None
