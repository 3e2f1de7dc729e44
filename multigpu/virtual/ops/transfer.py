"""Copies to a device, from a device and between devices; operations that read a number."""

from typing import Any

import torch

from multigpu.virtual.ops.dispatch import execute, info_of
from multigpu.virtual.ops.errors import check_has_numbers, check_storages, stopped_error
from multigpu.virtual.ops.op_info import Handler
from multigpu.virtual.ops.shapes import drop_numbers, payload_device
from multigpu.virtual.ops.storage import mark_as_pinned
from multigpu.virtual.ops.tensor import VirtualTensor, refresh_payload, wrap_new
from multigpu.virtual.ops.unknown import Unknown
from multigpu.virtual.ops.unknown_number import unknown_number
from multigpu.virtual.ops.unknown_tensor import unknown_tensor
from multigpu.virtual.sim import names
from multigpu.virtual.sim.event import HOST
from multigpu.virtual.sim.machine import current
from multigpu.virtual.sim.memory import Meter
from multigpu.virtual.sim.notes import note_transfer

aten = torch.ops.aten
OpOverload = torch._ops.OpOverload


def meter_of(tensor: torch.Tensor) -> Meter | None:
    """The meter of a tensor's device; None for a tensor of the host. Call it before a copy.

    Waits for unfinished collectives that use the tensor. Raises RuntimeError if the tensor's
    machine has been stopped.
    """
    if type(tensor) is not VirtualTensor:
        return None
    meter = tensor._block.meter
    if not meter.alive:
        raise stopped_error(tensor)
    if meter.machine.clock.pending:
        meter.machine.clock.wait_for_collectives([tensor])
    if meter.shrunk:
        check_storages([tensor])
    if not meter.machine.compute:
        refresh_payload(tensor)
    return meter


def copy(func: OpOverload, args: tuple, kwargs: dict) -> torch.Tensor:
    """aten::copy_(destination, source): within a device, between two, from or to the host."""
    destination, source = args[0], args[1]
    non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    to = meter_of(destination)
    origin = meter_of(source)
    if origin is None and source.is_meta and to.machine.compute:
        # torch's wording, which Module.to recognizes and extends.
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if to is origin:
        payloads = [destination._payload, source._payload]
        execute(info_of(func), func, payloads, {}, [destination, source], to)
        return destination
    for meter in (origin, to):
        if meter is not None:
            meter.check_assert()
    if to is None:
        # A destination on "meta" is the shape of an UnknownTensor.
        if not destination.is_meta:
            check_has_numbers(info_of(func), [source])
        destination.copy_(source._payload)
        # Only pinned memory is written while the host continues.
        non_blocking = non_blocking and destination.is_pinned()
    else:
        payload = source if origin is None else source._payload
        if payload.is_meta:
            drop_numbers(destination)
        if not destination._payload.is_meta:
            destination._payload.copy_(payload)
    _advance_clock(origin, to, source, destination, non_blocking)
    return destination


def to_copy(func: OpOverload, args: tuple, kwargs: dict) -> torch.Tensor:
    """aten::_to_copy(source, dtype=…, device=…): what `.to`, `.cpu` and `.half` call.

    Raises torch.OutOfMemoryError if the copy does not fit on its device.
    """
    source = args[0]
    origin = meter_of(source)
    options = {
        name: value
        for name, value in kwargs.items()
        if name not in ("device", "pin_memory", "non_blocking")
    }
    device = kwargs.get("device")
    device = source.device if device is None else torch.device(device)
    to = current().meter(device) if names.is_virtual(device) else None
    if to is origin:
        # Only the dtype or the memory format changes.
        return execute(info_of(func), func, [source._payload], options, [source], origin)
    for meter in (origin, to):
        if meter is not None:
            meter.check_assert()
    if to is None and _is_unknown(source):
        # On the host an unknown number is NaN: a program can still print and log it.
        moved = unknown_number(source.shape, options.get("dtype") or source.dtype)
        if isinstance(source, torch.nn.Parameter):
            moved = moved.as_subclass(torch.Tensor)
    elif to is None and source._payload.is_meta:
        moved = unknown_tensor(func(source._payload, **options))
    elif to is None:
        moved = func(source._payload, **options, device=device)
    else:
        dtype = options.get("dtype") or source.dtype
        nbytes = source.numel() * dtype.itemsize
        to.check_capacity(nbytes)
        to.check_host(nbytes)
        payload = source if origin is None else source._payload
        if payload.is_meta:
            location = torch.device("meta")
        else:
            location = payload_device(to, dtype, source.numel())
        moved = wrap_new(func(payload, **options, device=location), to)
    if to is None and kwargs.get("non_blocking", False) and moved.layout is torch.strided:
        # As on CUDA, where the host continues while the copy is under way.
        mark_as_pinned(moved)
    _advance_clock(origin, to, source, moved, bool(kwargs.get("non_blocking", False)))
    return moved


def _advance_clock(
    origin: Meter | None,
    to: Meter | None,
    source: torch.Tensor,
    moved: torch.Tensor | None,
    non_blocking: bool,
) -> None:
    """Add the copy `moved` of `source` to the clock; a meter of None stands for the host.

    As with CUDA, the host waits for a copy from or to the host, unless the copy is
    non_blocking. A non_blocking copy from the host needs pinned memory.
    """
    host = source if origin is None else moved if to is None else None
    pinned = host is not None and host.is_pinned()
    if origin is None:
        non_blocking = non_blocking and pinned
    ends = (HOST if origin is None else origin.index, HOST if to is None else to.index)
    nbytes = source.numel() * source.element_size()
    wait = HOST in ends and not non_blocking
    clock = (to or origin).machine.clock
    clock.transfer(*ends, nbytes, wait=wait, pinned=pinned)
    note_transfer(clock, _contents(origin, to, source))


def _contents(origin: Meter | None, to: Meter | None, source: torch.Tensor) -> str:
    """What a copy outside of backward carries, by its source and its ends."""
    if isinstance(source, torch.nn.Parameter):
        return "weights"
    if origin is None:
        return "inputs"
    return "results" if to is None else "outputs"


def item(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """aten::_local_scalar_dense, which `.item()` calls: the host waits for the number."""
    meter = meter_of(args[0])
    meter.check_assert()
    check_has_numbers(info_of(func), [args[0]])
    _advance_clock(meter, None, args[0], None, non_blocking=False)
    return func(args[0]._payload)


def item_or_unknown(self: VirtualTensor) -> Any:
    """`.item()`: the number, or an Unknown for a tensor that has only a shape."""
    meter = meter_of(self)
    meter.check_assert()
    if not self._payload.is_meta or self.numel() != 1:
        return torch.Tensor.item(self)
    _advance_clock(meter, None, self, None, non_blocking=False)
    return Unknown()


def float_or_unknown(self: VirtualTensor) -> float:
    """`float(tensor)`: NaN for a tensor that has only a shape; Python wants a plain float."""
    return float(self.item())


def _is_unknown(tensor: VirtualTensor) -> bool:
    """Whether the tensor is one floating-point number that was not computed."""
    return tensor._payload.is_meta and tensor.numel() == 1 and tensor.is_floating_point()


def record_stream(func: OpOverload, args: tuple, kwargs: dict) -> None:
    """aten::record_stream: does nothing, because memory is freed when no tensor uses it."""


VirtualTensor.item = item_or_unknown
VirtualTensor.__float__ = float_or_unknown

HANDLERS: dict[torch._ops.OpOverloadPacket, Handler] = {
    aten.copy_: copy,
    aten._to_copy: to_copy,
    aten._local_scalar_dense: item,
    aten.record_stream: record_stream,
}
