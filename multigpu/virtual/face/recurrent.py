"""Recurrent layers: their errors name devices as programs do.

torch checks their devices in C++, before any operation of a virtual GPU is called.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from multigpu.virtual.patches.devices import FACE
from multigpu.virtual.patches.replacing import Replacement, Row
from multigpu.virtual.sim import names


def _shown(original: Callable) -> Callable:
    """A layer of torch._VF whose errors name devices as programs do."""

    @wraps(original)
    def layer(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            inner, shown = f" {names.INNER}:", f" {FACE}:"
            error.args = tuple(str(part).replace(inner, shown) for part in error.args)
            raise

    return layer


ROWS: tuple[Row, ...] = tuple(
    Replacement("torch._VF", name, _shown, "C++ writes its own name of a device")
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
)
