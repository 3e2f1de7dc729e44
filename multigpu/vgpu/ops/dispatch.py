"""How does an operation on virtual tensors run? On their payloads, after the checks that a GPU would make.

Each operation goes through the same steps: are all tensors on one device, run the kernel on the payloads, meter the
memory of what is new, tell the clock. Copies between devices are in transfer.py, kernels that the CPU does not have
in kernels.py.
"""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.vgpu.ops.errors import (
    check_generator,
    check_hosts,
    host_is_full,
    mismatch,
    needs_numbers,
    same_places,
    stopped,
    unsupported,
)
from multigpu.vgpu.ops.op_info import Plan
from multigpu.vgpu.ops.resizing import kept, own_payloads, refresh
from multigpu.vgpu.ops.shapes import payload_device, shapes_only
from multigpu.vgpu.ops.tensor import VirtualTensor, identity, place, wrap
from multigpu.vgpu.sim.machine import current
from multigpu.vgpu.sim.memory import Block, Meter

aten = torch.ops.aten
Tensor = torch.Tensor
MASKS = (torch.bool, torch.uint8)
DETACH = aten.detach.default
PLAIN = {
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
}
_plans: dict[int, Plan] = {}  # by the operation's identity: its own hash is computed in Python


def plan_of(func: torch._ops.OpOverload) -> Plan:
    plan = _plans.get(id(func))
    if plan is None:
        plan = _plans[id(func)] = Plan(func, view, decompose)
    return plan


# This is the hot path: every operation of a training step passes through it, so it is written for few steps of Python.
def dispatch(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Run one operation that has a virtual tensor, or a virtual device, among its arguments."""
    plan = _plans.get(id(func)) or plan_of(func)
    if plan.handler is not None:
        return plan.handler(func, args, kwargs)
    if plan.resizes:
        own_payloads((*args, *kwargs.values()))
    found: list[VirtualTensor] = []  # the virtual tensors among the arguments
    hosts: list[Tensor] = []  # and those of the host
    flat = []
    for value in args:
        kind = type(value)
        if kind is VirtualTensor:
            found.append(value)
            flat.append(value._payload)
        elif kind in PLAIN:
            flat.append(value)
        else:
            flat.append(_unwrap(value, found, hosts))
    if kwargs:
        kwargs = {key: _unwrap(value, found, hosts) for key, value in kwargs.items()}
        if (device := kwargs.get("device")) is not None and (
            not found or device != found[0].device
        ):
            return _elsewhere(plan, func, flat, kwargs, found)
        if device is not None:
            kwargs["device"] = found[0]._payload.device
    if not found:
        return _elsewhere(plan, func, flat, kwargs, found)
    meter = found[0]._block.meter
    for tensor in found:
        if tensor._block.meter is not meter and not plan.foreach:
            raise mismatch(plan, func, args, meter.device, tensor.device)
    if plan.foreach:
        same_places(plan, func, args)
    elif hosts:
        check_hosts(plan, func, args, kwargs, hosts, meter.device)
    return execute(plan, func, flat, kwargs, found, meter)


def execute(
    plan: Plan,
    func: Callable,
    flat: list,
    named: dict,
    found: list[VirtualTensor],
    meter: Meter,
) -> Any:
    """Run the kernel on payloads, meter what is new, tell the clock."""
    machine = meter.machine
    if not meter.alive:
        raise stopped(found[0])
    if machine.clock.pending:
        machine.clock.settle(found)
    if not machine.compute:
        flat, named = shapes_only(plan, flat, named, found)
    if plan.careful:
        out = _with_care(plan, func, flat, named, found, meter)
    else:
        try:
            out = plan.kernel(*flat, **named)
        except NotImplementedError as error:
            raise unsupported(plan, error) from None
        except RuntimeError as error:
            if "can't allocate memory" in str(error):
                raise host_is_full(plan, meter.device) from None
            raise
    blocks = meter.made
    if type(out) is Tensor:
        result = _wrapped(out, found, meter)
    elif isinstance(out, (tuple, list)):
        meters = (
            [tensor._block.meter for tensor in found[: len(out)]]
            if plan.foreach
            else [meter] * len(out)
        )
        pairs = zip(out, meters, strict=True)
        result = type(out)(
            [
                _wrapped(value, found, its) if isinstance(value, Tensor) else value
                for value, its in pairs
            ]
        )
    else:
        result = out
    # A view is a matter of the host: the device runs something only if there is new memory, or old memory is changed.
    if blocks != meter.made or plan.writes:
        machine.clock.compute(
            meter.index, plan.name, machine.costs.seconds(func, flat, named, found, out)
        )
    return result


def _wrapped(out: Tensor, found: list[VirtualTensor], meter: Meter) -> Tensor:
    """The virtual tensor for a result: the argument itself, a view on an argument, or a new one."""
    if out.is_sparse:
        key, nbytes = identity(out)
    else:
        storage = out.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
    for tensor in found:
        if tensor._block.key == key:
            return tensor if out is tensor._payload else _alias(out, tensor, found)
    return wrap(out, Block(meter, key, nbytes))


def _alias(out: Tensor, tensor: VirtualTensor, found: list[VirtualTensor]) -> Tensor:
    """A result that shares an argument's storage: another of the arguments, or a view."""
    for other in found:
        if out is other._payload:
            return other
    return wrap(out, tensor._block)


def view(func: Callable, args: tuple, kwargs: dict) -> Any:
    """An operation that gives a view, or views, on its first argument: no new memory, nothing for the device to do."""
    source = args[0]
    block = source._block
    if not block.meter.alive:
        raise stopped(source)
    if func is DETACH:
        return wrap(source._payload, block)  # own_payloads parts them if one changes its shape
    out = func._op(source._payload, *args[1:], **kwargs)
    if type(out) is Tensor:
        return wrap(out, block)
    return type(out)(wrap(value, block) for value in out)


def _elsewhere(
    plan: Plan, func: Callable, flat: list, kwargs: dict, found: list[VirtualTensor]
) -> Any:
    """The result goes to another device than the arguments' one, or there are no tensors among the arguments."""
    target = torch.device(kwargs.get("device") or "vgpu")
    if found and target.type != "vgpu":
        return func(*flat, **kwargs)
    return _create(plan, func, flat, kwargs, current().meter(target))


def decompose(func: Callable, args: tuple, kwargs: dict) -> Any:
    """An operation made of others, as `.to` and `linear`: autograd takes it apart, in inference mode it comes here."""
    return func.decompose(*args, **kwargs)


def _with_care(
    plan: Plan,
    func: Callable,
    flat: list,
    named: dict,
    found: list[VirtualTensor],
    meter: Meter,
) -> Any:
    """Run a kernel that makes the host wait, draws random numbers or changes shapes in place."""
    # Indexing has a result of unknown shape only with a mask.
    if plan.waits and not (
        func.overloadpacket is aten.index and all(t.dtype not in MASKS for t in found[1:])
    ):
        needs_numbers(plan, found)
        meter.machine.clock.synchronize(meter.index)
    outs = {id(named.get(name)) for name in plan.outs}
    before = (
        [kept(tensor._payload, id(tensor._payload) in outs) for tensor in found]
        if plan.resizes
        else []
    )
    try:
        out = (
            _random(plan, func, flat, named, meter)
            if plan.random
            else plan.kernel(*flat, **named)
        )
        for tensor in found if plan.resizes else ():
            refresh(tensor, found)
    except NotImplementedError as error:
        raise unsupported(plan, error) from None
    except (
        RuntimeError
    ) as error:  # OutOfMemoryError is one: a GPU has it before it changes anything
        for tensor, back in zip(found, before, strict=False):
            back()
            refresh(tensor, found)
        if "can't allocate memory" in str(error):
            raise host_is_full(plan, meter.device) from None
        raise
    return out


def _create(plan: Plan, func: Callable, flat: list, named: dict, meter: Meter) -> Any:
    """An operation that makes tensors from none on this device: empty, ones, arange, ones_like(device=…) …"""
    named = dict(named)
    named.pop("pin_memory", None)
    if (
        func is aten._efficientzerotensor.default
    ):  # zeros without a storage, for forward-mode derivatives
        func, plan = aten.zeros.default, plan_of(aten.zeros.default)
    named["device"] = meter.machine.payload
    size = flat[0] if flat and isinstance(flat[0], (list, tuple, torch.Size)) else None
    if size is not None and all(isinstance(n, int) for n in size):
        dtype, count = (
            named.get("dtype") or torch.get_default_dtype(),
            torch.Size(size).numel(),
        )
        named["device"] = payload_device(meter, dtype, count)
        meter.check(count * dtype.itemsize)
        meter.check_host(count * dtype.itemsize)
    out = _random(plan, func, flat, named, meter) if plan.random else func(*flat, **named)
    if not isinstance(out, Tensor):
        raise unsupported(plan, "it makes more than one tensor from none")
    if not plan.name.startswith(("empty", "new_empty")):
        meter.machine.clock.compute(
            meter.index, plan.name, meter.machine.costs.seconds(func, flat, named, [], out)
        )
    return place(out, meter)


def _random(plan: Plan, func: Callable, flat: list, named: dict, meter: Meter) -> Any:
    machine, arguments = meter.machine, func._schema.arguments
    place = next(
        (i for i, argument in enumerate(arguments) if argument.name == "generator"), None
    )
    if by_name := place is not None and arguments[place].kwarg_only:
        given = named.get("generator")
    else:
        given = flat[place] if place is not None and place < len(flat) else None
    if given is not None:
        check_generator(given, meter.device)
    elif by_name:
        named = {**named, "generator": machine.generators[meter.index]}
    if by_name or given is not None or not machine.compute:
        return func(*flat, **named)
    return machine.random(meter.index, func, flat, named)


def _unwrap(value: Any, found: list[VirtualTensor], hosts: list[Tensor]) -> Any:
    """The payload for a virtual tensor, also in lists; `found` and `hosts` collect what is met."""
    kind = type(value)
    if kind is VirtualTensor:
        found.append(value)
        return value._payload
    if kind in PLAIN:
        return value
    if kind is list or kind is tuple:
        if value and type(value[0]) is int:
            return value  # a shape, or a stride
        return kind([_unwrap(part, found, hosts) for part in value])
    if isinstance(value, Tensor):
        hosts.append(value)
    return value


def _torch_dispatch(
    cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
) -> Any:
    return dispatch(func, args, kwargs or {})


VirtualTensor.__torch_dispatch__ = classmethod(_torch_dispatch)
