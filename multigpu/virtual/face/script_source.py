"""torch.jit.script: what a function's source says of CUDA is compiled for virtual GPUs.

TorchScript runs in C++, where a virtual GPU's type is "vgpu". So the texts "cuda" and "cuda:1"
in a source become "vgpu" and "vgpu:1", `x.is_cuda` becomes `x.device.type == "vgpu"`, and
`x.cuda()` becomes `x.to("vgpu")`. A device that a scripted function prints is still "vgpu:0".
"""

import ast
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._C._jit_tree_views import Apply, BinOp, Ident, Select, StringLiteral
from torch.jit import frontend

from multigpu.virtual.patches.devices import FACE
from multigpu.virtual.patches.replacing import Replacement, Row
from multigpu.virtual.sim import names

_DEVICE_NAME = re.compile(rf"{FACE}(:\d+)?")


def _text(original: staticmethod) -> staticmethod:
    """The text "cuda:1" becomes "vgpu:1"."""

    @wraps(original)
    def build_Str(context: Any, node: ast.Constant) -> Any:
        literal = original(context, node)
        if not _DEVICE_NAME.fullmatch(node.value):
            return literal
        return StringLiteral(literal.range(), node.value.replace(FACE, names.INNER))

    return staticmethod(build_Str)


def _attribute(original: staticmethod) -> staticmethod:
    """`x.is_cuda` becomes `x.device.type == "vgpu"`."""

    @wraps(original)
    def build_Attribute(context: Any, node: ast.Attribute) -> Any:
        # An attribute of a module can have any name.
        if node.attr != "is_cuda" or getattr(node.value, "id", None) == "self":
            return original(context, node)
        tensor = frontend.build_expr(context, node.value)
        place = tensor.range()
        device = Select(tensor, Ident(place, "device"))
        kind = Select(device, Ident(place, "type"))
        return BinOp("==", kind, StringLiteral(place, names.INNER))

    return staticmethod(build_Attribute)


def _call(original: staticmethod) -> staticmethod:
    """`x.cuda()` becomes `x.to("vgpu")`."""

    @wraps(original)
    def build_Call(context: Any, node: ast.Call) -> Any:
        called = node.func
        moves = isinstance(called, ast.Attribute) and called.attr == "cuda"
        if not moves or node.args or node.keywords:
            return original(context, node)
        tensor = frontend.build_expr(context, called.value)
        place = tensor.range()
        to = Select(tensor, Ident(place, "to"))
        return Apply(to, [StringLiteral(place, names.INNER)], [])

    return staticmethod(build_Call)


def _row(name: str, make: Callable) -> Row:
    why = "C++ compiles it, and its name of a virtual GPU's type is another one"
    return Replacement("torch.jit.frontend.ExprBuilder", name, make, why)


ROWS: tuple[Row, ...] = (
    _row("build_Str", _text),
    _row("build_Attribute", _attribute),
    _row("build_Call", _call),
)
