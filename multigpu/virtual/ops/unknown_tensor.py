"""A tensor of the host whose numbers are not known: a copy of a virtual tensor's shape.

A program can compute with it, save it, and move it back to a GPU, as it does with the weights
of a checkpoint. Reading a number raises an error which names the program's line.
"""

from typing import Any, NoReturn

import torch

from multigpu import nested
from multigpu.virtual.ops.dispatch import has_known_shape, info_of
from multigpu.virtual.ops.errors import no_numbers_error
from multigpu.virtual.ops.tensor import (
    VirtualTensor,
    deep_copy,
    format_number,
    reduce_without_storage,
)
from multigpu.virtual.ops.unknown import Unknown

OpOverload = torch._ops.OpOverload
HOST = torch.device("cpu")
META = torch.device("meta")
# What cannot send or receive an UnknownTensor, for its error.
COLLECTIVE = "a collective of tensors of the host"
_data = torch.Tensor.data


class UnknownTensor(torch.Tensor):
    """A wrapper on the device "cpu" around `_unknown_shape`, a tensor on the device "meta"."""

    _unknown_shape: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        if not all(kind in (UnknownTensor, VirtualTensor) for kind in types):
            return NotImplemented
        return _execute(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        return _data.__get__(self)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if type(new) is not UnknownTensor:
            # moving.data_property, while virtual GPUs run.
            torch.Tensor.data.__set__(self, new)
            return
        # torch replaces the wrapper's shape and dtype only.
        _data.__set__(self, new)
        self._unknown_shape = new._unknown_shape.detach()

    def item(self) -> Any:
        return Unknown() if self.numel() == 1 else torch.Tensor.item(self)

    def __float__(self) -> float:
        return float(self.item())

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return f"tensor(unknown, size={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return format_number(self, spec)

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise no_numbers_error("numpy()")

    def __array__(self, *ignored: object, **options: object) -> NoReturn:
        raise no_numbers_error("a numpy array")

    def __dlpack__(self, **options: object) -> NoReturn:
        raise no_numbers_error("DLPack")

    def share_memory_(self) -> "UnknownTensor":
        # There is nothing to share: another process gets the shape.
        return self

    def tolist(self) -> Any:
        if self.dim() == 0:
            return self.item()
        raise no_numbers_error("tolist()")

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return deep_copy(self, memo)

    def __reduce_ex__(self, protocol: int) -> tuple:
        if isinstance(self, torch.nn.Parameter):
            return reduce_without_storage(self)
        shape = self._unknown_shape.detach().requires_grad_(self.requires_grad)
        return unknown_tensor, (shape,)


def unknown_tensor(shape: torch.Tensor) -> UnknownTensor:
    """A tensor of the host with the shape, strides and dtype of a tensor on "meta".

    torch.load calls it for a tensor that was saved without numbers.
    """
    tensor = torch.Tensor._make_wrapper_subclass(
        UnknownTensor,
        shape.shape,
        strides=shape.stride(),
        storage_offset=shape.storage_offset(),
        dtype=shape.dtype,
        device=HOST,
        requires_grad=shape.requires_grad,
    )
    tensor._unknown_shape = shape.detach()
    return tensor


def _execute(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Execute an operation that has an UnknownTensor among its arguments, on shapes.

    An operation that also has a virtual tensor is the virtual GPU's: a copy to it. Raises
    RuntimeError if the host needs a number, or if numbers of the host would be overwritten.
    """
    if func.namespace == "c10d":
        raise no_numbers_error(COLLECTIVE)
    info = info_of(func)
    tensors = list(nested.tensors((*args, *kwargs.values())))
    if info.host_waits and not has_known_shape(func, tensors):
        raise no_numbers_error("a decision")
    unknowns = [tensor for tensor in tensors if type(tensor) is UnknownTensor]
    others = [tensor for tensor in tensors if type(tensor) is not UnknownTensor]
    is_virtual = any(type(tensor) is VirtualTensor for tensor in others)
    written = info.written_ids(list(args), kwargs) if info.mutable else set()
    if not is_virtual and any(id(tensor) in written for tensor in others):
        raise no_numbers_error("a copy to a tensor of the host")
    shapes = {id(tensor): tensor._unknown_shape for tensor in unknowns}
    if not is_virtual:
        shapes |= {id(tensor): tensor.to(META) for tensor in others if tensor.dim()}
    if "device" in kwargs and torch.device(kwargs["device"] or HOST) == HOST:
        kwargs = {**kwargs, "device": META}
    try:
        args, kwargs = nested.map_tensors((args, kwargs), lambda t: shapes.get(id(t), t))
        out = func(*args, **kwargs)
    except RuntimeError as error:
        # An error about two devices names that of the shape.
        meta, host = f" and {META}!", f" and {HOST}!"
        error.args = tuple(str(part).replace(meta, host) for part in error.args)
        raise
    return nested.map_tensors(out, lambda tensor: _wrap(tensor, unknowns))


def _wrap(out: torch.Tensor, unknowns: list[UnknownTensor]) -> torch.Tensor:
    """The UnknownTensor of a result on "meta"; another result as it is."""
    if not out.is_meta:
        return out
    for tensor in unknowns:
        if tensor._unknown_shape is out:
            if (tensor.shape, tensor.stride()) != (out.shape, out.stride()):
                # The operation has changed them in place, as t_ does.
                _data.__set__(tensor, unknown_tensor(out))
            return tensor
    return unknown_tensor(out)
