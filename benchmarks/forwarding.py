"""The least that a tensor subclass in Python costs: it passes each operation on, and no more.

A virtual GPU's tensor is such a subclass. It adds checks, memory and simulated time.
"""

from typing import Any

import torch
from torch import nn

_make = torch.Tensor._make_wrapper_subclass


class ForwardingTensor(torch.Tensor):
    """A wrapper around a tensor of the host, which seems to be on another device."""

    _inner: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> Any:
        wrappers: list[ForwardingTensor] = []
        inner_args = [_unwrap(value, wrappers) for value in args]
        inner_kwargs = {
            name: _unwrap(value, wrappers)
            for name, value in (kwargs or {}).items()
            if name != "device"
        }
        return _wrap_result(func._op(*inner_args, **inner_kwargs), wrappers)


def _unwrap(value: Any, wrappers: list[ForwardingTensor]) -> Any:
    if type(value) is ForwardingTensor:
        wrappers.append(value)
        return value._inner
    if type(value) in (list, tuple):
        return type(value)([_unwrap(part, wrappers) for part in value])
    return value


def _wrap_result(out: Any, wrappers: list[ForwardingTensor]) -> Any:
    """Wrap the tensors of a result. An in-place operation returns its own argument."""
    if type(out) in (list, tuple):
        return type(out)([_wrap_result(part, wrappers) for part in out])
    if type(out) is not torch.Tensor:
        return out
    for wrapper in wrappers:
        if wrapper._inner is out:
            return wrapper
    return wrap(out, wrappers[0].device)


def wrap(inner: torch.Tensor, device: torch.device) -> ForwardingTensor:
    """A wrapper around `inner` that says it is on `device`."""
    if inner.is_contiguous() and not inner.storage_offset():
        tensor = _make(ForwardingTensor, inner.shape, dtype=inner.dtype, device=device)
    else:
        tensor = _make(
            ForwardingTensor,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
    tensor._inner = inner
    return tensor


def wrap_parameters(model: nn.Module, device: torch.device) -> nn.Module:
    """Wrap the parameters of a model on the CPU, in place, and return the model."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                wrapped = wrap(parameter.detach(), device)
                module._parameters[name] = nn.Parameter(wrapped)
    return model
