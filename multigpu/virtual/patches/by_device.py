"""Replaces a class of torch by one whose calls make another object for virtual GPUs."""

from collections.abc import Callable
from typing import Any


def class_by_device(original: type, is_virtual: Callable[..., bool], make: Callable) -> type:
    """A class that replaces `original`: a call makes an original, or calls `make`.

    `is_virtual` and `make` get the arguments of the call. isinstance and issubclass accept
    both kinds. The class itself has no instances, so no instance outlives control.stop().
    """

    class ByDevice(type(original)):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not replacement:
                return super().__call__(*args, **kwargs)
            return (make if is_virtual(*args, **kwargs) else original)(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            if cls is not replacement:
                return super().__instancecheck__(instance)
            return isinstance(instance, original)

        def __subclasscheck__(cls, other: type) -> bool:
            if cls is not replacement:
                return super().__subclasscheck__(other)
            return issubclass(other, original)

    replacement = ByDevice(original.__name__, (original,), {"__doc__": original.__doc__})
    return replacement
