"""How does a module move to a virtual GPU and back? Each parameter stays the same object, as on a GPU: torch cannot say so.

For a GPU, Module.to puts the moved numbers into the old parameter (`parameter.data = moved`). That takes two tensors of
one class; between the host and a virtual GPU torch would make new parameters, and ties and optimizers would lose them.
So here the two tensors change places below the parameter. What a program has put on it stays: attributes and hooks.
"""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.vgpu.ops.tensor import VirtualTensor

OURS = (
    "_payload",
    "_block",
    "_is_param",
)  # what makes a tensor virtual, and a virtual one a parameter


def put(parameter: torch.Tensor, moved: torch.Tensor) -> None:
    """Give the parameter the device, the type and the numbers of `moved`, which is thrown away."""
    virtual = type(parameter) is VirtualTensor
    if virtual is (type(moved) is VirtualTensor) and (
        virtual or torch._has_compatible_shallow_copy_type(parameter, moved)
    ):
        parameter.data = moved
        return
    graphs = (
        parameter.layout == torch.strided and not torch.is_inference_mode_enabled()
    )  # torch finds its node
    if parameter.requires_grad and parameter.is_leaf and graphs:
        # A graph from before holds the old numbers, and its gradient would go there.
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(_too_late)
    hooks, afterwards = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    mine, theirs = vars(parameter), vars(moved)
    ours = [
        {name: values.pop(name) for name in OURS if name in values}
        for values in (mine, theirs)
    ]
    mine.update(ours[1])
    theirs.update(ours[0])
    parameter.__class__, moved.__class__ = moved.__class__, parameter.__class__
    torch._C._swap_tensor_impl(parameter, moved)
    if hooks:
        parameter._backward_hooks = (
            hooks  # registers them again, with what the parameter holds now
        )
    if afterwards:
        parameter._post_accumulate_grad_hooks = afterwards


def _too_late(grads: Any) -> None:
    raise RuntimeError(
        "A module was moved between forward and backward: its gradients have no place any more. "
        "Move it before forward, or after backward."
    )


def install() -> Callable[[], None]:
    """Let Module.to and its like use `put`; calling what is returned puts torch's own back."""
    theirs = torch.nn.Module._apply

    def _apply(self: torch.nn.Module, fn: Callable, recurse: bool = True) -> torch.nn.Module:
        if (
            torch.__future__.get_swap_module_params_on_conversion()
        ):  # a program's own wish, or a child's turn
            return theirs(self, fn, recurse)
        swap = torch.utils.swap_tensors
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch.utils.swap_tensors = put
        try:
            return theirs(self, fn, recurse)
        finally:
            torch.utils.swap_tensors = swap
            torch.__future__.set_swap_module_params_on_conversion(False)

    torch.nn.Module._apply = _apply
    return lambda: setattr(torch.nn.Module, "_apply", theirs)
