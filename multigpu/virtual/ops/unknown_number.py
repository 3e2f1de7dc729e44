"""One number on the host that is not known: what `loss.cpu()` returns if tensors have shapes
only.

Its memory has NaN, so that a program can compute with it, plot it and save it. What is
computed from it is unknown, too. A decision by it raises an error which names the line.
"""

from typing import Any

import torch

from multigpu.virtual.ops.errors import no_numbers_error
from multigpu.virtual.ops.tensor import format_number
from multigpu.virtual.ops.unknown import Unknown

Tensor = torch.Tensor
# Functions that return True or False instead of a tensor.
_DECIDING = {torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, torch.is_nonzero}


class UnknownNumber(Tensor):
    """A tensor of the host with NaN, which is passed on to the results of operations."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: tuple[type, ...], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _DECIDING:
            raise no_numbers_error("a comparison")
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return _mark(out)

    def item(self) -> Any:
        return Unknown() if self.numel() == 1 else Tensor.item(self)

    def tolist(self) -> Any:
        return [part.tolist() for part in self.unbind()] if self.dim() else self.item()

    def __bool__(self) -> bool:
        raise no_numbers_error("a decision")

    def __int__(self) -> int:
        raise no_numbers_error("int()")

    __index__ = __int__

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return f"tensor(unknown, size={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return format_number(self, spec)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: int) -> tuple:
        # Who reads the file or the message has NaN.
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def unknown_number(shape: torch.Size, dtype: torch.dtype) -> UnknownNumber:
    """A tensor of the host with one number that is not known."""
    return torch.full(shape, torch.nan, dtype=dtype, device="cpu").as_subclass(UnknownNumber)


def _mark(out: Any) -> Any:
    """The tensors of the host in a result, as UnknownNumber."""
    if type(out) is Tensor:
        return out.as_subclass(UnknownNumber) if out.device.type == "cpu" else out
    if type(out) in (tuple, list):
        return type(out)(_mark(value) for value in out)
    return out
