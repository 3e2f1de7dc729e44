"""Executes an operation on virtual tensors: makes the checks of a GPU, runs the kernel on the
payloads, allocates memory for new tensors, and adds the simulated time.

transfer.py has the copies between devices, kernels.py the kernels that the CPU lacks, and
repeats.py the results on shapes that need no kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch

from multigpu.virtual.ops import device_asserts, repeats
from multigpu.virtual.ops.errors import (
    check_foreach_devices,
    check_generator,
    check_has_numbers,
    check_host_tensors,
    check_storages,
    device_mismatch_error,
    host_out_of_memory_error,
    stopped_error,
    unsupported_error,
)
from multigpu.virtual.ops.op_info import RESIZERS, OpInfo
from multigpu.virtual.ops.resizing import detach_payloads, snapshot, update_wrapper
from multigpu.virtual.ops.shapes import payload_device, shapes_only
from multigpu.virtual.ops.tensor import VirtualTensor, storage_id, wrap, wrap_new, wrap_view
from multigpu.virtual.sim import names
from multigpu.virtual.sim.host_thread import NO_BACKWARD
from multigpu.virtual.sim.machine import current
from multigpu.virtual.sim.memory import Block, Meter

aten = torch.ops.aten
Tensor = torch.Tensor
OpOverload = torch._ops.OpOverload
STRIDED = torch.strided
is_inference_mode_enabled = torch.is_inference_mode_enabled
MASK_TYPES = (torch.bool, torch.uint8)
DETACH = aten.detach.default
_graph_task = torch._C._current_graph_task_id
# Arguments of these types are passed to the kernel unchanged.
PLAIN_TYPES = repeats.SETTINGS | {torch.Size}
# A cache for the life of the process, because the operations' schemas do not change. The keys
# are the ids of the operations, because hashing an operation runs Python code.
_infos: dict[int, OpInfo] = {}


def info_of(func: OpOverload) -> OpInfo:
    """The operation's OpInfo, from the cache."""
    info = _infos.get(id(func))
    if info is None:
        info = _infos[id(func)] = OpInfo(func, view, decompose)
    return info


# The hot path: each operation of a training step runs it, so it has few steps of Python.
def dispatch(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Execute one operation that has a virtual tensor, or a virtual device, as an argument."""
    info = _infos.get(id(func)) or info_of(func)
    if info.handler is not None:
        return info.handler(func, args, kwargs)
    if info.resizes:
        detach_payloads((*args, *kwargs.values()))
    tensors: list[VirtualTensor] = []
    host_tensors: list[Tensor] = []
    payloads = []
    for value in args:
        kind = type(value)
        if kind is VirtualTensor:
            tensors.append(value)
            payloads.append(value._payload)
        elif kind in PLAIN_TYPES:
            payloads.append(value)
        else:
            payloads.append(_unwrap(value, tensors, host_tensors))
    if kwargs:
        kwargs = {
            name: _unwrap(value, tensors, host_tensors) for name, value in kwargs.items()
        }
        device = kwargs.get("device")
        if device is not None:
            if not tensors or names.hide(device) != tensors[0]._block.meter.inner_device:
                return _on_other_device(info, func, payloads, kwargs, tensors)
            kwargs["device"] = tensors[0]._payload.device
    if not tensors:
        return _on_other_device(info, func, payloads, kwargs, tensors)
    meter = tensors[0]._block.meter
    for tensor in tensors:
        if tensor._block.meter is not meter and not info.foreach:
            raise device_mismatch_error(info, func, args, meter.device, tensor.device)
    if info.foreach:
        check_foreach_devices(info, func, args)
    elif host_tensors:
        check_host_tensors(info, func, args, kwargs, host_tensors, meter.device)
    return execute(info, func, payloads, kwargs, tensors, meter)


def execute(
    info: OpInfo,
    func: OpOverload,
    payloads: list,
    kwargs: dict,
    tensors: list[VirtualTensor],
    meter: Meter,
) -> Any:
    """Run the kernel, allocate memory for new results, and add the operation to the clock.

    `tensors` are the virtual tensors among the arguments. `payloads` and `kwargs` are the
    arguments, with payloads in the place of the virtual tensors. `meter` is the device's
    meter. Returns the result as virtual tensors.
    """
    machine = meter.machine
    clock = machine.clock
    if not meter.alive:
        raise stopped_error(tensors[0])
    if clock.pending:
        clock.wait_for_collectives(tensors)
    if meter.shrunk and func.overloadpacket not in RESIZERS:
        check_storages(tensors)
    if not machine.compute:
        payloads, kwargs = shapes_only(info, payloads, kwargs, tensors)
    try:
        if info.special:
            out = _run_special(info, func, payloads, kwargs, tensors, meter)
        elif machine.compute:
            out = info.kernel(*payloads, **kwargs)
        else:
            out = repeats.run(info, payloads, kwargs)
    except NotImplementedError as error:
        raise unsupported_error(info, error) from None
    except (IndexError, RuntimeError) as error:
        if "can't allocate memory" in str(error):
            raise host_out_of_memory_error(info, meter.device) from None
        if not device_asserts.asserts(info, error):
            raise
        out = device_asserts.results(info, payloads, kwargs, tensors, meter, str(error))
    allocations_before = meter.num_allocations
    if type(out) is Tensor:
        result = _wrap_result(out, tensors, meter)
    elif isinstance(out, (tuple, list)):
        if info.foreach:
            meters = [tensor._block.meter for tensor in tensors[: len(out)]]
        else:
            meters = [meter] * len(out)
        result = type(out)(
            [
                _wrap_result(part, tensors, part_meter) if isinstance(part, Tensor) else part
                for part, part_meter in zip(out, meters, strict=True)
            ]
        )
    else:
        result = out
    if info.uses_cublas and meter.has_workspaces:
        # As on CUDA, after the result. The main thread's stream stands for another thread's.
        stream = clock.main_thread.streams[meter.index].number
        workspace = (_graph_task() != NO_BACKWARD, stream)
        if workspace not in meter.workspaces:
            meter.add_workspace(workspace)
    # The host alone makes a view, and an empty tensor. The device has work only if a kernel
    # writes new or existing memory.
    if not info.empty and (allocations_before != meter.num_allocations or info.writes):
        costs = meter.costs.seconds(func, payloads, kwargs, tensors, out)
        several = isinstance(out, (tuple, list)) and out and not info.foreach
        first = out[0] if several else out
        shape = tuple(first.shape) if type(first) is Tensor else None
        clock.compute(meter.index, info.name, *costs, shape)
    return result


def _wrap_result(out: Tensor, tensors: list[VirtualTensor], meter: Meter) -> Tensor:
    """The virtual tensor of a result: an argument itself, a view of one, or a new tensor."""
    if out.layout is not STRIDED:
        key, nbytes = storage_id(out)
    else:
        storage = out.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
    for tensor in tensors:
        if tensor._block.key == key:
            return tensor if out is tensor._payload else _alias(out, tensor, tensors)
    return wrap(out, Block(meter, key, nbytes))


def _alias(out: Tensor, tensor: VirtualTensor, tensors: list[VirtualTensor]) -> Tensor:
    """A result that shares the storage of `tensor`: another argument, or a view."""
    for other in tensors:
        if out is other._payload:
            return other
    return wrap_view(out, tensor._block)


def view(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Handler of an operation that returns a view, or views, of its first argument.

    The operation allocates no memory, and the device has no work.
    """
    source = args[0]
    block = source._block
    # CUDA's driver has no part in a view, so it does not raise after a device-side assert.
    if not block.meter.alive and not block.meter.asserted:
        raise stopped_error(source)
    # Both tensors share one payload after detach, until detach_payloads separates them.
    out = source._payload if func is DETACH else func._op(source._payload, *args[1:], **kwargs)
    if is_inference_mode_enabled() and not source.is_inference():
        # Such a view shares the version of its source, which an inference tensor cannot.
        with torch.inference_mode(False):
            return _wrap_views(out, block)
    return _wrap_views(out, block)


def _wrap_views(out: Tensor | Sequence[Tensor], block: Block) -> Any:
    if type(out) is Tensor:
        return wrap_view(out, block)
    return type(out)(wrap_view(value, block) for value in out)


def decompose(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Handler of an operation that is composed of others, such as `.to` and `linear`.

    Autograd decomposes such an operation itself, so this runs only in inference mode.
    """
    return func.decompose(*args, **kwargs)


def _on_other_device(
    info: OpInfo,
    func: OpOverload,
    payloads: list,
    kwargs: dict,
    tensors: list[VirtualTensor],
) -> Any:
    """Execute an operation without virtual tensors, or with a result on another device."""
    target = torch.device(kwargs.get("device") or "vgpu")
    if tensors and not names.is_virtual(target):
        return func(*payloads, **kwargs)
    return _create(info, func, payloads, kwargs, current().meter(target))


def _run_special(
    info: OpInfo,
    func: OpOverload,
    payloads: list,
    kwargs: dict,
    tensors: list[VirtualTensor],
    meter: Meter,
) -> Any:
    """Run a kernel that makes the host wait, draws random numbers, or changes shapes in place.

    If the kernel raises, the arguments are restored, because a GPU would run out of memory
    before it changed them.
    """
    if info.host_waits and not has_known_shape(func, tensors):
        if meter.asserted:
            raise meter.assert_error()
        check_has_numbers(info, tensors)
        meter.machine.clock.synchronize_stream(meter.index)
    restore = []
    if info.resizes:
        outs = {id(kwargs.get(name)) for name in info.out_names}
        restore = [
            snapshot(tensor._payload, with_numbers=id(tensor._payload) in outs)
            for tensor in tensors
        ]
    try:
        if info.random:
            out = _random(func, payloads, kwargs, meter)
        elif meter.machine.compute:
            out = info.kernel(*payloads, **kwargs)
        else:
            out = repeats.run(info, payloads, kwargs)
        if info.resizes:
            for tensor in tensors:
                update_wrapper(tensor, tensors)
        if info.temporary:
            meter.use_briefly(payloads[0].nbytes + out.nbytes)
    except (IndexError, RuntimeError):
        # torch.OutOfMemoryError is a RuntimeError, too.
        for tensor, restore_payload in zip(tensors, restore, strict=False):
            restore_payload()
            update_wrapper(tensor, tensors)
        raise
    return out


def has_known_shape(func: OpOverload, tensors: Sequence[Tensor]) -> bool:
    """Whether the host knows the result's shape: True only for indexing without a mask.

    `tensors` are those among the arguments, in their order.
    """
    return func.overloadpacket is aten.index and all(
        tensor.dtype not in MASK_TYPES for tensor in tensors[1:]
    )


def _create(info: OpInfo, func: OpOverload, args: list, kwargs: dict, meter: Meter) -> Any:
    """Execute an operation that makes a tensor on a device where it has no arguments.

    Such operations are factory functions: empty, ones, arange, and also
    ones_like(tensor, device=…). Raises torch.OutOfMemoryError if the tensor does not fit.
    """
    if not meter.alive:
        raise meter.assert_error()
    kwargs = dict(kwargs)
    kwargs.pop("pin_memory", None)
    if func is aten._efficientzerotensor.default:
        # Zeros without a storage, for forward-mode derivatives.
        func = aten.zeros.default
        info = info_of(func)
    kwargs["device"] = meter.machine.payload_device
    size = args[0] if args and isinstance(args[0], (list, tuple, torch.Size)) else None
    if size is not None and all(isinstance(n, int) for n in size):
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        count = torch.Size(size).numel()
        kwargs["device"] = payload_device(meter, dtype, count)
        meter.check_capacity(count * dtype.itemsize)
        meter.check_host(count * dtype.itemsize)
    out = _random(func, args, kwargs, meter) if info.random else func(*args, **kwargs)
    if not isinstance(out, Tensor):
        raise unsupported_error(
            info, "it returns several tensors and has no virtual tensor as an argument"
        )
    if not info.empty:
        costs = meter.costs.seconds(func, args, kwargs, [], out)
        meter.machine.clock.compute(meter.index, info.name, *costs, tuple(out.shape))
    return wrap_new(out, meter)


def _random(func: OpOverload, args: list, kwargs: dict, meter: Meter) -> Any:
    """Call an operation that draws random numbers, with its generator or the device's.

    Raises RuntimeError for a generator of another device.
    """
    machine = meter.machine
    position, keyword_only = _generator_argument(func)
    if keyword_only:
        generator = kwargs.get("generator")
    elif position is not None and position < len(args):
        generator = args[position]
    else:
        generator = None
    if generator is not None:
        check_generator(generator, meter.device)
    elif keyword_only:
        kwargs = {**kwargs, "generator": machine.generators[meter.index]}
    if keyword_only or generator is not None or not machine.compute:
        return func(*args, **kwargs)
    return machine.random(meter.index, func, args, kwargs)


def _generator_argument(func: OpOverload) -> tuple[int | None, bool]:
    """(position of the argument `generator` or None, whether it is keyword-only)."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "generator":
            return position, argument.kwarg_only
    return None, False


def _unwrap(value: Any, tensors: list[VirtualTensor], host_tensors: list[Tensor]) -> Any:
    """An argument with payloads in the place of virtual tensors, also inside lists.

    Adds the virtual tensors to `tensors` and the others to `host_tensors`.
    """
    kind = type(value)
    if kind is VirtualTensor:
        tensors.append(value)
        return value._payload
    if kind in PLAIN_TYPES:
        return value
    if kind is list or kind is tuple:
        if value and type(value[0]) is int:
            # A shape, or strides.
            return value
        return kind([_unwrap(part, tensors, host_tensors) for part in value])
    if isinstance(value, Tensor):
        host_tensors.append(value)
    return value


def _torch_dispatch(
    cls: type,
    func: OpOverload,
    types: Sequence[type],
    args: tuple = (),
    kwargs: dict | None = None,
) -> Any:
    if len(types) > 1:
        # A wrapper of another class, such as DTensor, knows what to do with a virtual tensor.
        return NotImplemented
    return dispatch(func, args, kwargs or {})


VirtualTensor.__torch_dispatch__ = classmethod(_torch_dispatch)
