"""torch.to_dlpack raises an error for a virtual GPU's tensor, which has no memory to share."""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.ops.unknown_tensor import UnknownTensor


def refusing(original: Callable) -> Callable:
    """torch.to_dlpack, which asks no class and would hand out an address of nothing."""

    def to_dlpack(tensor: torch.Tensor) -> Any:
        refused = type(tensor) in (VirtualTensor, UnknownTensor)
        return tensor.__dlpack__() if refused else original(tensor)

    return to_dlpack
