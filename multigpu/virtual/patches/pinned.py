"""Pinned memory: marked host memory. The host does not wait for non_blocking copies from it.

On a GPU a copy from pageable memory makes the host wait even with non_blocking=True; a copy
from pinned memory does not. Virtual GPUs need no pinned memory, so a pinned tensor is a copy
whose storage is marked.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.utils import _device

from multigpu.virtual.ops.errors import check_generator
from multigpu.virtual.ops.generator import VirtualGenerator
from multigpu.virtual.ops.storage import is_marked_as_pinned, mark_as_pinned
from multigpu.virtual.patches.scripting import compiled_as

Tensor = torch.Tensor
# The functions of torch with an argument `pin_memory` that programs use; torch.tensor also has
# it (current_device.py).
FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "empty_strided",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "zeros",
    "zeros_like",
)


def is_pinned(tensor: Tensor, device: torch.device | str | int | None = None) -> bool:
    """Whether the tensor, or the tensor that it is a view of, comes from pin_memory."""
    return tensor.device.type == "cpu" and is_marked_as_pinned(tensor)


def pin_memory(tensor: Tensor, device: torch.device | str | int | None = None) -> Tensor:
    """A copy in memory that counts as pinned; a pinned tensor is returned unchanged.

    Raises RuntimeError for a tensor that is not on the CPU.
    """
    if tensor.device.type != "cpu":
        raise RuntimeError(
            f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned"
        )
    if is_pinned(tensor):
        return tensor
    return mark_as_pinned(tensor.clone())


# Cached, because `compiled_as` wants the replacement to stay.
@cache
def pinning(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One of FACTORIES, whose `pin_memory=True` needs no accelerator's allocator.

    It raises torch's RuntimeError for pinned memory on another device than the CPU, and for
    random numbers of the host from a virtual GPU's generator.
    """
    # torch makes the set of its constructors at the first use, which must find the originals.
    _device._device_constructors()

    @wraps(original)
    def factory(*args: Any, pin_memory: bool | None = False, **kwargs: Any) -> Tensor:
        made = original(*args, **kwargs)
        generator = kwargs.get("generator")
        if type(generator) is VirtualGenerator:
            # To torch's kernels of the host, it is a generator of the host.
            check_generator(generator, made.device)
        if not pin_memory:
            return made
        if made.device.type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return mark_as_pinned(made)

    return compiled_as(original, factory)
