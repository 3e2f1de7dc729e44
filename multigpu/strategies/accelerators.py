"""The devices of a run: what the user requests, checked against what the machine has."""

import sys
from dataclasses import dataclass

import torch

from multigpu.devices import gpus_are_only_counted, pick, share_cores
from multigpu.errors import UserError, pluralize
from multigpu.launch.world import World

KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "vgpu": "vgpu"}


@dataclass(frozen=True)
class Accelerator:
    """The devices of one node.

    kind      "cpu", "cuda" or "vgpu"
    count     devices per node; None if not given: the launcher's number of ranks decides
    indices   the GPUs, if the user listed them: devices=[1, 3]
    """

    kind: str = "cpu"
    count: int | None = None
    indices: tuple[int, ...] = ()

    def of_rank(self, world: World) -> torch.device:
        """Return this rank's device, and make it current. Local rank r has the r-th device."""
        if self.kind == "cpu":
            share_cores(world)
            return torch.device("cpu")
        if self.kind == "vgpu":
            share_cores(world)
            # Each process has its own virtual GPUs, so each rank uses its first one.
            return virtual(1)[0]
        if not self.indices:
            return pick(world)
        device = torch.device("cuda", self.indices[world.local_rank])
        torch.cuda.set_device(device)
        return device

    def of_process(self, world: World) -> list[torch.device]:
        """Return the node's devices for the only process on it; the first becomes current.

        Raises UserError if the node has fewer than `count`.
        """
        count = self.count or 1
        if self.kind == "cpu":
            if count > 1:
                raise UserError(
                    f"{count} devices were requested, but one process computes on one CPU: "
                    f"for {count} virtual GPUs start the script by `multigpu virtual --gpus "
                    f"{count}`, or give strategy='ddp' for {count} processes."
                )
            return [torch.device("cpu")]
        if self.kind == "vgpu":
            running = virtual(count)
            if len(running) < count:
                raise UserError(
                    f"{count} devices were requested, but this process runs "
                    f"{pluralize(len(running), 'virtual GPU')}: "
                    f"call multigpu.virtual.control.stop() first, or request {len(running)}."
                )
            return running[:count]
        devices = [torch.device("cuda", index) for index in self.indices or range(count)]
        torch.cuda.set_device(devices[0])
        return devices


def virtual(start: int = 0) -> list[torch.device]:
    """Return this process's virtual GPUs. If none runs, start `start` of them."""
    if not start and "multigpu.virtual.control" not in sys.modules:
        return []
    # Imported late, so a run without virtual GPUs does not wait for the import.
    from multigpu.virtual import control

    return control.devices() or (control.start(start) if start else [])


def resolve(accelerator: str = "auto", devices: int | str | list[int] = "auto") -> Accelerator:
    """Return the devices for the Trainer's arguments `accelerator` and `devices`.

    Raises UserError for an unknown name, an impossible number, or more GPUs than this
    machine has.
    """
    if accelerator not in (*KINDS, "auto"):
        raise UserError(
            f"accelerator is {accelerator!r}: "
            f"expected 'cpu', 'gpu', 'vgpu' (virtual GPUs) or 'auto'."
        )
    simulated = gpus_are_only_counted()
    gpus = 0 if simulated else torch.cuda.device_count()
    kind = KINDS.get(accelerator) or _best_kind(gpus)
    count, indices = _count_and_indices(devices)
    if kind != "cuda":
        if indices:
            count = len(indices)
        elif count == -1:
            count = len(virtual()) or 1
        return Accelerator(kind, count)
    if not gpus:
        why = (
            "the classroom cluster's GPUs are simulated" if simulated else "torch finds no GPU"
        )
        raise UserError(
            f"accelerator='gpu', but {why}: "
            f"give accelerator='vgpu' for virtual GPUs, 'cpu', or 'auto'."
        )
    highest = max(indices, default=(count or 1) - 1)
    if count != -1 and highest >= gpus:
        raise UserError(
            f"devices={devices!r} requests GPU {highest}, but this machine has "
            f"{pluralize(gpus, 'GPU')}, numbered from 0: request at most "
            f"{pluralize(gpus, 'GPU')}, or give accelerator='vgpu'."
        )
    return Accelerator(kind, gpus if count == -1 else count, indices)


def _best_kind(gpus: int) -> str:
    if gpus:
        return "cuda"
    return "vgpu" if virtual() else "cpu"


def _count_and_indices(
    devices: int | str | list[int] | tuple[int, ...],
) -> tuple[int | None, tuple[int, ...]]:
    """Return the number of devices and their indices.

    `devices` is 2, "2", -1 (all), [0, 2], "0,2" or "auto".
    """
    wrong = UserError(
        f"devices is {devices!r}: expected a number from 1 up, -1 for all, "
        f"a list of GPUs such as [0, 2], or 'auto'."
    )
    if devices in ("auto", None):
        return None, ()
    if isinstance(devices, str):
        numbers = [number.strip() for number in devices.split(",") if number.strip()]
        if not numbers or not all(number.lstrip("-").isdecimal() for number in numbers):
            raise wrong
        devices = [int(number) for number in numbers] if "," in devices else int(devices)
    if isinstance(devices, (list, tuple)):
        if not devices or not all(type(index) is int and index >= 0 for index in devices):
            raise wrong
        if len(set(devices)) < len(devices):
            raise wrong
        return len(devices), tuple(devices)
    if type(devices) is not int or (devices < 1 and devices != -1):
        raise wrong
    return devices, ()
