"""torch.cuda.FloatTensor and the like: old names for a device type and a dtype."""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.patches.devices import FACE
from multigpu.virtual.patches.replacing import Replacement, Row, values

MODULE = f"torch.{FACE}"
DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class TensorType(type):
    """The class of torch.cuda.FloatTensor, which is no class of tensors.

    A call makes a tensor on the current device from sizes or from data, and isinstance looks
    at a tensor's device and dtype.
    """

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return torch.as_tensor(args[0], dtype=cls.dtype, device=FACE)
        size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(size, dtype=cls.dtype, device=FACE)

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.device.type == FACE
            and instance.dtype is cls.dtype
        )


# torch's C++ code reads a type's device and dtype from the name that it has there.
TYPES = {
    name: TensorType(f"{MODULE}.{name}", (), {"dtype": dtype, "__module__": MODULE})
    for name, dtype in DTYPES.items()
}


def type_named(dtype: Any) -> TensorType | None:
    """The class for torch.cuda.FloatTensor or its name; None for everything else."""
    if isinstance(dtype, str):
        prefix, _, name = dtype.rpartition(".")
        return TYPES.get(name) if prefix == MODULE else None
    return dtype if isinstance(dtype, TensorType) else None


def _set_default(original: Callable) -> Callable:
    """torch.set_default_tensor_type, also for these types: a default dtype and device."""

    def set_default_tensor_type(t: Any, /) -> None:
        if tensor_type := type_named(t):
            torch.set_default_dtype(tensor_type.dtype)
            torch.set_default_device(FACE)
        else:
            torch.set_default_device(None)
            original(t)

    return set_default_tensor_type


ROWS: tuple[Row, ...] = (
    *values([MODULE], TYPES, "C++ makes these types for CUDA only"),
    Replacement(
        "torch",
        "set_default_tensor_type",
        _set_default,
        "torch knows the types of its own devices only",
    ),
)
