"""torch.autocast("vgpu"): the dtype in which each operation computes.

torch has a kernel of autocast for CUDA, also in a CPU build, for each operation that it casts,
and does not say to which dtype. The lists below are in ATen/autocast_mode.h of torch 2.13; all
other operations compute in float32: losses, norms, sums, and functions that overflow easily.
torch applies this to its own devices only, so it is registered here for "vgpu".

As in torch (cached_cast in autocast_mode.cpp), a weight is cast once: its 16-bit copy is kept
until the program leaves the outermost autocast block.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.sim import names

Tensor = torch.Tensor
# Matrix products and convolutions compute in the 16-bit dtype.
LOWER_PRECISION = [
    "_convolution.deprecated",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "scaled_dot_product_attention",
]
# These compute in the widest dtype among their arguments.
WIDEST = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
]
# Of cuDNN's and CUDA's own kernels, which virtual GPUs do not call.
OF_CUDA = [
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_scaled_dot_product_flash_attention",
]
UNSAFE = "binary_cross_entropy"
# The 16-bit copies of weights by the weights' ids, each with a reference to the weight. One
# dict for the process, like torch's.
_copies: dict[int, tuple[weakref.ref, Tensor]] = {}
_AUTOCAST_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
# Returns the dtype in which a call computes, from the values of all its arguments.
ChooseDtype = Callable[[list], torch.dtype]


def register(everything: torch.library.Library, aten: torch.library.Library) -> None:
    """Register autocast for the device type: casts for the lists, none for other operations.

    `everything` is the library of all namespaces ("_"), and `aten` is the library of torch's
    operations.
    """
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    known = {*LOWER_PRECISION, *WIDEST, *OF_CUDA, UNSAFE}
    of_cuda = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    # Other packages, such as torchvision, have operations of their own there.
    of_torch = (name for name in of_cuda if name.startswith("aten::"))
    float32 = {name.removeprefix("aten::") for name in of_torch} - known
    lists = ((LOWER_PRECISION, _autocast_dtype), (float32, _float32), (WIDEST, _widest))
    for operations, choose_dtype in lists:
        for name in operations:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(name, _with_casts(func, choose_dtype), "AutocastPrivateUse1")
    aten.impl(UNSAFE, _refuse, "AutocastPrivateUse1")


def _refuse(*args: Any, **kwargs: Any) -> None:
    """Raise RuntimeError, in torch's wording: the logarithms would overflow in float16."""
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
        "autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using "
        "torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and "
        "BCEWithLogits are\n"
        "safe to autocast."
    )


def _with_casts(func: torch._ops.OpOverload, choose_dtype: ChooseDtype) -> Callable:
    """A kernel that casts its arguments and then calls `func` without autocast."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEY):
            dtype = choose_dtype([*args, *kwargs.values()])
            return func(
                *(_cast(value, dtype) for value in args),
                **{name: _cast(value, dtype) for name, value in kwargs.items()},
            )

    return kernel


def _autocast_dtype(values: list) -> torch.dtype:
    return torch.get_autocast_dtype("vgpu")


def _float32(values: list) -> torch.dtype:
    return torch.float32


def _widest(values: list) -> torch.dtype:
    dtypes = {
        value.dtype
        for value in values
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("vgpu")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The argument, cast if it is a vgpu tensor of a floating dtype other than float64."""
    if isinstance(value, Tensor):
        castable = (
            value.is_floating_point()
            and value.dtype is not torch.float64
            and names.is_virtual(value.device)
        )
        if not castable or value.dtype is dtype:
            return value
        return _cast_once(value, dtype) if _is_weight(value, dtype) else value.to(dtype)
    if type(value) in (list, tuple):
        return type(value)(_cast(part, dtype) for part in value)
    return value


def _is_weight(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch keeps the copy: of a leaf in float32 that needs a gradient."""
    return (
        value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and dtype is torch.get_autocast_dtype("vgpu")
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    )


def _cast_once(weight: Tensor, dtype: torch.dtype) -> Tensor:
    reference, copy = _copies.get(id(weight), (lambda: None, None))
    if reference() is not weight:
        # With its graph also under no_grad: a later use in the block can need the gradient.
        with torch.enable_grad():
            copy = weight.to(dtype)
        _copies[id(weight)] = (weakref.ref(weight), copy)
    return copy


def clearing(original: Callable[[], None]) -> Callable[[], None]:
    """torch.clear_autocast_cache, which torch calls at the end of the outermost block."""

    def clear_autocast_cache() -> None:
        _copies.clear()
        original()

    return clear_autocast_cache
