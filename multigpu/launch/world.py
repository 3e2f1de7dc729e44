"""Who am I? Which rank, on which node, of how many: worked out from what the launcher left in the environment.

torchrun, srun, mpirun and horovodrun each tell a process its place in variables of their own.
`find` reads them all, torchrun's first, and refuses what cannot be true.
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
    launcher      who started it: "python", "torchrun", "srun", "mpirun", "horovodrun", "--spawn"
    address       where rank 0 can be reached
    port          the port that rank 0 listens on, if it was given; None: rank 0 chooses, see rendezvous.py
    job           a text that all processes of this run share and no other run has
    nodes         number of nodes; where the launcher does not tell, as if all had as many processes as this one
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


# launcher, then its names for: rank, world size, local rank, local world size.
# mpirun comes before Slurm: in a Slurm job, mpirun starts its helpers with srun, and the ranks inherit their variables.
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
    (
        "mpirun",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    ),  # MPICH and Intel MPI
)


def find(environ: Mapping[str, str] = os.environ, gpus_each: int = 1) -> World:
    """Work out this process's place from the launcher's variables; alone in the world if there are none.

    `gpus_each` is the number of GPUs that a rank takes, which Slurm must have given for each task.
    Raises UserError where the variables contradict each other, with the line to change.
    """
    for launcher, *names in LAUNCHERS:
        present = [name for name in names if environ.get(name, "") != ""]
        # srun can set PMI_RANK too: then Slurm's own variables tell more.
        if not present or ("PMI_RANK" in names and "MPI_LOCALRANKID" not in present):
            continue
        if present == ["RANK", "WORLD_SIZE", "LOCAL_RANK"]:
            # Started by hand, one command a rank, as older tutorials do: taken as one node. torchrun sets all four.
            environ = {**environ, "LOCAL_WORLD_SIZE": environ["WORLD_SIZE"]}
            present = names
        missing = [name for name in names if name not in present]
        if missing:
            raise UserError(
                f"{present[0]} is set but {missing[0]} is not: start the script with {launcher}, "
                f"which sets both, or unset {present[0]} to run one process."
            )
        launcher = environ.get(
            "MULTIGPU_LAUNCHER", launcher
        )  # `spawn` sets torchrun's variables
        world = _checked(launcher, names, *(integer(environ, name) for name in names))
        if launcher == "torchrun" and "GROUP_WORLD_SIZE" in environ:
            world = replace(world, nodes=integer(environ, "GROUP_WORLD_SIZE"))
        return _located(world, environ)
    return _slurm(environ, gpus_each)


def _slurm(environ: Mapping[str, str], gpus_each: int) -> World:
    """The place that srun gave; alone where no srun did.

    A batch script and an interactive shell carry SLURM_NTASKS too, but only one process runs there: a process that
    believed it would wait for the others for ever. Only a step, started by srun, has SLURM_STEP_NUM_TASKS.
    """
    if "SLURM_JOB_ID" not in environ and "SLURM_PROCID" not in environ:
        return World()
    tasks = integer(environ, "SLURM_NTASKS", 1)
    if not by_srun(environ):
        if tasks <= 1:
            return World()
        where = f"in the shell of the Slurm job {environ.get('SLURM_JOB_NAME', '')!r}"
        raise UserError(
            f"this process was started {where}, which has {tasks} tasks, but not by srun, so the other ranks would never "
            f"come: write 'srun python …' for one rank a task, 'torchrun --nproc-per-node=… …', or '--spawn 1' for one process."
        )
    step_tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get(
        "SLURM_TASKS_PER_NODE", str(tasks)
    )
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    counts, node = tasks_per_node(step_tasks), integer(environ, "SLURM_NODEID", 0)
    if not 0 <= node < len(counts):
        raise UserError(
            f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE={step_tasks} counts {len(counts)} nodes."
        )
    local_size = counts[node]
    names = ("SLURM_PROCID", size_name, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    world = _checked(
        "srun", names, *(integer(environ, name) for name in names[:3]), local_size
    )
    gpus = integer(environ, "SLURM_GPUS_ON_NODE", 0)
    if gpus and gpus != local_size * gpus_each:
        tasks = f"'--ntasks-per-node={gpus // gpus_each}' or " if gpus % gpus_each == 0 else ""
        raise UserError(
            f"Slurm gave this node {pluralize(gpus, 'GPU')}, but srun started {pluralize(local_size, 'task')} on it, and "
            f"each rank needs {pluralize(gpus_each, 'GPU')}: give {tasks}"
            f"'--gpus-per-node={local_size * gpus_each}' to srun, or write it into the job file's #SBATCH line.",
            already_reported=world.local_rank != 0,
        )
    return _located(replace(world, nodes=len(counts)), environ)


def by_srun(environ: Mapping[str, str]) -> bool:
    """Is this process a task of srun, and not a shell in one (srun --pty bash)?"""
    step = "SLURM_STEP_NUM_TASKS" in environ or integer(environ, "SLURM_PROCID", 0) > 0
    return step and "SLURM_PTY_PORT" not in environ


def tasks_per_node(text: str) -> list[int]:
    """Read Slurm's short form: "2(x3),1" means [2, 2, 2, 1]."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise UserError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}, expected something like '2(x2)': start with srun again."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _checked(
    launcher: str, names: tuple | list, rank: int, size: int, local_rank: int, local_size: int
) -> World:
    """Refuse numbers that cannot be true together."""
    if size < 1:
        raise UserError(f"{names[1]} is {size}: a run has at least one process.")
    if not 0 <= rank < size:
        raise UserError(
            f"{names[0]} is {rank}, but with {names[1]}={size} the ranks go from 0 to {size - 1}."
        )
    if not 0 <= local_rank < local_size:
        raise UserError(
            f"{names[2]} is {local_rank}, but with {names[3]}={local_size} it goes from 0 to {local_size - 1}."
        )
    if local_size > size:
        raise UserError(
            f"{names[3]} is {local_size}, more than the whole world ({names[1]}={size})."
        )
    return World(rank, size, local_rank, local_size, launcher, nodes=-(-size // local_size))


def _located(world: World, environ: Mapping[str, str]) -> World:
    """Add where rank 0 can be reached, and a name for the run."""
    address, port = environ.get("MASTER_ADDR"), None
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
                f"{world.launcher} started {world.size} ranks on several nodes and MASTER_ADDR does not say where rank 0 is: "
                f"export MASTER_ADDR=<first node> MASTER_PORT=<free port> and pass both on (Open MPI: mpirun -x MASTER_ADDR)."
            )
        address = _slurm_address(environ)
    # On one node, ranks that share no job name share their parent, the launcher.
    return replace(
        world, address=address or "127.0.0.1", port=port, job=job or str(os.getppid())
    )


def _slurm_address(environ: Mapping[str, str]) -> str:
    """The address of the step's first node, as Slurm itself reaches it: no name has to resolve."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    try:
        first = _output("scontrol", "show", "hostnames", nodes).split()[0]
        return re.search(r"NodeAddr=(\S+)", _output("scontrol", "show", "node", first))[1]
    except (OSError, subprocess.SubprocessError, IndexError, TypeError):
        raise UserError(
            f"cannot ask scontrol which of the nodes {nodes!r} is the first: "
            f"export MASTER_ADDR=<first node> before srun (MASTER_PORT too, if the ranks cannot agree on one)."
        ) from None


def is_rank_zero(environ: Mapping[str, str] = os.environ) -> bool:
    """Is this the process that prints for all? By the launcher's variables alone, so that nothing can go wrong with them."""
    names = [rank for _, rank, *_ in LAUNCHERS] + ["SLURM_PROCID"]
    return next((environ[name] for name in names if environ.get(name)), "0") == "0"


def port_candidates(job: str, count: int = 20) -> list[int]:
    """Ports to try for a run, the same on all its ranks: 15000 + the last four digits of a Slurm job's id, and on.

    The formula is Lightning's; a run without a number is given one by hashing its name.
    """
    number = re.match(r"\d+", job)
    start = int(number[0]) if number else int(hashlib.sha256(job.encode()).hexdigest(), 16)
    return [15000 + (start + i) % 10000 for i in range(count)]


def _output(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=True
    ).stdout


def integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, default)
    try:
        return int(text)
    except (TypeError, ValueError):
        raise UserError(
            f"{name} is {text!r}, expected a whole number: unset it, or start with a launcher."
        ) from None
