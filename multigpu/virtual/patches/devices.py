"""The devices that a program names, for torch's C++ code and for the simulated machine."""

from typing import Any

import torch

from multigpu.virtual.sim import machine, names
from multigpu.virtual.sim.memory import Meter

# torch's own class: while virtual GPUs look like CUDA, torch.device is another one.
Device = torch._C.device
FACE = "cuda"
# What programs pass for a device; None is the current one.
DeviceLike = Device | str | int | None
# Devices with an index, and devices that are not virtual, by what programs pass for them.
_translated: dict[Any, torch.device] = {}


def forget() -> None:
    """Forget what devices mean: other virtual GPUs have another name or other indices."""
    _translated.clear()


def inner_device(device: Any) -> Any:
    """The argument `device` of a program, as torch's C++ code needs it.

    "cuda" and "cuda:1", as a text or a torch.device, become a virtual GPU with an index:
    without one it is this thread's current device. So does "vgpu", if that is the devices'
    name. An int is the index of a GPU, as in torch. Everything else is returned unchanged:
    other devices, None, dtypes, tensors.
    """
    kind = type(device)
    if kind is int:
        return Device(names.INNER, machine.index_named(device))
    if kind is not str and kind is not Device:
        return device
    translated = _translated.get(device)
    if translated is None:
        translated = names.hide(Device(device))
        if translated.type == names.INNER and translated.index is None:
            return Device(names.INNER, machine.current_index())
        if translated.type == names.INNER:
            translated = Device(names.INNER, machine.index_named(translated.index))
        _translated[device] = translated
    return translated


def index_of(device: DeviceLike) -> int:
    """The index that `device` names; None and a device without an index mean the current one.

    Raises ValueError for a device of another type.
    """
    if device is None:
        return machine.current_index()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if not names.is_virtual(device):
        raise ValueError(f"Expected a {names.shown_type()} device, but got: {device}")
    return machine.current_index() if device.index is None else device.index


def meter_of(device: DeviceLike) -> Meter:
    """The meter of a device of the running machine.

    Raises torch.AcceleratorError for an index that does not exist.
    """
    return machine.current().meter(Device(names.INNER, index_of(device)))
