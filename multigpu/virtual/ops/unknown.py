"""A number that was not computed: what `.item()` returns if tensors have shapes only.

A program can print it, log it and compute with it. If the program decides by it (`if loss <
1`, `int(loss)`), that raises an error which names the program's line.
"""

import re
from collections.abc import Callable
from typing import Any, NoReturn

from multigpu.virtual.ops.errors import no_numbers_error

TEXT = "unknown"
# A format's fill, alignment and width. What follows them is for numbers.
PLACE = re.compile(r"((?:.?[<>=^])?)[-+ ]?z?#?0?(\d*)")


class Unknown(float):
    """A float whose value is not known; as a plain float it is NaN."""

    __slots__ = ()

    def __new__(cls, *ignored: object) -> "Unknown":
        return super().__new__(cls, "nan")

    def __repr__(self) -> str:
        return TEXT

    def __format__(self, spec: str) -> str:
        alignment, width = PLACE.match(spec).groups()
        return format(TEXT, alignment.replace("=", ">") + width)

    def __reduce__(self) -> tuple:
        return Unknown, ()

    def __hash__(self) -> int:
        return id(self)


def _computed(self: Unknown, *operands: Any) -> Any:
    """The result of arithmetic with an unknown number is unknown."""
    if all(isinstance(operand, (int, float, type(None))) for operand in operands):
        return Unknown()
    # A tensor or an array knows what to do with a float.
    return NotImplemented


def _decided(use: str) -> Callable[..., NoReturn]:
    """A method that raises the error of `use`: "a comparison", "int()"."""

    def decide(self: Unknown, *operands: Any) -> NoReturn:
        raise no_numbers_error(use)

    return decide


_ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow",
    "radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow",
    "neg", "pos", "abs", "round",
)  # fmt: skip
_DECISIONS = {
    "eq": "a comparison",
    "ne": "a comparison",
    "lt": "a comparison",
    "le": "a comparison",
    "gt": "a comparison",
    "ge": "a comparison",
    "bool": "a decision",
    "int": "int()",
    "trunc": "trunc()",
    "floor": "floor()",
    "ceil": "ceil()",
}
for _name in _ARITHMETIC:
    setattr(Unknown, f"__{_name}__", _computed)
for _name, _use in _DECISIONS.items():
    setattr(Unknown, f"__{_name}__", _decided(_use))
