"""Operations without a tensor: torch.ones(2, device="cuda") makes a virtual tensor.

torch's dispatcher takes such a call to the kernels of CUDA. A CPU build of torch has none, so
a fallback for CUDA gets all of them. A CUDA build without a driver has kernels of its own for
a few operations, which would look for the driver: these are replaced.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.ops import op_info
from multigpu.virtual.ops.dispatch import dispatch
from multigpu.virtual.patches.replacing import Row, Setting

# The operations that take no tensor and for which a CUDA build has a kernel of its own; the
# other factory functions call these.
OWN_KERNELS = (
    "empty.memory_format",
    "empty_strided",
    "_efficientzerotensor",
    "tril_indices",
    "triu_indices",
)


def _fallback() -> Callable[[], None]:
    """Send the operations of CUDA devices to the virtual GPUs."""
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: dispatch(func, args, kwargs), "CUDA")
    return library._destroy


def _own_kernels() -> Callable[[], None]:
    """Replace a CUDA build's kernels of OWN_KERNELS; return a function that restores them."""
    library = torch.library.Library("aten", "IMPL")
    for name in OWN_KERNELS:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")

        def kernel(*args: Any, func: Any = func, **kwargs: Any) -> Any:
            return dispatch(func, args, kwargs)

        with warnings.catch_warnings():
            # A CUDA build of torch 2.11 and 2.12 warns that a kernel of its own is replaced.
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            library.impl(name, kernel, "CUDA")
    op_info.DISPATCHING_KERNELS.update(library._op_impls)
    return library._destroy


def has_cuda_kernels() -> bool:
    """Whether this is a CUDA build of torch."""
    return bool(torch._C._has_cuda)


ROWS: tuple[Row, ...] = (
    Setting(
        "the dispatcher's fallback for CUDA",
        _fallback,
        "torch.ones(2, device='cuda') does not reach a tensor's __torch_dispatch__",
    ),
    Setting(
        "CUDA's kernels of empty, empty_strided, _efficientzerotensor, tril_indices and "
        "triu_indices",
        _own_kernels,
        "a CUDA build has kernels for them, which would ask for a driver",
        when=has_cuda_kernels,
    ),
)
