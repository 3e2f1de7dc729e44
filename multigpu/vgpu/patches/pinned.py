"""Pinned memory: marked host memory. The host does not wait for non_blocking copies from it.

On a GPU a copy from pageable memory makes the host wait even with non_blocking=True; a copy
from pinned memory does not. Virtual GPUs need no pinned memory, so a pinned tensor is a copy
whose storage is marked.
"""

import torch

Tensor = torch.Tensor


def is_pinned(tensor: Tensor, device: torch.device | str | int | None = None) -> bool:
    """Whether the tensor, or the tensor that it is a view of, comes from pin_memory."""
    return tensor.device.type == "cpu" and hasattr(tensor.untyped_storage(), "pinned_for_vgpu")


def pin_memory(tensor: Tensor, device: torch.device | str | int | None = None) -> Tensor:
    """A copy in memory that counts as pinned; a pinned tensor is returned unchanged.

    Raises RuntimeError for a tensor that is not on the CPU.
    """
    if tensor.device.type != "cpu":
        raise RuntimeError(
            f"cannot pin '{tensor.device.type}' only dense CPU tensors can be pinned"
        )
    if is_pinned(tensor):
        return tensor
    copy = tensor.clone()
    copy.untyped_storage().pinned_for_vgpu = True
    return copy
