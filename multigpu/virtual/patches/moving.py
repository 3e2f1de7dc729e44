"""Moves a module to a virtual GPU and back. Each parameter stays the same object, as on a GPU.

For a GPU, Module.to puts the moved numbers into the old parameter (`parameter.data = moved`).
This needs two tensors of the same class. Tensors of the host and of a virtual GPU have
different classes, so torch would make new parameters, but tied layers and optimizers would
keep the old ones. To avoid this, `move_in_place` swaps the two C++ tensors that the Python
objects hold. The attributes and hooks that a program has set on the parameter stay.

On CUDA what torch's C++ code holds, such as DDP's reducer or the graph of a forward pass, is
the same tensor and moves too. Here it keeps the C++ tensor of the old device, which gives up
its memory and stands for the parameter from then on: see MovedTensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from multigpu.errors import UserError
from multigpu.virtual.ops.tensor import INTERNAL, VirtualTensor
from multigpu.virtual.ops.unknown_tensor import UnknownTensor
from multigpu.virtual.patches import scripting
from multigpu.virtual.patches.lazy import moved_apart

# torch's own, because moving_apply replaces it.
_swap_tensors = torch.utils.swap_tensors


def move_in_place(parameter: torch.Tensor, moved: torch.Tensor) -> None:
    """Give the parameter the device, dtype and numbers of `moved`.

    `moved` must not be used again.
    """
    wrapper = is_traceable_wrapper_subclass(parameter) or is_traceable_wrapper_subclass(moved)
    if wrapper or is_fake(parameter):
        # A wrapper around other tensors, such as DTensor, or a FakeTensor: torch swaps these.
        _swap_tensors(parameter, moved)
        return
    kind = _own_class(parameter)
    if kind is _own_class(moved) and (
        kind or torch._has_compatible_shallow_copy_type(parameter, moved)
    ):
        parameter.data = moved
        return

    has_node = parameter.layout == torch.strided and not torch.is_inference_mode_enabled()
    if parameter.requires_grad and parameter.is_leaf and has_node:
        # A graph from before the move would send its gradient to the old device.
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(
            _offloaded if hasattr(parameter, "_is_flat_param") else _moved_too_late
        )
    backward_hooks = parameter._backward_hooks
    accumulate_hooks = parameter._post_accumulate_grad_hooks

    old = _pop_internal(parameter)
    new = _pop_internal(moved)
    vars(parameter).update(new)
    vars(moved).update(old)
    parameter.__class__, moved.__class__ = moved.__class__, parameter.__class__
    torch._C._swap_tensor_impl(parameter, moved)
    if type(moved) is VirtualTensor:
        _pop_internal(moved)
        moved.__class__ = MovedTensor
        moved._now = parameter

    # Assigning the hooks registers them again, with the tensor that the parameter now holds.
    if backward_hooks:
        parameter._backward_hooks = backward_hooks
    if accumulate_hooks:
        parameter._post_accumulate_grad_hooks = accumulate_hooks


class MovedTensor(VirtualTensor):
    """What C++ code still holds of a tensor that has left a virtual GPU. It has no memory.

    Each operation computes with `_now`, the Python object that has moved. So a backward pass
    through a weight that has moved to the host raises CUDA's error of two devices.
    """

    _now: torch.Tensor

    @classmethod
    def __torch_dispatch__(
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda old: old._now.detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _own_class(tensor: torch.Tensor) -> type | None:
    """VirtualTensor or UnknownTensor; None for a tensor of another class."""
    return type(tensor) if type(tensor) in (VirtualTensor, UnknownTensor) else None


def _pop_internal(tensor: torch.Tensor) -> dict[str, Any]:
    values = vars(tensor)
    return {name: values.pop(name) for name in INTERNAL if name in values}


def _moved_too_late(grads: tuple[torch.Tensor, ...]) -> None:
    raise RuntimeError(
        "A module was moved between forward and backward, so its gradients would be on the "
        "old device. Move it before forward, or after backward."
    )


def _offloaded(grads: tuple[torch.Tensor, ...]) -> None:
    raise RuntimeError(
        "FullyShardedDataParallel with CPUOffload(offload_params=True) does not train on "
        "virtual GPUs, because it moves the weights between forward and backward: use "
        "fully_shard(module, offload_policy=CPUOffloadPolicy()) of torch.distributed.fsdp."
    )


def moving_apply(original: Callable) -> Callable:
    """torch.nn.Module._apply with `move_in_place`; Module.to and similar methods call it."""

    def _apply(self: torch.nn.Module, fn: Callable, recurse: bool = True) -> torch.nn.Module:
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        if isinstance(self, torch.jit.ScriptModule):
            # Its parameters are attributes in C++, to which a swap of Python objects is
            # unknown.
            if type(fn(torch.empty(0, device="cpu"))) is VirtualTensor:
                raise UserError(scripting.NOT_READ)
            return original(self, fn, recurse)
        # The program has set the flag itself, or this call is for a child module.
        if swaps:
            with moved_apart(self, fn):
                return original(self, fn, recurse)
        swap_tensors = torch.utils.swap_tensors
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch.utils.swap_tensors = move_in_place
        try:
            with moved_apart(self, fn):
                return original(self, fn, recurse)
        finally:
            torch.utils.swap_tensors = swap_tensors
            torch.__future__.set_swap_module_params_on_conversion(False)

    return _apply


def data_property(original: Any) -> property:
    """torch.Tensor.data, to which a tensor of another device can be assigned, as on a GPU.

    torch accepts only a tensor of the same class. The two tensors share their memory.
    """

    def get(self: torch.Tensor) -> torch.Tensor:
        return original.__get__(self)

    def set_data(self: torch.Tensor, new: torch.Tensor) -> None:
        if _own_class(self) is _own_class(new):
            original.__set__(self, new)
            return
        moved = new.detach()
        if isinstance(self, torch.nn.Parameter):
            moved = torch.nn.Parameter(moved, self.requires_grad)
        move_in_place(self, moved.requires_grad_(self.requires_grad))

    return property(get, set_data)
