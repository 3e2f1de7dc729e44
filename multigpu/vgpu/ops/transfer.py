"""How do numbers move? To a device, from it, between two: copies, and the places where the host has to wait."""

from typing import Any

import torch

from multigpu.vgpu.ops.dispatch import execute, plan_of
from multigpu.vgpu.ops.errors import needs_numbers, stopped
from multigpu.vgpu.ops.op_info import HANDLERS
from multigpu.vgpu.ops.shapes import forget, payload_device
from multigpu.vgpu.ops.tensor import VirtualTensor, follow, place
from multigpu.vgpu.sim.clock import HOST
from multigpu.vgpu.sim.machine import current
from multigpu.vgpu.sim.memory import Meter

aten = torch.ops.aten


def meter_of(tensor: torch.Tensor) -> Meter | None:
    """The meter of a tensor's device, None on the host."""
    if type(tensor) is not VirtualTensor:
        return None
    if not tensor._block.meter.alive:
        raise stopped(tensor)
    meter = tensor._block.meter
    if meter.machine.clock.pending:
        meter.machine.clock.settle([tensor])
    if not meter.machine.compute:
        follow(tensor)
    return meter


def copy(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """aten::copy_(destination, source): within a device, between two, from the host or to it."""
    destination, source = args[0], args[1]
    non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    to, origin = meter_of(destination), meter_of(source)
    if origin is None and source.is_meta and to.machine.compute:
        raise NotImplementedError(
            "Cannot copy out of meta tensor; no data!"
        )  # torch's sentence: Module.to adds to it
    if to is origin:
        execute(
            plan_of(func),
            func,
            [destination._payload, source._payload],
            {},
            [destination, source],
            to,
        )
        return destination
    if to is None:
        needs_numbers(plan_of(func), [source])
        destination.copy_(source._payload)
    else:
        payload = source if origin is None else source._payload
        if payload.is_meta:
            forget(destination)
        if not destination._payload.is_meta:
            destination._payload.copy_(payload)
    _move(origin, to, source, non_blocking)
    return destination


def to_copy(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """aten::_to_copy(source, dtype=…, device=…): what `.to`, `.cpu` and `.half` become."""
    source, origin = args[0], meter_of(args[0])
    named = {
        key: value
        for key, value in kwargs.items()
        if key not in ("device", "pin_memory", "non_blocking")
    }
    device = kwargs.get("device")
    device = source.device if device is None else torch.device(device)
    to = current().meter(device) if device.type == "vgpu" else None
    if to is origin:  # only the type or the memory format changes
        return execute(plan_of(func), func, [source._payload], named, [source], origin)
    if to is None:
        needs_numbers(plan_of(func), [source])
        moved = func(source._payload, **named, device=device)
    else:
        dtype = named.get("dtype") or source.dtype
        nbytes = source.numel() * dtype.itemsize
        to.check(nbytes)
        to.check_host(nbytes)
        payload = source if origin is None else source._payload
        there = (
            torch.device("meta")
            if payload.is_meta
            else payload_device(to, dtype, source.numel())
        )
        moved = place(func(payload, **named, device=there), to)
    _move(origin, to, source, bool(kwargs.get("non_blocking", False)))
    return moved


def _move(
    origin: Meter | None, to: Meter | None, source: torch.Tensor, non_blocking: bool
) -> None:
    """Tell the clock. As with CUDA the host waits for a copy from or to it, unless it is non_blocking.

    From the host that takes pinned memory; to the host torch itself pins the destination.
    """
    if origin is None:
        non_blocking = non_blocking and source.is_pinned()
    ends = (HOST if origin is None else origin.index, HOST if to is None else to.index)
    nbytes = source.numel() * source.element_size()
    (to or origin).machine.clock.transfer(
        *ends, nbytes, wait=HOST in ends and not non_blocking
    )


def item(func: Any, args: tuple, kwargs: dict) -> Any:
    """aten::_local_scalar_dense: `.item()`. The host waits for the device, then for the number."""
    meter = meter_of(args[0])
    needs_numbers(plan_of(func), [args[0]])
    _move(meter, None, args[0], non_blocking=False)
    return func(args[0]._payload)


def record_stream(func: Any, args: tuple, kwargs: dict) -> None:
    """aten::record_stream: memory is given back only when nobody uses it any more, so there is nothing to remember."""


HANDLERS.update(
    {
        aten.copy_: copy,
        aten._to_copy: to_copy,
        aten._local_scalar_dense: item,
        aten.record_stream: record_stream,
    }
)
