"""What does autograd's engine need to run on virtual GPUs? One thread for all of them, and a way out for exceptions.

Threads: the device guard that torch offers to Python backends knows of one device. The engine would start one thread
for it and fail on vgpu:1; told to use none of its own, it runs all devices in the thread that calls backward.

Exceptions: while a Python exception unwinds the engine (OutOfMemoryError in a kernel, an error in a user's hook), the
engine restores the device's stream, and for that asks the device guard, which is in Python, for its device type. Python
code that is called while an exception is pending fails, and in this place the process would abort. So the guard takes
the exception aside; the engine ends without one, and `run_backward` raises it again.
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


class Engine:
    """Autograd's engine, which raises what the guard has taken aside."""

    def __init__(self, engine: Any):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        errors = _aside.errors
        before = len(errors)
        try:
            with torch.autograd.set_multithreading_enabled(False):  # it holds for the calling thread
                return self._engine.run_backward(*args, **kwargs)
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
    return lambda: setattr(variable, "_execution_engine", engine)
