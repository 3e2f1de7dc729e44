"""In which words does a virtual GPU refuse? In CUDA's, where CUDA has them."""

import os
from typing import Any

import torch

from multigpu.vgpu.ops.generator import place_of
from multigpu.vgpu.ops.op_info import INDEXING, Plan
from multigpu.vgpu.ops.tensor import VirtualTensor
from multigpu.vgpu.sim.machine import FORKED

Tensor = torch.Tensor


def needs_numbers(plan: Plan, tensors: list[VirtualTensor]) -> None:
    if any(tensor._payload.is_meta for tensor in tensors):
        raise RuntimeError(
            f"{plan.name} needs numbers, and the virtual GPUs were started with compute=False: "
            f"their tensors have shapes and no numbers."
        )


def mismatch(
    plan: Plan, func: Any, args: tuple, first: torch.device, second: torch.device
) -> RuntimeError:
    """CUDA's error for tensors of two devices in one operation, from TensorIterator or from a kernel's own check."""
    text = f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}!"
    if not plan.pointwise:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            values = value if isinstance(value, (list, tuple)) else (value,)
            if any(isinstance(v, Tensor) and v.device == second for v in values):
                text += f" (when checking argument for argument {argument.name} in method wrapper_VGPU_{plan.name})"
                break
    return RuntimeError(text)


def check_hosts(
    plan: Plan, func: Any, args: tuple, kwargs: dict, hosts: list[Tensor], device: torch.device
) -> None:
    """Refuse tensors of the host where CUDA does: all but numbers that are read, indices, and lengths."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if (
            argument.alias_info is not None
            and argument.alias_info.is_write
            and any(value is host for host in hosts)
        ):
            raise mismatch(plan, func, args, device, value.device)
    for out in map(kwargs.get, plan.outs):
        if any(out is host for host in hosts):
            raise mismatch(plan, func, args, device, out.device)
    if func.overloadpacket in INDEXING:
        if not isinstance(args[0], VirtualTensor):
            raise RuntimeError(
                f"indices should be either on {args[0].device} or on the same device as the indexed tensor ({args[0].device})"
            )
        values = args[2] if len(args) > 2 else None
        if (
            isinstance(values, Tensor)
            and values.dim() > 0
            and any(values is host for host in hosts)
        ):
            raise mismatch(plan, func, args, device, values.device)
    elif not plan.host_tensors:
        for host in hosts:
            if host.dim() > 0 or not plan.numbers:
                raise mismatch(plan, func, args, device, host.device)


def check_generator(given: torch.Generator, device: torch.device) -> None:
    """Refuse random numbers of another place, in torch's words."""
    place = place_of(given)
    if place.type != device.type:
        raise RuntimeError(
            f"Expected a '{device.type}' device type for generator but found '{place.type}'"
        )
    if place != device:
        raise RuntimeError(f"Expected a '{device}' generator device but found '{place}'")


def same_places(plan: Plan, func: Any, args: tuple) -> None:
    """A foreach operation works position by position: what stands at one position lies on one device."""
    first = args[0]
    for value in args[1:]:
        if isinstance(value, (list, tuple)) and len(value) == len(first):
            for one, other in zip(first, value, strict=True):
                if (
                    isinstance(other, Tensor)
                    and other.device != one.device
                    and (not other.is_cpu or other.dim() > 0)
                ):
                    raise mismatch(plan, func, args, one.device, other.device)


def host_is_full(plan: Plan, device: torch.device) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"{device.type} out of memory. {plan.name} on {device} needs more than this machine's own memory, where the numbers are."
    )


def stopped(tensor: VirtualTensor) -> RuntimeError:
    if tensor._block.meter.machine.process != os.getpid():
        return RuntimeError(FORKED)
    return RuntimeError(
        f"This tensor was on {tensor.device} of virtual GPUs that have been stopped: its numbers are gone. Make the tensor "
        f"again after vgpu.start()."
    )


def unsupported(plan: Plan, why: object) -> NotImplementedError:
    return NotImplementedError(
        f"Virtual GPUs cannot run the operation aten::{plan.name}: {str(why).splitlines()[0]}"
    )
