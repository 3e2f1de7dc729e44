"""torch.distributed.rpc sends tensors of virtual GPUs, but not from one device to another."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.virtual.patches.replacing import Replacement, Row

DEVICE_MAP = (
    "RPC with a device map sends from GPU to GPU in C++, which virtual GPUs do not have: "
    "leave the map out. A tensor then arrives on the device with the same number."
)


def _refuse(original: Callable) -> Callable:
    def device_map(*arguments: Any) -> NoReturn:
        raise UserError(DEVICE_MAP)

    return device_map


def _none(original: Callable) -> Callable:
    return lambda devices: []


_OPTIONS = "torch.distributed.rpc.options"
_WHY = "TensorPipe's part for CUDA is in C++"
ROWS: tuple[Row, ...] = (
    Replacement(_OPTIONS, "_to_device_map", _refuse, _WHY, when=dist.rpc.is_available),
    Replacement(_OPTIONS, "_to_device_list", _none, _WHY, when=dist.rpc.is_available),
)
