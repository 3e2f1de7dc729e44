"""torch.cuda: what it computes when it is imported, and what is not a call of the driver.

torch.cuda's functions run unchanged above driver.py, streams.py and random_state.py. The rows
below are the rest.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from multigpu.errors import UserError
from multigpu.virtual import nvml
from multigpu.virtual.face import driver, nvtx
from multigpu.virtual.ops.storage import locate
from multigpu.virtual.patches import device_module
from multigpu.virtual.patches.devices import inner_device, meter_of
from multigpu.virtual.patches.replacing import Replacement, Row, values

# The versions that programs read; 9.1 is the last cuDNN for V100, too.
CUDA = "12.8"
CUDNN = 91002
NCCL = (2, 27, 3)

GRAPHS = (
    "CUDA graphs do not run on virtual GPUs, because a graph replays kernels, and a virtual "
    "GPU has none: leave torch.cuda.graph and make_graphed_callables out."
)
ADDRESSES = (
    "A virtual GPU has no memory at addresses and no streams of a driver: leave "
    "caching_allocator_alloc, MemPool and ExternalStream out, and allocate tensors."
)


class _Cudart:
    """The functions of CUDA's runtime that programs call: torch.cuda.cudart()."""

    class cudaError:
        success = 0

        def __new__(cls, code: int) -> int:
            return code

    @staticmethod
    def cudaGetErrorString(code: int) -> str:
        return "no error" if code == 0 else f"error {code}"

    @staticmethod
    def cudaMemGetInfo(index: int) -> tuple[int, int]:
        return driver.memory_info(index)

    @staticmethod
    def cudaDeviceSynchronize() -> int:
        device_module.synchronize()
        return 0

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        # The memory stays pageable: the host waits for copies from it.
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return 0

    @staticmethod
    def cudaProfilerStart() -> int:
        return 0

    @staticmethod
    def cudaProfilerStop() -> int:
        return 0


def _refusing(names: Iterable[str], sentence: str) -> dict[str, type]:
    """Classes in the place of torch.cuda's: making an object raises UserError."""

    def __new__(cls: type, *arguments: Any, **more: Any) -> NoReturn:
        raise UserError(sentence)

    return {name: type(name, (), {"__new__": __new__}) for name in names}


def _nvml_index(device: Any) -> int:
    """NVML's number of a GPU, which CUDA_VISIBLE_DEVICES does not change."""
    index = torch.cuda._utils._get_device_index(device, optional=True)
    return meter_of(index).number


def _storage_cuda(original: Callable) -> Callable:
    """torch.load(map_location=lambda storage, location: storage.cuda(1))."""

    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        index = inner_device("cuda" if device is None else device).index
        return locate(self, meter_of(index).device)

    return cuda


class _EmitNvtx(nullcontext):
    """torch.autograd.profiler.emit_nvtx, which marks nothing: no profiler of NVIDIA runs."""

    def __init__(self, enabled: bool = True, record_shapes: bool = False):
        super().__init__(self if enabled else None)


_AT_IMPORT = "torch looks for CUDA when it is imported"
_NO_LIBRARY = "torch would ask a library of NVIDIA's driver"
_NO_ADDRESSES = "it is for other libraries, which compute in CUDA's own memory"


ROWS: tuple[Row, ...] = (
    *values(
        ["torch.cuda"],
        {
            "_is_in_bad_fork": device_module._is_in_bad_fork,
            "_exchange_device": driver.exchange_device,
            "_maybe_exchange_device": driver.exchange_device,
            "_get_device_properties": driver.get_device_properties,
            "_cudart": _Cudart,
            "_cached_device_count": None,
            # Activation checkpoints keep the random state only if this is set.
            "_initialized": True,
            "_device_count_nvml": device_module.device_count,
        },
        _AT_IMPORT,
    ),
    *values(
        ("torch.cuda", "torch.cuda.memory", "torch.cuda.random"),
        {"_lazy_init": driver.init},
        "CUDA needs no set-up here",
    ),
    *values(
        ("torch.cuda", "torch.cuda.random"),
        {"_lazy_call": lambda function, **more: function()},
        "no call has to wait for CUDA's set-up",
    ),
    *values(
        ("torch.cuda", "torch.cuda.memory", "torch.cuda.random"),
        {"is_initialized": driver.is_in_use},
        "DeviceMesh sets a rank's device only if the program has not used CUDA yet",
    ),
    *values(["torch.cuda"], {"pynvml": nvml, "_HAS_PYNVML": True}, _NO_LIBRARY),
    *values(
        ("torch.cuda", "torch.cuda.memory"),
        {"_get_nvml_device_index": _nvml_index},
        _NO_LIBRARY,
    ),
    *values(
        ("torch.cuda", "torch.cuda.graphs"),
        {
            **_refusing(("CUDAGraph", "graph", "make_graphed_callables"), GRAPHS),
            "is_current_stream_capturing": lambda: False,
        },
        "a graph replays kernels, and a virtual GPU has none",
    ),
    *values(
        ("torch.cuda", "torch.cuda.memory"),
        _refusing(("MemPool", "caching_allocator_alloc"), ADDRESSES),
        _NO_ADDRESSES,
    ),
    *values(
        ("torch.cuda", "torch.cuda.streams"),
        _refusing(["ExternalStream"], ADDRESSES),
        _NO_ADDRESSES,
    ),
    *values(
        ["torch.cuda.nvtx"],
        {
            "mark": nvtx.mark,
            "range": nvtx.range,
            "range_end": nvtx.range_end,
            "range_pop": nvtx.range_pop,
            "range_push": nvtx.range_push,
            "range_start": nvtx.range_start,
        },
        _AT_IMPORT,
    ),
    *values(
        ["torch.autograd.profiler"],
        {"emit_nvtx": _EmitNvtx},
        "a CPU build has no NVTX; the operations are in the simulated timeline",
    ),
    *values(["torch.version"], {"cuda": CUDA}, "a CPU build has no CUDA version"),
    *values(["torch.backends.cuda"], {"is_built": lambda: True}, _AT_IMPORT),
    *values(
        ["torch.backends.cudnn"],
        {"is_available": lambda: True, "version": lambda: CUDNN},
        _AT_IMPORT,
    ),
    *values(
        ["torch.backends.cudnn"],
        {"is_acceptable": lambda tensor: False},
        "virtual GPUs have their own kernels for RNNs",
    ),
    *values(["torch.cuda.nccl"], {"version": lambda: NCCL}, _NO_LIBRARY),
    *values(
        ["torch.cuda.nccl"],
        {"is_available": lambda tensors: False},
        "reduce_add then adds copies; NCCL's functions for one process are in C++",
    ),
    Replacement(
        "torch.UntypedStorage",
        "cuda",
        _storage_cuda,
        "C++ would ask CUDA's driver",
        optional=True,
    ),
)
