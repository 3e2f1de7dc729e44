"""Which device does this process compute on, and how do the processes talk? One GPU a rank, or the CPU."""

import os
from typing import Any

import torch

from multigpu.errors import UserError, pluralize
from multigpu.launch.world import World
from multigpu.nested import mapped

CLASSROOM = "multigpu-classroom"  # the ClusterName of `multigpu slurm up`


def pick(world: World, exact: bool = False) -> torch.device:
    """The device of this rank, made current: cuda:LOCAL_RANK where there are GPUs, else the CPU.

    With `exact` the GPU computes in full fp32 and the same way each time, so that two routes can be compared.
    Raises UserError if the node has more ranks than GPUs, or torch does not see those that Slurm gave.
    """
    gpus = seen(world)
    if gpus == 0:
        share_cores(world)
        return torch.device("cpu")
    if not (mine := own(1, world)):
        raise UserError(
            f"{world.local_size} ranks on this node but {pluralize(gpus, 'GPU')}, and each rank needs its own: "
            f"start {gpus} (torchrun --nproc-per-node={gpus}, #SBATCH --ntasks-per-node={gpus}, --spawn {gpus}).",
            already_reported=world.local_rank != 0,
        )
    if exact:
        compute_exactly()
    return mine[0]


def own(count: int, world: World) -> list[torch.device]:
    """`count` GPUs of this rank alone, the first made current; none if the node has not as many for each of its ranks.

    Local rank r has those from r × count on. With srun --gpus-per-task a rank sees its own only, numbered from 0.
    Raises UserError if torch does not see those that Slurm gave.
    """
    gpus = seen(world)
    promised = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    bound = gpus == count and world.launcher == "srun" and promised >= count * world.local_size
    if not gpus or (gpus < count * world.local_size and not bound):
        return []
    first = 0 if bound else count * world.local_rank
    mine = [torch.device("cuda", first + index) for index in range(count)]
    torch.cuda.set_device(mine[0])
    return mine


def seen(world: World) -> int:
    """The GPUs that torch sees. Raises UserError if it sees none where Slurm gave some: the job would wait for nothing.

    The classroom cluster's GPUs are pretended, also on a machine that has real ones: its two nodes would share them.
    """
    if os.environ.get("SLURM_CLUSTER_NAME") == CLASSROOM:
        return 0
    gpus = torch.cuda.device_count()
    promised = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    if promised and not gpus:
        raise UserError(
            f"Slurm gave this node {promised} GPUs, but torch {torch.__version__} sees none: install torch's CUDA build, "
            f"look at nvidia-smi, or ask Slurm for no GPU.",
            already_reported=world.local_rank != 0,
        )
    return gpus


def home(places: list[torch.device], exact: bool = False) -> torch.device:
    """Where a serial run computes that is to be compared with one on `places`: the first of them, or virtual ones' CPU."""
    if exact:
        compute_exactly()
    return places[0] if places[0].type == "cuda" else torch.device("cpu")


def share_cores(world: World) -> None:
    """Ranks that compute on the CPU share its cores. Each wants all of them by default, and they would fight for them."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))


def compute_exactly() -> None:
    """GPUs compute in full fp32 from here on, and the same way each time, so that two routes can be compared."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def backend(device: torch.device) -> str:
    """The library that carries the collectives: NCCL between GPUs, gloo between CPUs; virtual GPUs have their own."""
    return {"cuda": "nccl", "vgpu": "vgpu"}.get(device.type, "gloo")


def amp_dtype(device: torch.device) -> torch.dtype:
    """The 16-bit type for autocast: bfloat16, or float16 on GPUs that are older than bfloat16 (V100)."""
    return (
        torch.float16
        if device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
        else torch.bfloat16
    )


def describe(world: World, device: torch.device, each: int = 1) -> str:
    """One line on who computes where, for the top of a log. `each` is the number of devices of a rank."""
    started = f"{pluralize(world.size, 'rank')} on {pluralize(world.nodes, 'node')}, started by {world.launcher}"
    if device.type == "cuda":
        return f"device: {world.size * each} × {torch.cuda.get_device_name(device)}, nccl ({started})"
    if device.type == "vgpu":
        return (
            f"device: {world.size * each} × virtual GPU, which computes on the CPU ({started})"
        )
    why = "no GPU found"
    if os.environ.get("SLURM_CLUSTER_NAME") == CLASSROOM:
        why = "the classroom cluster's GPUs are pretended"
    return f"device: {world.size} × CPU process ({why}), gloo ({started})"


def on_the_cpu(value: Any) -> Any:
    """A value with its tensors detached, on the CPU, whatever they are nested in."""
    return mapped(value, lambda tensor: tensor.detach().cpu())
