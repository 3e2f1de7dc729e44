"""What does autograd's engine need to run on virtual GPUs? One thread for all of them, a way out for exceptions, a check.

Threads: the device guard that torch offers to Python backends knows of one device. The engine would start one thread
for it and fail on vgpu:1; told to use none of its own, it runs all devices in the thread that calls backward.

Exceptions: while a Python exception unwinds the engine (OutOfMemoryError in a kernel, an error in a user's hook), the
engine restores the device's stream, and for that asks the device guard, which is in Python, for its device type. Python
code that is called while an exception is pending fails, and in this place the process would abort. So the guard takes
the exception aside; the engine ends without one, and `run_backward` raises it again.

The check: the engine looks whether a gradient lies where its tensor does, but not at tensors of a subclass. So gradients
that a program gives to `backward`, or that a Function of its own returns, are looked at here.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch


class _Aside(threading.local):
    """The exceptions that the guard has taken aside in this thread."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []


_aside = _Aside()
_PRIVATE = torch._C._autograd.DeviceType.PrivateUse1
# ctypes raises what is pending after each call into Python's own library; this function does nothing else.
_raise_pending = ctypes.PyDLL(None).PyErr_Occurred


class Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        try:
            _raise_pending()
        except BaseException as error:
            _aside.errors.append(error)
        return _PRIVATE


def placed(grad: Any, device: torch.device, index: int, who: str = "") -> Any:
    """The gradient, if it lies on the device; moved there if it is one number, as torch does. Raises CUDA's error."""
    if (
        not isinstance(grad, torch.Tensor)
        or grad.device == device
        or "vgpu" not in (grad.device.type, device.type)
    ):
        return grad
    if grad.dim() == 0:
        return grad.to(device)
    raise RuntimeError(
        f"{who}invalid gradient at index {index} - expected device {device} but got {grad.device}"
    )


def _checked(apply: Callable) -> Callable:
    def checked(self: Any, *args: Any) -> Any:
        """A Function's backward, with a look at what it returns. Only arguments that need a gradient have an edge."""
        out = apply(self, *args)
        edges = (
            (index, *edge)
            for index, edge in enumerate(self.next_functions)
            if edge[0] is not None
        )
        grads = list(out) if isinstance(out, (tuple, list)) else [out]
        for i, needed in enumerate(self.needs_input_grad[: len(grads)]):
            if needed and (edge := next(edges, None)):
                index, function, number = edge
                there = function._input_metadata[number].device
                grads[i] = placed(
                    grads[i], there, index, f"Function {self.name()} returned an "
                )
        return tuple(grads)

    return checked


class Engine:
    """Autograd's engine, which raises what the guard has taken aside."""

    def __init__(self, engine: Any):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, tensors: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = enumerate(zip(tensors, grads, strict=True))
        grads = tuple(
            placed(g, t.device, i) if isinstance(t, torch.Tensor) else g for i, (t, g) in pairs
        )
        errors = _aside.errors
        before = len(errors)
        try:
            with torch.autograd.set_multithreading_enabled(
                False
            ):  # it holds for the calling thread
                return self._engine.run_backward(tensors, grads, *args, **kwargs)
        except SystemError:
            if len(errors) == before:
                raise
            raise errors[before] from None
        finally:
            del errors[before:]


def install() -> Callable[[], None]:
    """Put the engine in its place; calling what is returned takes it away."""
    variable = torch.autograd.Variable
    engine = variable._execution_engine
    variable._execution_engine = Engine(engine)
    functions = torch.autograd.function.BackwardCFunction
    theirs = {
        name: getattr(functions, name)
        for name in ("apply", "apply_boxed")
        if hasattr(functions, name)
    }
    for name, apply in theirs.items():
        setattr(functions, name, _checked(apply))

    def undo() -> None:
        variable._execution_engine = engine
        for name, apply in theirs.items():
            setattr(functions, name, apply)

    return undo
