"""What is a tensor on a virtual GPU? A wrapper with the device's name around a tensor of the host, the payload.

Autograd, modules and optimizers see the wrapper: its device, shape and type. Every operation that reaches a kernel
comes to `__torch_dispatch__`, and dispatch.py runs it on the payloads.
"""

import copy
from typing import Any

import torch
from torch import _tensor_str

from multigpu.vgpu.sim.clock import HOST
from multigpu.vgpu.sim.memory import Block, Meter

_make = torch.Tensor._make_wrapper_subclass
_data = torch.Tensor.data


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual GPU. Programs never name this class: they say device="vgpu:0"."""

    _payload: torch.Tensor
    _block: Block

    # No Python code between a method and its kernel: it would cost each call a microsecond.
    __torch_function__ = torch._C._disabled_torch_function_impl

    # dispatch.py, which needs this class, adds __torch_dispatch__.

    @property
    def data(self) -> torch.Tensor:
        return _data.__get__(self)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        # torch swaps the wrapper's shape and type; the numbers move here.
        _data.__set__(self, new)
        self._payload, self._block = new._payload, new._block

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            f"Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def new_tensor(
        self, data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **more: Any
    ) -> torch.Tensor:
        # torch's own asks the device guard, which knows of one device only.
        return torch.tensor(
            data, dtype=dtype or self.dtype, device=device or self.device, **more
        )

    def new(self, *args: Any, device: Any = None) -> torch.Tensor:
        # Likewise: an old name for new_empty and new_tensor.
        if (
            len(args) == 1
            and isinstance(args[0], (list, tuple))
            and not isinstance(args[0], torch.Size)
        ):
            return self.new_tensor(args[0], device=device)
        if args and isinstance(args[0], torch.Tensor):
            return super().new(*args)
        size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return self.new_empty(size, device=device or self.device)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        # torch would indent the rows by the length of this class's name, so the numbers are written here.
        meter = self._block.meter
        follow(self)
        shown = meter.alive and not self._payload.is_meta
        contents = (
            _tensor_str._tensor_str(self.detach().cpu(), len("tensor(")) if shown else "..."
        )
        if not shown:
            contents += f", size={tuple(self.shape)}"
        text = _tensor_str._str(self, tensor_contents=contents).replace(
            "VirtualTensor(", "tensor(", 1
        )
        if isinstance(self, torch.nn.Parameter):
            text = (
                f"Parameter containing:\n{text.removeprefix('Parameter(').removesuffix(')')}"
            )
        return text

    def __format__(self, spec: str) -> str:
        return (
            format(self.item(), spec)
            if self.dim() == 0 and spec
            else object.__format__(self, spec)
        )

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
            )
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            new = self.clone(memory_format=torch.preserve_format)
        new.requires_grad_(self.requires_grad)
        for name, value in self.__dict__.items():
            if name not in ("_payload", "_block"):
                new.__dict__[name] = copy.deepcopy(value, memo)
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: int) -> tuple:
        meter = self._block.meter
        follow(self)
        simple = (
            self._payload.layout is torch.strided and not self._payload.is_meta and meter.alive
        )
        if isinstance(self, torch.nn.Parameter) or not simple:
            return reduce_alone(self)
        # As torch pickles its own devices' tensors: what shares a storage shares it in the file. See loading.py.
        meter.machine.clock.settle([self])
        meter.machine.clock.transfer(meter.index, HOST, self.nbytes, wait=True)
        payload = self._payload.detach().requires_grad_(self.requires_grad)
        payload.untyped_storage().of_vgpu = str(self.device)
        return payload.__reduce_ex__(protocol)


def follow(tensor: VirtualTensor) -> None:
    """Without computing: a tensor whose storage's numbers have been given up becomes a shape, too (shapes.py)."""
    payload = tensor._payload
    if not payload.is_meta and payload.layout is torch.strided:
        shape = getattr(payload.untyped_storage(), "shape_of", None)
        if shape is not None:
            place = (shape, payload.storage_offset(), payload.shape, payload.stride())
            tensor._payload = torch.empty(0, dtype=payload.dtype, device="meta").set_(*place)


def reduce_alone(tensor: VirtualTensor) -> tuple:
    """How to pickle a tensor without its storage, as torch does for devices that have none. Needs its numbers."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch._utils._rebuild_parameter, (tensor.detach(), tensor.requires_grad, {})
    plain = (tensor.detach().cpu(), tensor.dtype, str(tensor.device), tensor.requires_grad)
    return torch._utils._rebuild_device_tensor_from_cpu_tensor, plain


def wrap(payload: torch.Tensor, block: Block) -> VirtualTensor:
    """A tensor on the block's device with the payload's shape, strides and type."""
    if payload.layout is not torch.strided:
        tensor = _make(
            VirtualTensor,
            payload.size(),
            dtype=payload.dtype,
            layout=payload.layout,
            device=block.meter.device,
        )
    elif payload.is_contiguous() and not payload.storage_offset():
        tensor = _make(
            VirtualTensor, payload.shape, dtype=payload.dtype, device=block.meter.device
        )
    else:
        tensor = _make(
            VirtualTensor, payload.shape, strides=payload.stride(), storage_offset=payload.storage_offset(),
            dtype=payload.dtype, device=block.meter.device,
        )  # fmt: skip
    tensor._payload, tensor._block = payload, block
    # A lazy conjugate, or minus, is a mark on the payload. torch resolves marks before it comes to us: it must see them.
    if payload.is_conj():
        torch._C._set_conj(tensor, True)
    if payload.is_neg():
        torch._C._set_neg(tensor, True)
    return tensor


def place(payload: torch.Tensor, meter: Meter) -> VirtualTensor:
    """A new tensor on the meter's device, with memory of its own. Raises torch.OutOfMemoryError if it does not fit."""
    return wrap(payload, Block(meter, *identity(payload)))


def identity(payload: torch.Tensor) -> tuple[int, int]:
    """Which storage does a payload lie in, and how many bytes has it?"""
    if payload.is_sparse:
        parts = (payload._indices(), payload._values())
        return id(payload), sum(part.untyped_storage().nbytes() for part in parts)
    storage = payload.untyped_storage()
    return storage._cdata, storage.nbytes()
