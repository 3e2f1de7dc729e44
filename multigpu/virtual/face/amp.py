"""torch.autocast("cuda"): C++ keeps the state of autocast by the inner device type."""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.patches.devices import FACE
from multigpu.virtual.patches.replacing import Row, Setting, rows, values
from multigpu.virtual.sim import names


def _by_inner_type(original: Callable) -> Callable:
    """The function with "cuda" translated; without a type it means CUDA, as in torch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device_type") == FACE:
            kwargs["device_type"] = names.INNER
        elif args and args[0] == FACE:
            args = (names.INNER, *args[1:])
        elif not kwargs and (not args or not isinstance(args[0], str)):
            args = (names.INNER, *args)
        return original(*args, **kwargs)

    return call


def _half_by_default() -> Callable[[], None]:
    """CUDA's autocast computes in float16 unless the program asks for another type."""
    before = torch._C.get_autocast_dtype(names.INNER)
    torch._C.set_autocast_dtype(names.INNER, torch.float16)
    return lambda: torch._C.set_autocast_dtype(names.INNER, before)


_WHY = "C++ keeps it by the inner device type"
_NAMES = (
    "is_autocast_enabled",
    "set_autocast_enabled",
    "get_autocast_dtype",
    "set_autocast_dtype",
)
ROWS: tuple[Row, ...] = (
    Setting("autocast's type for virtual GPUs", _half_by_default, "CUDA's default is float16"),
    *rows(["torch"], _NAMES, _by_inner_type, _WHY),
    *values(
        ["torch"],
        {
            "get_autocast_gpu_dtype": lambda: torch.get_autocast_dtype(FACE),
            "set_autocast_gpu_dtype": lambda dtype: torch.set_autocast_dtype(FACE, dtype),
        },
        _WHY,
    ),
    *rows(
        ("torch.amp", "torch.amp.autocast_mode"),
        ["is_autocast_available"],
        _by_inner_type,
        _WHY,
    ),
)
