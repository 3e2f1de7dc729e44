"""The errors that a GPU raises, in CUDA's wording if CUDA has the error."""

import os

import torch

from multigpu.vgpu.ops.generator import device_of
from multigpu.vgpu.ops.op_info import INDEXING, OpInfo
from multigpu.vgpu.ops.tensor import VirtualTensor
from multigpu.vgpu.sim.machine import FORKED

Tensor = torch.Tensor


def check_has_numbers(info: OpInfo, tensors: list[VirtualTensor]) -> None:
    """Raise RuntimeError if a tensor is a shape without numbers, as with compute=False."""
    if any(tensor._payload.is_meta for tensor in tensors):
        raise RuntimeError(
            f"{info.name} needs numbers, but with compute=False the tensors of virtual GPUs "
            f"have only shapes: start the virtual GPUs with compute=True."
        )


def device_mismatch_error(
    info: OpInfo,
    func: torch._ops.OpOverload,
    args: tuple,
    first: torch.device,
    second: torch.device,
) -> RuntimeError:
    """CUDA's error for tensors of two devices in one operation.

    Pointwise operations have TensorIterator's message. For other operations the message names
    the argument that is on the `second` device, as the messages of kernels do.
    """
    text = (
        f"Expected all tensors to be on the same device, but found at least two devices, "
        f"{first} and {second}!"
    )
    if info.pointwise:
        return RuntimeError(text)
    for argument, value in zip(func._schema.arguments, args, strict=False):
        values = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(v, Tensor) and v.device == second for v in values):
            text += (
                f" (when checking argument for argument {argument.name} "
                f"in method wrapper_VGPU_{info.name})"
            )
            break
    return RuntimeError(text)


def check_host_tensors(
    info: OpInfo,
    func: torch._ops.OpOverload,
    args: tuple,
    kwargs: dict,
    host_tensors: list[Tensor],
    device: torch.device,
) -> None:
    """Raise RuntimeError for a tensor of the host that CUDA does not accept.

    CUDA accepts a host tensor that is a number to read, indices, or lengths. `device` is the
    device of the other tensors.
    """
    for argument, value in zip(func._schema.arguments, args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and _is_in(value, host_tensors):
            raise device_mismatch_error(info, func, args, device, value.device)
    for name in info.out_names:
        out = kwargs.get(name)
        if _is_in(out, host_tensors):
            raise device_mismatch_error(info, func, args, device, out.device)
    if func.overloadpacket in INDEXING:
        if not isinstance(args[0], VirtualTensor):
            raise RuntimeError(
                f"indices should be either on {args[0].device} or on the same device as the "
                f"indexed tensor ({args[0].device})"
            )
        values = args[2] if len(args) > 2 else None
        if _is_in(values, host_tensors) and values.dim() > 0:
            raise device_mismatch_error(info, func, args, device, values.device)
    elif not info.takes_host_tensors:
        for host in host_tensors:
            if host.dim() > 0 or not info.takes_host_numbers:
                raise device_mismatch_error(info, func, args, device, host.device)


def _is_in(value: object, tensors: list[Tensor]) -> bool:
    """Whether the object itself is in the list; `in` would compare the tensors' elements."""
    return any(value is tensor for tensor in tensors)


def check_generator(generator: torch.Generator, device: torch.device) -> None:
    """Raise torch's RuntimeError if the generator does not belong to the device."""
    own = device_of(generator)
    if own.type != device.type:
        raise RuntimeError(
            f"Expected a '{device.type}' device type for generator but found '{own.type}'"
        )
    if own != device:
        raise RuntimeError(f"Expected a '{device}' generator device but found '{own}'")


def check_foreach_devices(info: OpInfo, func: torch._ops.OpOverload, args: tuple) -> None:
    """Raise RuntimeError if tensors at the same index in the lists are on two devices."""
    first = args[0]
    for value in args[1:]:
        if isinstance(value, (list, tuple)) and len(value) == len(first):
            for one, other in zip(first, value, strict=True):
                if not isinstance(other, Tensor) or other.device == one.device:
                    continue
                if not other.is_cpu or other.dim() > 0:
                    raise device_mismatch_error(info, func, args, one.device, other.device)


def host_out_of_memory_error(info: OpInfo, device: torch.device) -> torch.OutOfMemoryError:
    """The error for a kernel whose memory the host cannot allocate."""
    return torch.OutOfMemoryError(
        f"{device.type} out of memory. The host keeps the numbers of {device}, and "
        f"{info.name} needs more memory than the host has. Use smaller tensors, or "
        f"vgpu.start(compute=False)."
    )


def stopped_error(tensor: VirtualTensor) -> RuntimeError:
    """The error for a tensor of a stopped machine, or of a machine of the parent process."""
    if tensor._block.meter.machine.process != os.getpid():
        return RuntimeError(FORKED)
    return RuntimeError(
        f"This tensor was on {tensor.device}, and the virtual GPUs have been stopped since "
        f"then. Its values are lost: create it again after vgpu.start()."
    )


def unsupported_error(info: OpInfo, why: object) -> NotImplementedError:
    """The error for an operation that has no kernel on the CPU; `why` is the cause."""
    return NotImplementedError(
        f"Virtual GPUs cannot run the operation aten::{info.name}: {str(why).splitlines()[0]}"
    )
