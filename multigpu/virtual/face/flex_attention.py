"""torch.nn.attention.flex_attention: torch's own operations compute it, one after the other.

Its fused kernel, which torch.compile makes, needs Triton. Autograd records the operations:
the tensors that `score_mod` reads get their gradients, too.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from multigpu.virtual.left_out import say_once
from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.patches.devices import FACE
from multigpu.virtual.patches.replacing import Row, Setting

# Not torch._higher_order_ops.flex_attention, which is the operation of the same name.
MODULE = "torch._higher_order_ops.flex_attention"
AUTOGRAD = torch._C.DispatchKey.AutogradPrivateUse1
AUTOCAST = torch._C.DispatchKey.AutocastPrivateUse1
UNFUSED = (
    "flex_attention has no fused kernel: with operations one by one, it needs more time and "
    "memory than on a GPU."
)
Tensor = torch.Tensor


def _compute(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    say_once(UNFUSED)
    return import_module(MODULE).sdpa_dense(*args)


def _compute_in_autocast(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same with query, key and value in autocast's type, as on CUDA."""
    dtype = torch.get_autocast_dtype(FACE)
    parts = [part if part.dtype is torch.float64 else part.to(dtype) for part in args[:3]]
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(AUTOCAST)):
        return import_module(MODULE).flex_attention(*parts, *args[3:])


def _register() -> Callable[[], None]:
    operation = import_module(MODULE).flex_attention
    operation.py_impl(AUTOGRAD)(_compute)
    operation.py_impl(AUTOCAST)(_compute_in_autocast)
    # In inference mode, below autograd.
    operation.py_impl(VirtualTensor)(_compute)

    def restore() -> None:
        operation.py_kernels.pop(AUTOGRAD, None)
        operation.py_kernels.pop(AUTOCAST, None)
        operation.python_key_table.pop(VirtualTensor, None)

    return restore


ROWS: tuple[Row, ...] = (
    Setting(
        "how flex_attention is computed",
        _register,
        "torch knows how its own classes of tensors compute it, and refuses others",
    ),
)
