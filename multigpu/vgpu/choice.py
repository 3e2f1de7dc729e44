"""Which devices does a lesson use? The machine's GPUs if it has enough, else virtual ones, and one line that says so."""

import os

import torch

from multigpu import vgpu
from multigpu.errors import UserError

CLASSROOM = "classroom"  # the ClusterName of `multigpu slurm up`, whose GPUs are pretended


def gpus(count: int = 2) -> list[torch.device]:
    """`count` devices: cuda:0 … where the machine has as many, else vgpu:0 …, started if none are running.

    Raises UserError if fewer virtual GPUs are running than were asked for.
    """
    there = 0 if os.environ.get("SLURM_CLUSTER_NAME") == CLASSROOM else torch.cuda.device_count()
    if there >= count:
        return [torch.device("cuda", index) for index in range(count)]
    if (already := vgpu.devices()) and len(already) < count:
        raise UserError(
            f"{count} GPUs were asked for, and {len(already)} virtual one{'s are' if len(already) > 1 else ' is'} running: "
            f"call vgpu.stop() first."
        )
    devices = already or vgpu.start(count)
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":  # one rank speaks for all
        has = "no GPU" if there == 0 else f"{there} GPU{'s' if there > 1 else ''}"
        ones = f"{count} virtual GPUs compute" if count > 1 else "a virtual GPU computes"
        print(f"This machine has {has}: {ones} on the CPU instead ({vgpu.label()}).")
    return devices[:count]
