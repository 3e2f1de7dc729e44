"""Which devices does a run compute on? What the user asked for, against what the machine has."""

import os
import sys
from dataclasses import dataclass

import torch

from multigpu import devices as places
from multigpu.errors import UserError, pluralize
from multigpu.launch.world import World

KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "vgpu": "vgpu"}


@dataclass(frozen=True)
class Accelerator:
    """What one node computes on.

    kind      "cpu", "cuda" or "vgpu"
    count     devices of a node; None: not asked for, so a launcher's number of ranks decides
    indices   which GPUs, if the user named them: devices=[1, 3]
    """

    kind: str = "cpu"
    count: int | None = None
    indices: tuple[int, ...] = ()

    def of_rank(self, world: World) -> torch.device:
        """The device of this rank, made current: local rank r has the r-th."""
        if self.kind == "cpu":
            places.share_cores(world)
            return torch.device("cpu")
        if self.kind == "vgpu":  # a process has virtual GPUs of its own
            places.share_cores(world)
            return virtual(1)[0]
        if not self.indices:
            return places.pick(world)
        device = torch.device("cuda", self.indices[world.local_rank])
        torch.cuda.set_device(device)
        return device

    def of_process(self, world: World) -> list[torch.device]:
        """All devices of a process that has the node's for itself. Raises UserError if there are not as many."""
        count = self.count or 1
        if self.kind == "cpu":
            if count > 1:
                raise UserError(
                    f"one process has one CPU to compute on, and {count} devices were asked for: "
                    f"give accelerator='vgpu' for {count} virtual GPUs, or strategy='ddp' for {count} processes."
                )
            return [torch.device("cpu")]
        if self.kind == "vgpu":
            there = virtual(count)
            if len(there) < count:
                raise UserError(
                    f"{count} devices were asked for, and {pluralize(len(there), 'virtual GPU')} run in this process: "
                    f"call vgpu.stop() first, or ask for {len(there)}."
                )
            return there[:count]
        mine = [torch.device("cuda", index) for index in self.indices or range(count)]
        torch.cuda.set_device(mine[0])
        return mine


def virtual(start: int = 0) -> list[torch.device]:
    """The virtual GPUs that run in this process; if none do, `start` of them. Imported here, so that others need not wait."""
    if not start and "multigpu.vgpu" not in sys.modules:
        return []
    from multigpu import vgpu

    return vgpu.devices() or (vgpu.start(start) if start else [])


def resolve(accelerator: str = "auto", devices: int | str | list[int] = "auto") -> Accelerator:
    """What the Trainer's arguments `accelerator` and `devices` mean on this machine.

    Raises UserError for a name that is unknown, a number that makes no sense, or more GPUs than there are.
    """
    if accelerator not in (*KINDS, "auto"):
        raise UserError(
            f"accelerator is {accelerator!r}: expected 'cpu', 'gpu', 'vgpu' (virtual GPUs) or 'auto'."
        )
    pretended = os.environ.get("SLURM_CLUSTER_NAME") == places.CLASSROOM
    gpus = 0 if pretended else torch.cuda.device_count()
    kind = KINDS.get(accelerator) or ("cuda" if gpus else "vgpu" if virtual() else "cpu")
    count, indices = _counted(devices)
    if kind != "cuda":
        if indices:
            count, indices = len(indices), ()
        return Accelerator(kind, count if count != -1 else len(virtual()) or 1)
    if not gpus:
        why = "the classroom cluster's GPUs are pretended" if pretended else "torch sees none"
        raise UserError(
            f"accelerator='gpu', but {why}: give accelerator='vgpu' for virtual ones, 'cpu', or 'auto'."
        )
    highest = max(indices, default=(count or 1) - 1)
    if count != -1 and highest >= gpus:
        raise UserError(
            f"devices={devices!r} asks for GPU {highest}, and this machine has {pluralize(gpus, 'GPU')}, numbered from 0: "
            f"ask for at most {gpus}, or give accelerator='vgpu'."
        )
    return Accelerator(kind, gpus if count == -1 else count, indices)


def _counted(
    devices: int | str | list[int] | tuple[int, ...],
) -> tuple[int | None, tuple[int, ...]]:
    """How many, and which: 2, "2", -1 (all), [0, 2], "0,2", "auto"."""
    wrong = UserError(
        f"devices is {devices!r}: expected a number from 1 up, -1 for all, a list of GPUs such as [0, 2], or 'auto'."
    )
    if devices in ("auto", None):
        return None, ()
    if isinstance(devices, str):
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        if not parts or not all(part.lstrip("-").isdecimal() for part in parts):
            raise wrong
        devices = [int(part) for part in parts] if "," in devices else int(devices)
    if isinstance(devices, (list, tuple)):
        if (
            not devices
            or len(set(devices)) < len(devices)
            or not all(type(d) is int and d >= 0 for d in devices)
        ):
            raise wrong
        return len(devices), tuple(devices)
    if type(devices) is not int or (devices < 1 and devices != -1):
        raise wrong
    return devices, ()
