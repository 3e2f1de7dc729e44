"""torch.vgpu.FloatTensor and the like: old names for a device type and a dtype."""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.sim import names

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
    """The class of torch.vgpu.FloatTensor, which is no class of tensors.

    `device_type` is "vgpu", or "cuda" while virtual GPUs look like CUDA.

    A call makes a tensor on the current device from sizes or from data, and isinstance looks
    at a tensor's device and dtype.
    """

    dtype: torch.dtype
    device_type: str

    def __call__(cls, *args: Any) -> torch.Tensor:
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return torch.as_tensor(args[0], dtype=cls.dtype, device=cls.device_type)
        size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(size, dtype=cls.dtype, device=cls.device_type)

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.device.type == cls.device_type
            and instance.dtype is cls.dtype
        )


def types_of(device_type: str) -> dict[str, TensorType]:
    """The types of torch.vgpu, or of torch.cuda, by their names."""
    module = f"torch.{device_type}"
    # torch's C++ code reads a type's device and dtype from the name that it has there.
    return {
        name: TensorType(
            f"{module}.{name}",
            (),
            {"dtype": dtype, "device_type": device_type, "__module__": module},
        )
        for name, dtype in DTYPES.items()
    }


TYPES = types_of("vgpu")


def set_default(original: Callable) -> Callable:
    """torch.set_default_tensor_type, also for these types: a default dtype and device."""

    def set_default_tensor_type(t: Any, /) -> None:
        module, _, name = (t if isinstance(t, str) else t.__name__).rpartition(".")
        if module == f"torch.{names.shown_type()}" and name in DTYPES:
            torch.set_default_dtype(DTYPES[name])
            torch.set_default_device(names.shown_type())
        else:
            torch.set_default_device(None)
            original(t)

    return set_default_tensor_type
