"""Which devices does a lesson use? The machine's GPUs if it has enough, else virtual ones, and one line that says so."""

import os

import torch

from multigpu import vgpu
from multigpu.devices import CLASSROOM
from multigpu.errors import UserError, counted


def gpus(count: int = 2) -> list[torch.device]:
    """`count` devices: cuda:0 … where the machine has as many, else vgpu:0 …, started if none are running.

    Raises UserError if fewer virtual GPUs are running than were asked for.
    """
    there = 0 if os.environ.get("SLURM_CLUSTER_NAME") == CLASSROOM else torch.cuda.device_count()
    if there >= count:
        return [torch.device("cuda", index) for index in range(count)]
    if (already := vgpu.devices()) and len(already) < count:
        raise UserError(
            f"{count} GPUs were asked for, and only {counted(len(already), 'virtual one')} {'is' if len(already) == 1 else 'are'} running: "
            f"call vgpu.stop() first."
        )
    devices = already or vgpu.start(count)
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":  # one rank speaks for all
        has = counted(there, "GPU") if there else "no GPU"
        ones = f"{count} virtual GPUs compute" if count > 1 else "a virtual GPU computes"
        print(f"This machine has {has}: {ones} on the CPU instead ({vgpu.label()}).")
    return devices[:count]
