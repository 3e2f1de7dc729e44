"""torch.use_deterministic_algorithms while virtual GPUs look like CUDA.

An operation without a deterministic kernel on CUDA raises torch's error, or warns. The list is
that of the function's documentation, and the names are those in torch's library for CUDA
(2.12). Three operations of the list are missing here, because they do have such a kernel:
- cumsum: an H100 with torch 2.11 computed it, and the library has no such name any more.
- ReflectionPad2d: the library has a second kernel, "reflection_pad2d_backward_det_out_kernel".
- Products of matrices: cuBLAS wanted CUBLAS_WORKSPACE_CONFIG in older versions of torch; the
  H100 computed them without it, and the library has no such message any more.
torch.nn.functional replaces some operations by others before they get here, such as the
bilinear mode of interpolate.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.sim import names

aten = torch.ops.aten
# Of an operation's (overload, arguments): whether this call is not deterministic.
Condition = Callable[[str, tuple], bool]
ISSUES = "https://github.com/pytorch/pytorch/issues"
REQUEST = (
    f"file an issue at {ISSUES} to help us prioritize adding deterministic support for this "
    f"operation."
)


def _always(overload: str, args: tuple) -> bool:
    return True


def _argument(position: int, *values: Any) -> Condition:
    """Whether the argument at `position` is one of the values."""
    return lambda overload, args: len(args) > position and args[position] in values


# What alertNotDeterministic gets in torch's kernels for CUDA.
NAMES: dict[torch._ops.OpOverloadPacket, tuple[str, Condition]] = {
    aten.avg_pool3d_backward: ("avg_pool3d_backward_cuda", _always),
    aten._adaptive_avg_pool2d_backward: ("adaptive_avg_pool2d_backward_cuda", _always),
    aten._adaptive_avg_pool3d_backward: ("adaptive_avg_pool3d_backward_cuda", _always),
    aten.adaptive_max_pool2d_backward: ("adaptive_max_pool2d_backward_cuda", _always),
    aten.adaptive_max_pool3d_backward: ("adaptive_max_pool3d_backward_cuda", _always),
    aten.fractional_max_pool2d_backward: ("fractional_max_pool2d_backward_cuda", _always),
    aten.fractional_max_pool3d_backward: ("fractional_max_pool3d_backward_cuda", _always),
    # From torch 2.13 on, torch.nn.functional no longer calls it in deterministic mode.
    aten.max_pool3d_with_indices_backward: ("max_pool3d_with_indices_backward_cuda", _always),
    aten.max_unpool2d: ("max_unpooling2d_forward_out", _always),
    aten.max_unpool3d: ("max_unpooling3d_forward_out", _always),
    aten.upsample_linear1d_backward: ("upsample_linear1d_backward_out_cuda", _always),
    aten.upsample_bilinear2d_backward: ("upsample_bilinear2d_backward_out_cuda", _always),
    aten.upsample_bicubic2d_backward: ("upsample_bicubic2d_backward_out_cuda", _always),
    aten.upsample_trilinear3d_backward: ("upsample_trilinear3d_backward_out_cuda", _always),
    aten._upsample_bilinear2d_aa_backward: (
        "upsample_bilinear2d_aa_backward_out_cuda",
        _always,
    ),
    aten._upsample_bicubic2d_aa_backward: ("upsample_bicubic2d_aa_backward_out_cuda", _always),
    aten.reflection_pad1d_backward: ("reflection_pad1d_backward_out_cuda", _always),
    aten.reflection_pad3d_backward: ("reflection_pad3d_backward_out_cuda", _always),
    aten.grid_sampler_2d_backward: ("grid_sampler_2d_backward_cuda", _always),
    aten.grid_sampler_3d_backward: ("grid_sampler_3d_backward_cuda", _always),
    # Of images, with the reductions "mean" (1) and "sum" (2).
    aten.nll_loss2d_forward: ("nll_loss2d_forward_out_cuda_template", _argument(3, 1, 2)),
    aten._ctc_loss_backward: ("ctc_loss_backward_gpu", _always),
    # The mode 2 is "max".
    aten._embedding_bag_backward: ("embedding_bag_backward_cuda_max", _argument(8, 2)),
    aten.put: ("put_", _always),
    aten.put_: ("put_", _always),
    aten.histc: (
        "_histc_cuda with floating point input",
        lambda overload, args: args[0].is_floating_point(),
    ),
    aten.bincount: (
        "_bincount_cuda",
        lambda overload, args: len(args) > 1 and args[1] is not None,
    ),
    # Without a dimension there are no indices.
    aten.median: ("median CUDA with indices output", lambda overload, args: len(args) > 1),
    aten.nanmedian: ("median CUDA with indices output", lambda overload, args: len(args) > 1),
    **dict.fromkeys(
        (aten.scatter_reduce, aten.scatter_reduce_),
        ("scatter_reduce_cuda_prod_", _argument(4, "prod")),
    ),
    # scatter(…, reduce="add") with a tensor as its source.
    **dict.fromkeys(
        (aten.scatter, aten.scatter_),
        ("scatter_reduce_cuda_kernel", lambda overload, args: overload.startswith("reduce")),
    ),
    **dict.fromkeys((aten.index_reduce, aten.index_reduce_), ("index_reduce_cuda", _always)),
}


def alerting(func: torch._ops.OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an operation in NAMES, with CUDA's alert before it."""
    name, is_not_deterministic = NAMES[func.overloadpacket]
    overload = func._schema.overload_name

    def run(*args: Any, **kwargs: Any) -> Any:
        # torch's function for programs is a call of Python around this one.
        is_wanted = torch._C._get_deterministic_algorithms()
        if not is_wanted or names.shown_type() == names.INNER:
            return kernel(*args, **kwargs)
        if is_not_deterministic(overload, args):
            _alert(name)
        # Some of the CPU's kernels would alert again.
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch._C._set_deterministic_algorithms(False)
        try:
            return kernel(*args, **kwargs)
        finally:
            torch._C._set_deterministic_algorithms(True, warn_only=warn_only)

    return run


def _alert(name: str) -> None:
    """Raise torch's RuntimeError for CUDA's kernel, or warn with warn_only=True."""
    start = f"{name} does not have a deterministic implementation, but you set "
    if torch.is_deterministic_algorithms_warn_only_enabled():
        call = "'torch.use_deterministic_algorithms(True, warn_only=True)'"
        warnings.warn(f"{start}{call}. You can {REQUEST}", stacklevel=_level())
        return
    raise RuntimeError(
        f"{start}'torch.use_deterministic_algorithms(True)'. You can turn off determinism "
        f"just for this operation, or you can use the 'warn_only=True' option, if that's "
        f"acceptable for your application. You can also {REQUEST}"
    )


def _level() -> int:
    """The stacklevel, for _alert, of the line that called the operation."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("multigpu."):
        level, frame = level + 1, frame.f_back
    return level
