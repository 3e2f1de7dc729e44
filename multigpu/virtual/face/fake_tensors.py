"""FakeTensors on "cuda:1": tensors without numbers, in which torch finds shapes and graphs.

DTensor, torch.export, make_fx and the pipelines of torch.distributed use them. Programs see
"cuda:1", and autograd's C++ code gets "vgpu:1": for CUDA it would ask a device guard, which a
CPU build of torch does not have, and the process would abort.
"""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.patches.devices import inner_device
from multigpu.virtual.patches.replacing import Replacement, Row
from multigpu.virtual.sim import names

FAKE_TENSOR = "torch._subclasses.fake_tensor.FakeTensor"
ASKS_DEVICE = torch.ops.prim.device.default


def _copy_without_guard(original: Any) -> Any:
    """Tensor.copy_ of a FakeTensor, in which DTensor computes the shapes of its operations."""

    def copy_(
        self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        return torch.ops.aten.copy_.default(self, src, non_blocking)

    return copy_


def _new_on_shown_device(original: staticmethod) -> staticmethod:
    """FakeTensor.__new__ with the shown device in the place of the inner one."""
    make = original.__func__

    def __new__(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        def shown(value: Any) -> Any:
            return names.show(value) if isinstance(value, torch.device) else value

        kwargs = {name: shown(value) for name, value in kwargs.items()}
        return make(cls, *map(shown, args), **kwargs)

    return staticmethod(__new__)


def _dispatch_with_inner_device(original: classmethod) -> classmethod:
    """FakeTensor's dispatch: autograd's question for the device gets the inner one."""
    dispatch = original.__func__

    def __torch_dispatch__(
        cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = dispatch(cls, func, types, args, kwargs or {})
        return inner_device(out) if func is ASKS_DEVICE else out

    return classmethod(__torch_dispatch__)


def _handlers_with_inner_device(original: dict) -> dict:
    answer: Callable = original[ASKS_DEVICE]
    return {**original, ASKS_DEVICE: lambda args: inner_device(answer(args))}


_GUARD = "autograd's C++ code asks for the device, and for CUDA it would need a device guard"
ROWS: tuple[Row, ...] = (
    Replacement(
        FAKE_TENSOR,
        "copy_",
        _copy_without_guard,
        "the method asks for CUDA's device guard, which a CPU build of torch does not have",
    ),
    Replacement(
        FAKE_TENSOR,
        "__new__",
        _new_on_shown_device,
        'Tensor.to gets the inner device, and the FakeTensor would be on "vgpu"',
    ),
    Replacement(FAKE_TENSOR, "__torch_dispatch__", _dispatch_with_inner_device, _GUARD),
    Replacement(
        "torch._subclasses.fake_tensor",
        "_DISPATCH_META_HANDLERS",
        _handlers_with_inner_device,
        _GUARD,
    ),
)
