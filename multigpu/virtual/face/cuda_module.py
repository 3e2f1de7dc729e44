"""torch.cuda: what it computes when it is imported, and what is not a call of the driver.

torch.cuda's functions run unchanged above driver.py, streams.py and random_state.py. The rows
below are the rest.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from multigpu.errors import UserError
from multigpu.virtual import nvml
from multigpu.virtual.face import driver, nvtx
from multigpu.virtual.ops.storage import locate
from multigpu.virtual.patches import device_module
from multigpu.virtual.patches.devices import inner_device, meter_of
from multigpu.virtual.patches.replacing import Replacement, Row

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
_BY_ADDRESS = {
    "torch.cuda.memory": ("MemPool", "caching_allocator_alloc"),
    "torch.cuda.streams": ("ExternalStream",),
}


def _becomes(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


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


def _refusing(name: str, sentence: str) -> type:
    """A class in the place of torch.cuda's: making an object raises UserError."""

    def __new__(cls: type, *arguments: Any, **more: Any) -> NoReturn:
        raise UserError(sentence)

    return type(name, (), {"__new__": __new__})


def _call_now(original: Callable) -> Callable:
    """_lazy_call: CUDA's set-up is never pending, so no call has to wait for it."""
    return lambda function, **more: function()


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
_NO_GRAPHS = "a graph replays kernels, and a virtual GPU has none"


def _row(owner: str, name: str, make: Callable[[Any], Any], why: str) -> Replacement:
    # Optional, because not each version of torch has all of these names.
    return Replacement(owner, name, make, why, optional=True)


ROWS: tuple[Row, ...] = (
    *(
        _row("torch.cuda", name, _becomes(value), _AT_IMPORT)
        for name, value in {
            "_is_in_bad_fork": device_module._is_in_bad_fork,
            "_exchange_device": driver.exchange_device,
            "_maybe_exchange_device": driver.exchange_device,
            "_get_device_properties": driver.get_device_properties,
            "_cudart": _Cudart,
            "_cached_device_count": None,
            # Activation checkpoints keep the random state only if this is set.
            "_initialized": True,
            "_device_count_nvml": device_module.device_count,
        }.items()
    ),
    *(
        _row(owner, "_lazy_init", _becomes(driver.init), "CUDA needs no set-up here")
        for owner in ("torch.cuda", "torch.cuda.memory", "torch.cuda.random")
    ),
    *(
        _row(owner, "_lazy_call", _call_now, "nothing waits for CUDA's set-up")
        for owner in ("torch.cuda", "torch.cuda.random")
    ),
    *(
        _row(
            owner,
            "is_initialized",
            _becomes(driver.is_in_use),
            "DeviceMesh sets a rank's device only if the program has not used CUDA yet",
        )
        for owner in ("torch.cuda", "torch.cuda.memory", "torch.cuda.random")
    ),
    *(
        _row("torch.cuda", name, _becomes(value), _NO_LIBRARY)
        for name, value in {"pynvml": nvml, "_HAS_PYNVML": True}.items()
    ),
    *(
        _row(owner, "_get_nvml_device_index", _becomes(_nvml_index), _NO_LIBRARY)
        for owner in ("torch.cuda", "torch.cuda.memory")
    ),
    *(
        _row(owner, name, _becomes(_refusing(name, GRAPHS)), _NO_GRAPHS)
        for owner in ("torch.cuda", "torch.cuda.graphs")
        for name in ("CUDAGraph", "graph", "make_graphed_callables")
    ),
    *(
        _row(owner, "is_current_stream_capturing", _becomes(lambda: False), _NO_GRAPHS)
        for owner in ("torch.cuda", "torch.cuda.graphs")
    ),
    *(
        _row(owner, name, _becomes(_refusing(name, ADDRESSES)), _NO_ADDRESSES)
        for module, names in _BY_ADDRESS.items()
        for owner in ("torch.cuda", module)
        for name in names
    ),
    *(
        _row("torch.cuda.nvtx", function.__name__, _becomes(function), _AT_IMPORT)
        for function in (
            nvtx.mark,
            nvtx.range,
            nvtx.range_end,
            nvtx.range_pop,
            nvtx.range_push,
            nvtx.range_start,
        )
    ),
    Replacement(
        "torch.autograd.profiler",
        "emit_nvtx",
        _becomes(_EmitNvtx),
        "a CPU build has no NVTX; the operations are in the simulated timeline",
    ),
    _row("torch.version", "cuda", _becomes(CUDA), "a CPU build has no CUDA version"),
    _row("torch.backends.cuda", "is_built", _becomes(lambda: True), _AT_IMPORT),
    _row("torch.backends.cudnn", "is_available", _becomes(lambda: True), _AT_IMPORT),
    _row("torch.backends.cudnn", "version", _becomes(lambda: CUDNN), _AT_IMPORT),
    _row(
        "torch.backends.cudnn",
        "is_acceptable",
        _becomes(lambda tensor: False),
        "virtual GPUs have their own kernels for RNNs",
    ),
    _row("torch.cuda.nccl", "version", _becomes(lambda: NCCL), _NO_LIBRARY),
    _row(
        "torch.cuda.nccl",
        "is_available",
        _becomes(lambda tensors: False),
        "reduce_add then adds copies; NCCL's functions for one process are in C++",
    ),
    _row("torch.UntypedStorage", "cuda", _storage_cuda, "C++ would ask CUDA's driver"),
)
