"""A rank's device and communication library: a GPU and NCCL, or the CPU and gloo."""

import os
from typing import Any

import torch

from multigpu.errors import UserError, pluralize
from multigpu.launch.room import available_cores, warn_about_cores
from multigpu.launch.world import World
from multigpu.nested import map_tensors

VIRTUAL = "MULTIGPU_VIRTUAL"  # what `multigpu virtual` sets: virtual/options.py
CLASSROOM = "multigpu-classroom"  # the ClusterName of `multigpu slurm up`


def pick(world: World, exact: bool = False) -> torch.device:
    """Return this rank's device: its GPU, made current, or the CPU if there are no GPUs.

    With `exact` the GPU computes deterministically and in full fp32 (`compute_exactly`).
    Raises UserError if the node has GPUs but more ranks than GPUs, or if torch does not see
    the GPUs that Slurm gave.
    """
    gpus = visible_gpus(world)
    if gpus == 0:
        share_cores(world)
        return torch.device("cpu")
    gpu_of_rank = gpus_of_rank(1, world)
    if not gpu_of_rank:
        raise UserError(
            f"{world.local_size} ranks on this node but {pluralize(gpus, 'GPU')}, and each "
            f"rank needs its own: start {gpus} (torchrun --nproc-per-node={gpus}, #SBATCH "
            f"--ntasks-per-node={gpus}).",
            already_reported=world.local_rank != 0,
        )
    if exact:
        compute_exactly()
    return gpu_of_rank[0]


def gpus_of_rank(count: int, world: World) -> list[torch.device]:
    """Return `count` GPUs for this rank alone, and make the first one current.

    The list is empty if the node has fewer GPUs than `count` for each of its ranks. The GPUs
    of local rank r begin at number r × count. With srun --gpus-per-task a rank sees only its
    own GPUs, numbered from 0.
    Raises UserError if torch does not see the GPUs that Slurm gave.
    """
    gpus = visible_gpus(world)
    allocated = _gpus_of_slurm()
    needed = count * world.local_size
    sees_own_only = gpus == count and world.launcher == "srun" and allocated >= needed
    if not gpus or (gpus < needed and not sees_own_only):
        return []
    first = 0 if sees_own_only else count * world.local_rank
    devices = [torch.device("cuda", first + index) for index in range(count)]
    torch.cuda.set_device(devices[0])
    return devices


def gpus_are_only_counted() -> bool:
    """Whether this is the classroom cluster, whose nodes have GPUs for Slurm alone.

    That is so even if the machine has real GPUs, because the cluster's nodes would share them.
    Under `multigpu virtual` each node has virtual GPUs.
    """
    on_classroom = os.environ.get("SLURM_CLUSTER_NAME") == CLASSROOM
    return on_classroom and VIRTUAL not in os.environ


def visible_gpus(world: World) -> int:
    """The number of GPUs that torch sees; 0 where Slurm only counts GPUs.

    Raises UserError if Slurm gave GPUs but torch sees none: the job would leave them idle.
    """
    if gpus_are_only_counted():
        return 0
    gpus = torch.cuda.device_count()
    allocated = _gpus_of_slurm()
    if allocated and not gpus:
        raise UserError(
            f"Slurm gave this node {allocated} GPUs, but torch {torch.__version__} sees none: "
            f"install torch's CUDA build, look at nvidia-smi, or ask Slurm for no GPU.",
            already_reported=world.local_rank != 0,
        )
    return gpus


def _gpus_of_slurm() -> int:
    """The number of GPUs that Slurm gave this node; 0 without Slurm."""
    return int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)


def share_cores(world: World) -> None:
    """Limit torch's threads: the ranks of this node share its cores.

    By default each rank starts as many threads as there are cores, which slows all of them
    down. If OMP_NUM_THREADS is set, it is left as it is.

    Under torchrun a warning is printed if the node has more ranks than cores. Other launchers
    give each rank cores of its own, or `room.check_room` has warned before they started.
    """
    if world.launcher == "torchrun" and world.local_rank == 0:
        warn_about_cores(world.local_size)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // world.local_size))


def compute_exactly() -> None:
    """Make GPUs compute deterministically and in full fp32 from now on, to compare runs."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def backend(device: torch.device) -> str:
    """torch.distributed's backend: nccl for GPUs, vgpu for virtual GPUs, gloo for the CPU."""
    return {"cuda": "nccl", "vgpu": "vgpu"}.get(device.type, "gloo")


def to_cpu(value: Any) -> Any:
    """A copy of `value` with its tensors detached and on the CPU; see `nested.map_tensors`."""
    return map_tensors(value, lambda tensor: tensor.detach().cpu())
