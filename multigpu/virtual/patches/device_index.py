"""Reads the argument `device` of torch.vgpu's functions, as torch.cuda reads it."""

import torch

from multigpu.virtual.sim import machine, names
from multigpu.virtual.sim.memory import Meter

Device = torch.device | str | int | None


def index_of(device: Device) -> int:
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


def meter_of(device: Device) -> Meter:
    """The meter of a device of the running machine.

    Raises torch.AcceleratorError for an index that does not exist.
    """
    return machine.current().meter(torch.device(names.INNER, index_of(device)))
