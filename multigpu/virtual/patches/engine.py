"""Autograd's engine on virtual GPUs: threads, exceptions, and a check of gradients.

Threads: the device guard that torch offers to Python backends knows only one device. With
multithreading, the engine would start one thread for this device and fail on vgpu:1. Without
multithreading, the engine runs all devices in the thread that calls backward.

Exceptions: a Python exception can unwind the engine (OutOfMemoryError in a kernel, an error in
a user's hook). The engine then restores the device's stream, and asks the device guard for its
device type. The guard is in Python, and Python code fails if it is called while an exception
is pending: the process would abort. So the guard catches the exception and keeps it. The
engine then ends with a SystemError, and `run_backward` raises the kept exception instead.

The check: the engine checks that a gradient is on its tensor's device, but it skips tensors of
a subclass. So this module checks the gradients that a program passes to `backward`, and those
that its autograd.Function returns.
"""

import ctypes
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from multigpu.virtual.sim import names


class _Caught(threading.local):
    """The exceptions that the guard has caught in this thread."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []


# One per process, because torch keeps one device guard for all calls of control.start().
_caught = _Caught()
# The name of a type in the message about a tensor that was changed in place.
INNER_TYPE = re.compile(rf"{names.INNER}(\w+)Type")
_PRIVATE = torch._C._autograd.DeviceType.PrivateUse1
# ctypes raises a pending exception after each call into Python's own library. This function
# has no other effect.
_raise_pending = ctypes.PyDLL(None).PyErr_Occurred


class Guard(torch._C._acc.DeviceGuard):
    """The device guard: returns the device type, and catches an earlier exception."""

    def type_(self) -> torch._C._autograd.DeviceType:
        try:
            _raise_pending()
        except BaseException as error:
            _caught.errors.append(error)
        return _PRIVATE


def place_gradient(grad: Any, device: torch.device, index: int, prefix: str = "") -> Any:
    """Return the gradient; if it has no dimensions, it is moved to the device, as in torch.

    Raises CUDA's RuntimeError for a gradient with dimensions on another device, if one of the
    two devices is virtual. `index` is the gradient's position, and `prefix` begins the
    message.
    """
    if (
        not isinstance(grad, torch.Tensor)
        or grad.device == device
        or not (names.is_virtual(grad.device) or names.is_virtual(device))
    ):
        return grad
    if grad.dim() == 0:
        return grad.to(device)
    raise RuntimeError(
        f"{prefix}invalid gradient at index {index} - "
        f"expected device {device} but got {grad.device}"
    )


def check_gradients(apply: Callable) -> Callable:
    """BackwardCFunction.apply, which runs a Function's backward, with a check of gradients."""

    def checked_apply(self: Any, *args: Any) -> tuple:
        out = apply(self, *args)
        grads = list(out) if isinstance(out, (tuple, list)) else [out]
        # Only arguments that need a gradient have an edge.
        edges = (
            (index, node, input_number)
            for index, (node, input_number) in enumerate(self.next_functions)
            if node is not None
        )
        for i, needed in enumerate(self.needs_input_grad[: len(grads)]):
            if needed and (edge := next(edges, None)):
                index, node, input_number = edge
                device = names.show(node._input_metadata[input_number].device)
                prefix = f"Function {self.name()} returned an "
                grads[i] = place_gradient(grads[i], device, index, prefix)
        return tuple(grads)

    return checked_apply


class Engine:
    """Autograd's engine, which also raises the exceptions that the guard has caught."""

    def __init__(self, engine: Any):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(
        self,
        tensors: Sequence[Any],
        grads: Sequence[torch.Tensor | None],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...] | None:
        """Run backward as torch's engine does.

        `tensors` are tensors or gradient edges, and `grads` are their gradients.

        Raises RuntimeError if a gradient is not on its tensor's device.
        """
        pairs = enumerate(zip(tensors, grads, strict=True))
        grads = tuple(
            place_gradient(grad, tensor.device, i) if torch.is_tensor(tensor) else grad
            for i, (tensor, grad) in pairs
        )
        errors = _caught.errors
        before = len(errors)
        try:
            # This affects the calling thread only.
            with torch.autograd.set_multithreading_enabled(False):
                return self._engine.run_backward(tensors, grads, *args, **kwargs)
        except SystemError:
            if len(errors) == before:
                raise
            raise errors[before] from None
        except RuntimeError as error:
            # torch has a name of a type, such as torch.cuda.FloatTensor, for its own devices.
            shown = rf"torch.{names.shown_type()}.\1Tensor"
            error.args = tuple(
                INNER_TYPE.sub(shown, part) if isinstance(part, str) else part
                for part in error.args
            )
            raise
        finally:
            del errors[before:]
