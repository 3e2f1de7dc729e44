"""Autograd's engine on virtual GPUs: threads, exceptions, and a check of gradients.

Threads: the device guard that torch offers to Python backends knows of one device. The engine
would start one thread for it and fail on vgpu:1. With multithreading off, it runs all devices
in the thread that calls backward.

Exceptions: while a Python exception unwinds the engine (OutOfMemoryError in a kernel, an error
in a user's hook), the engine restores the device's stream, and for that asks the device guard,
which is in Python, for its device type. Python code that is called while an exception is
pending fails, and at this point the process would abort. So the guard catches the exception
and keeps it; the engine ends without one, and `run_backward` raises it again.

The check: the engine compares the device of a gradient with that of its tensor, but not for
tensors of a subclass. So gradients that a program gives to `backward`, or that its own
autograd.Function returns, are checked here.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


class _Caught(threading.local):
    """The exceptions that the guard has caught in this thread."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []


# One for the process: torch has one device guard, and not one for each start.
_caught = _Caught()
_PRIVATE = torch._C._autograd.DeviceType.PrivateUse1
# ctypes raises a pending exception after each call into Python's own library. This function
# has no other effect.
_raise_pending = ctypes.PyDLL(None).PyErr_Occurred


class Guard(torch._C._acc.DeviceGuard):
    """The device guard: reports the device type, and catches an exception that is pending."""

    def type_(self) -> torch._C._autograd.DeviceType:
        try:
            _raise_pending()
        except BaseException as error:
            _caught.errors.append(error)
        return _PRIVATE


def place_gradient(grad: Any, device: torch.device, index: int, prefix: str = "") -> Any:
    """The gradient, if it is on the device; moved there if it has no dimensions, as by torch.

    Raises CUDA's RuntimeError for any other gradient. `index` is its position, and `prefix`
    begins the message.
    """
    if (
        not isinstance(grad, torch.Tensor)
        or grad.device == device
        or "vgpu" not in (grad.device.type, device.type)
    ):
        return grad
    if grad.dim() == 0:
        return grad.to(device)
    raise RuntimeError(
        f"{prefix}invalid gradient at index {index} - "
        f"expected device {device} but got {grad.device}"
    )


def check_gradients(apply: Callable) -> Callable:
    """BackwardCFunction.apply, a Function's backward, with a check of its gradients."""

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
                device = node._input_metadata[input_number].device
                prefix = f"Function {self.name()} returned an "
                grads[i] = place_gradient(grads[i], device, index, prefix)
        return tuple(grads)

    return checked_apply


class Engine:
    """Autograd's engine, which raises what the guard has caught."""

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
        """As torch's engine: `tensors` are tensors or gradient edges, `grads` their gradients.

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
            # It holds for the calling thread alone.
            with torch.autograd.set_multithreading_enabled(False):
                return self._engine.run_backward(tensors, grads, *args, **kwargs)
        except SystemError:
            if len(errors) == before:
                raise
            raise errors[before] from None
        finally:
            del errors[before:]
