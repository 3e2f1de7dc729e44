"""In which words does a virtual GPU refuse? In CUDA's, where CUDA has them."""

from typing import Any

import torch

from multigpu.vgpu.plans import Plan
from multigpu.vgpu.tensor import VirtualTensor

Tensor = torch.Tensor


def needs_numbers(plan: Plan, tensors: list[VirtualTensor]) -> None:
    if any(tensor._payload.is_meta for tensor in tensors):
        raise RuntimeError(
            f"{plan.name} needs numbers, and the virtual GPUs were started with compute=False: "
            f"their tensors have shapes and no numbers."
        )


def mismatch(plan: Plan, func: Any, args: tuple, first: torch.device, second: torch.device) -> RuntimeError:
    """CUDA's error for tensors of two devices in one operation, from TensorIterator or from a kernel's own check."""
    text = f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}!"
    if not plan.pointwise:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            values = value if isinstance(value, (list, tuple)) else (value,)
            if any(isinstance(v, Tensor) and v.device == second for v in values):
                text += f" (when checking argument for argument {argument.name} in method wrapper_VGPU_{plan.name})"
                break
    return RuntimeError(text)


def stopped(tensor: VirtualTensor) -> RuntimeError:
    return RuntimeError(
        f"This tensor was on {tensor.device} of virtual GPUs that have been stopped: its numbers are gone. Make the tensor "
        f"again after vgpu.start()."
    )


def unsupported(plan: Plan, why: object) -> NotImplementedError:
    return NotImplementedError(f"Virtual GPUs cannot run the operation aten::{plan.name}: {str(why).splitlines()[0]}")
