"""What is pinned memory here? Host memory that says it is pinned, so that a copy from it lets the host go on.

On a GPU a copy from pageable memory makes the host wait also with non_blocking=True; from pinned memory it does not. The
host of virtual GPUs has nothing to pin, so a pinned tensor is a copy whose storage is marked.
"""

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def is_pinned(tensor: Tensor, device: Any = None) -> bool:
    """Does the tensor, or the one that it is a view of, come from pin_memory?"""
    return tensor.device.type == "cpu" and hasattr(tensor.untyped_storage(), "pinned_for_vgpu")


def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    """A copy in memory that counts as pinned; a pinned tensor itself. Raises RuntimeError for a device's tensor."""
    if tensor.device.type != "cpu":
        raise RuntimeError(
            f"cannot pin '{tensor.device.type}' only dense CPU tensors can be pinned"
        )
    if is_pinned(tensor):
        return tensor
    copy = tensor.clone()
    copy.untyped_storage().pinned_for_vgpu = True
    return copy


def install() -> Callable[[], None]:
    """Put these in the place of torch's, which on this device type raise; calling what is returned takes them away."""
    if torch.cuda.is_available():
        return lambda: None  # there torch pins memory itself
    Tensor.pin_memory, Tensor.is_pinned = pin_memory, is_pinned

    def undo() -> None:
        del Tensor.pin_memory, Tensor.is_pinned  # torch's are those of Tensor's base class

    return undo
