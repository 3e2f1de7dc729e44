"""Which device does this process compute on, and how do the processes talk? One GPU a rank, or the CPU."""

import os

import torch

from multigpu.errors import UserError, counted
from multigpu.world import World

CLASSROOM = "multigpu-classroom"  # the ClusterName of `multigpu slurm up`


def pick(world: World, exact: bool = False) -> torch.device:
    """The device of this rank, made current: cuda:LOCAL_RANK where there are GPUs, else the CPU.

    With `exact` the GPU computes in full fp32 and the same way each time, so that two routes can be compared.
    Raises UserError if the node has more ranks than GPUs.
    """
    # The classroom cluster's GPUs are pretended, also on a machine that has real ones: its two nodes would share them.
    gpus = 0 if os.environ.get("SLURM_CLUSTER_NAME") == CLASSROOM else torch.cuda.device_count()
    if gpus == 0:
        promised = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
        if promised and os.environ.get("SLURM_CLUSTER_NAME") != CLASSROOM:
            raise UserError(
                f"Slurm gave this node {promised} GPUs, but torch {torch.__version__} sees none: install torch's CUDA build, "
                f"look at nvidia-smi, or ask Slurm for no GPU.",
                quiet=world.local_rank != 0,
            )
        share_cores(world)
        return torch.device("cpu")
    # With srun --gpus-per-task=1 each rank sees one GPU, its own, under the number 0.
    bound = gpus == 1 and world.launcher == "srun" and int(os.environ.get("SLURM_GPUS_ON_NODE", 0)) >= world.local_size
    if world.local_size > gpus and not bound:
        raise UserError(
            f"{world.local_size} ranks on this node but {counted(gpus, 'GPU')}, and each rank needs its own: "
            f"start {gpus} (torchrun --nproc-per-node={gpus}, #SBATCH --ntasks-per-node={gpus}, --spawn {gpus}).",
            quiet=world.local_rank != 0,
        )
    device = torch.device("cuda", 0 if bound else world.local_rank)
    torch.cuda.set_device(device)
    if exact:
        compute_exactly()
    return device


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
        if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        else torch.bfloat16
    )


def describe(world: World, device: torch.device, each: int = 1) -> str:
    """One line on who computes where, for the top of a log. `each` is the number of devices of a rank."""
    started = f"{counted(world.size, 'rank')} on {counted(world.nodes, 'node')}, started by {world.launcher}"
    if device.type == "cuda":
        return f"device: {world.size * each} × {torch.cuda.get_device_name(device)}, nccl ({started})"
    if device.type == "vgpu":
        return f"device: {world.size * each} × virtual GPU, which computes on the CPU ({started})"
    why = "no GPU found"
    if os.environ.get("SLURM_CLUSTER_NAME") == CLASSROOM:
        why = "the classroom cluster's GPUs are pretended"
    return f"device: {world.size} × CPU process ({why}), gloo ({started})"
