"""The tensor of a virtual GPU: a wrapper around a tensor of the host, the payload.

Autograd, modules and optimizers see the wrapper: its device, shape and dtype. torch calls
`__torch_dispatch__` for each operation that reaches a kernel, and dispatch.py executes it on
the payloads.
"""

import copy
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import _tensor_str

from multigpu.virtual.ops.storage import VirtualStorage, locate
from multigpu.virtual.sim.contents import ACTIVATIONS, OTHER, PARAMETERS
from multigpu.virtual.sim.event import HOST
from multigpu.virtual.sim.memory import Block, Meter

if TYPE_CHECKING:
    import numpy as np

DeviceLike = torch.device | str | int | None
# These attributes make a tensor virtual, or unknown (unknown_tensor.py), or make such a tensor
# a parameter. All others belong to the program.
INTERNAL = ("_payload", "_block", "_unknown_shape", "_is_param")
_make = torch.Tensor._make_wrapper_subclass
_data = torch.Tensor.data


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual GPU. Programs do not use this class: they write device="vgpu:0".

    `_payload` has the numbers or, with compute=False, only the shape (device "meta"). `_block`
    is the memory on the device that the tensor's storage occupies.
    """

    _payload: torch.Tensor
    _block: Block

    # The default runs Python code between a method and its kernel: a microsecond per call.
    __torch_function__ = torch._C._disabled_torch_function_impl

    # dispatch.py sets __torch_dispatch__, because it imports this class.

    @property
    def _is_param(self) -> bool:
        # torch sets it for a parameter.
        return self.__dict__.get("_is_param", False)

    @_is_param.setter
    def _is_param(self, is_param: bool) -> None:
        self.__dict__["_is_param"] = is_param
        if is_param:
            self._block.mark(PARAMETERS)

    @property
    def data(self) -> torch.Tensor:
        return _data.__get__(self)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if type(new) is not VirtualTensor:
            # moving.data_property, while virtual GPUs run.
            torch.Tensor.data.__set__(self, new)
            return
        # torch replaces the wrapper's shape and dtype only.
        _data.__set__(self, new)
        self._payload = new._payload
        self._block = new._block
        if self._is_param:
            self._block.mark(PARAMETERS)

    def numpy(self, *, force: bool = False) -> "np.ndarray":
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        # CUDA's wording.
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            f"Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __dlpack__(self, **options: Any) -> NoReturn:
        raise BufferError(
            f"{self.device} is a virtual GPU, so it has no memory that DLPack can share with "
            f"another library: copy the tensor to the CPU first (tensor.cpu())."
        )

    def data_ptr(self) -> int:
        # An address of the device, 0 for a tensor without elements, as on CUDA.
        address = self.untyped_storage().data_ptr() if self.numel() else 0
        return address + self.storage_offset() * self.itemsize if address else 0

    def untyped_storage(self) -> VirtualStorage:
        # The wrapper's own storage has no memory.
        refresh_payload(self)
        return locate(self._payload.untyped_storage(), self.device, self._block)

    @property
    def names(self) -> tuple[None, ...]:
        # torch has no names of dimensions for a wrapper.
        return (None,) * self.dim()

    def as_subclass(self, cls: type[torch.Tensor]) -> torch.Tensor:
        if issubclass(cls, VirtualTensor) or cls is torch.Tensor:
            return self.view_as(self)
        raise TypeError(
            f"A tensor on {self.device} cannot become a {cls.__name__}, because a tensor on a "
            f"virtual GPU has a class of its own: keep it as an attribute of your class, or "
            f"move it to the CPU first."
        )

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def new_tensor(
        self,
        data: Any,
        *,
        dtype: torch.dtype | None = None,
        device: DeviceLike = None,
        **options: Any,
    ) -> torch.Tensor:
        # torch's own method asks the device guard, which knows only one device.
        return torch.tensor(
            data, dtype=dtype or self.dtype, device=device or self.device, **options
        )

    def new(self, *args: Any, device: DeviceLike = None) -> torch.Tensor:
        # An old name for new_empty and new_tensor; torch's method asks the device guard, too.
        is_data = len(args) == 1 and isinstance(args[0], (list, tuple))
        if is_data and not isinstance(args[0], torch.Size):
            return self.new_tensor(args[0], device=device)
        if args and isinstance(args[0], torch.Tensor):
            return super().new(*args)
        is_size = args and isinstance(args[0], torch.Size)
        size = args[0] if is_size else args or (0,)
        return self.new_empty(size, device=device or self.device)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        # torch would indent the rows by the length of this class's name, so the elements are
        # formatted here.
        self._block.meter.check_assert()
        refresh_payload(self)
        if self._block.meter.alive and not self._payload.is_meta:
            contents = _tensor_str._tensor_str(self.detach().cpu(), len("tensor("))
        else:
            contents = f"..., size={tuple(self.shape)}"
        text = _tensor_str._str(self, tensor_contents=contents)
        text = text.replace("VirtualTensor(", "tensor(", 1)
        if isinstance(self, torch.nn.Parameter):
            text = text.removeprefix("Parameter(").removesuffix(")")
            text = f"Parameter containing:\n{text}"
        return text

    def __format__(self, spec: str) -> str:
        meter = self._block.meter
        if not meter.alive and not meter.asserted:
            return object.__format__(self, spec)
        return format_number(self, spec)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return deep_copy(self, memo)

    def __reduce_ex__(self, protocol: int) -> tuple:
        meter = self._block.meter
        meter.check_assert()
        refresh_payload(self)
        payload = self._payload
        if isinstance(self, torch.nn.Parameter) or not meter.alive:
            return reduce_without_storage(self)
        if payload.is_meta:
            # A file of shapes. The copy to the host takes its time.
            return self.cpu().__reduce_ex__(protocol)
        if payload.layout is not torch.strided:
            return reduce_without_storage(self)
        # torch pickles the tensors of its own devices in the same way: tensors that share a
        # storage share it in the file, too. See loading.py.
        meter.machine.clock.wait_for_collectives([self])
        meter.machine.clock.transfer(meter.index, HOST, self.nbytes, wait=True)
        payload = payload.detach().requires_grad_(self.requires_grad)
        payload.untyped_storage().of_vgpu = str(self.device)
        return payload.__reduce_ex__(protocol)


def format_number(tensor: torch.Tensor, spec: str) -> str:
    """Format a tensor without dimensions as its number, and others as text.

    torch does this for its own class only, and so not for a Parameter.
    """
    if tensor.dim() == 0 and not isinstance(tensor, torch.nn.Parameter):
        return format(tensor.item(), spec)
    return object.__format__(tensor, spec)


def deep_copy(tensor: torch.Tensor, memo: dict) -> torch.Tensor:
    """What copy.deepcopy returns, as for torch's own class. Raises RuntimeError in a graph."""
    if isinstance(tensor, torch.nn.Parameter):
        # torch copies neither a parameter's gradient nor a program's attributes.
        if id(tensor) not in memo:
            new = tensor.detach().clone()
            memo[id(tensor)] = torch.nn.Parameter(new, tensor.requires_grad)
        return memo[id(tensor)]
    if not tensor.is_leaf:
        # torch's wording.
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the "
            "deepcopy protocol at the moment."
        )
    if id(tensor) in memo:
        return memo[id(tensor)]
    with torch.no_grad():
        new = tensor.clone()
    new.requires_grad_(tensor.requires_grad)
    for name, value in vars(tensor).items():
        if name not in INTERNAL:
            vars(new)[name] = copy.deepcopy(value, memo)
    if tensor.grad is not None:
        new.grad = copy.deepcopy(tensor.grad, memo)
    memo[id(tensor)] = new
    return new


def refresh_payload(tensor: VirtualTensor) -> None:
    """Make the payload a shape if shapes.drop_numbers has dropped its storage's numbers."""
    payload = tensor._payload
    if not payload.is_meta and payload.layout is torch.strided:
        storage = getattr(payload.untyped_storage(), "meta_storage", None)
        if storage is not None:
            geometry = (payload.storage_offset(), payload.shape, payload.stride())
            shape = torch.empty(0, dtype=payload.dtype, device="meta")
            tensor._payload = shape.set_(storage, *geometry)


def reduce_without_storage(tensor: torch.Tensor) -> tuple:
    """Return (function, its arguments), with which pickle rebuilds a tensor without a storage.

    torch does the same for devices that have no storages. Raises RuntimeError for a tensor
    that has no numbers.
    """
    if isinstance(tensor, torch.nn.Parameter):
        return torch._utils._rebuild_parameter, (tensor.detach(), tensor.requires_grad, {})
    arguments = (tensor.detach().cpu(), tensor.dtype, str(tensor.device), tensor.requires_grad)
    return torch._utils._rebuild_device_tensor_from_cpu_tensor, arguments


def wrap(payload: torch.Tensor, block: Block) -> VirtualTensor:
    """A tensor on the block's device with the payload's shape, strides and dtype.

    Raises NotImplementedError for a layout that virtual GPUs lack.
    """
    device = block.meter.inner_device
    dtype = payload.dtype
    try:
        shape = payload.shape
    except RuntimeError:
        # A nested tensor has none.
        raise layout_error(payload) from None
    if payload.layout is not torch.strided:
        layout = payload.layout
        tensor = _make(VirtualTensor, shape, dtype=dtype, layout=layout, device=device)
    elif payload.is_contiguous() and not payload.storage_offset():
        tensor = _make(VirtualTensor, shape, dtype=dtype, device=device)
    else:
        tensor = _make(
            VirtualTensor,
            shape,
            strides=payload.stride(),
            storage_offset=payload.storage_offset(),
            dtype=dtype,
            device=device,
        )
    tensor._payload = payload
    tensor._block = block
    return tensor


def wrap_view(payload: torch.Tensor, block: Block) -> VirtualTensor:
    """The same as `wrap`, for a view of another tensor: it can be a lazy conjugation.

    A lazy conjugation, or negation, is a flag of the payload. The wrapper needs the same flag,
    because torch resolves it before it calls __torch_dispatch__.
    """
    tensor = wrap(payload, block)
    if payload.is_conj():
        torch._C._set_conj(tensor, True)
    if payload.is_neg():
        torch._C._set_neg(tensor, True)
    return tensor


def wrap_new(payload: torch.Tensor, meter: Meter) -> VirtualTensor:
    """A tensor on the meter's device for a payload that no operation on it has computed.

    It has a new block of memory. Raises torch.OutOfMemoryError if the tensor does not fit.
    """
    block = Block(meter, *storage_id(payload))
    if block.kind == ACTIVATIONS:
        block.mark(OTHER)
    return wrap(payload, block)


def storage_id(payload: torch.Tensor) -> tuple[int, int]:
    """(an id of the payload's storage, the storage's bytes).

    Raises NotImplementedError for a layout that virtual GPUs lack.
    """
    if payload.is_sparse:
        tensors = (payload._indices(), payload._values())
        return id(payload), sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    if payload.layout is not torch.strided or payload.is_nested:
        raise layout_error(payload)
    storage = payload.untyped_storage()
    return storage._cdata, storage.nbytes()


def last_element(tensor: torch.Tensor) -> int:
    """The place in its storage, in elements, of the last element that a tensor uses.

    The tensor is strided and has elements.
    """
    return tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def layout_error(payload: torch.Tensor) -> NotImplementedError:
    """The error for a layout whose tensors Python code cannot wrap."""
    if payload.is_nested:
        return NotImplementedError(
            "Virtual GPUs have no nested tensors of the layout torch.strided: make them with "
            "layout=torch.jagged."
        )
    return NotImplementedError(
        f"Virtual GPUs have no tensors of the layout {payload.layout}: use to_sparse(), which "
        f"gives torch.sparse_coo, or compute with this tensor on the CPU."
    )
