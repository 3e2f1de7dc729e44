"""torch.cuda: what it computes when it is imported, and what is not a call of the driver.

torch.cuda's functions run unchanged above driver.py, streams.py and random_state.py. The rows
below are the rest.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from multigpu.errors import UserError
from multigpu.virtual import nvml
from multigpu.virtual.face import driver, nvtx
from multigpu.virtual.face.devices import inner
from multigpu.virtual.ops.storage import locate
from multigpu.virtual.patches import streams
from multigpu.virtual.patches.replacing import Replacement, Row

# The versions that programs read; 9.1 is the last cuDNN for V100, too.
CUDA = "12.8"
CUDNN = 91002
NCCL = (2, 27, 3)

GRAPHS = (
    "CUDA graphs do not run on virtual GPUs, because a graph replays kernels, and a virtual "
    "GPU has none: leave torch.cuda.graph and make_graphed_callables out."
)


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
        driver.synchronize()
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


class CUDAGraph:
    """torch.cuda.CUDAGraph: making one raises UserError."""

    def __new__(cls, *arguments: Any, **more: Any) -> "CUDAGraph":
        raise UserError(GRAPHS)


def _refuse_graphs(*arguments: Any, **more: Any) -> None:
    raise UserError(GRAPHS)


class MemPool:
    """torch.cuda.MemPool: a virtual GPU has one pool of memory, so it changes nothing."""

    def __init__(
        self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False
    ):
        if allocator is not None:
            raise UserError(
                "A virtual GPU does not call an allocator of the program, because it has no "
                "memory at addresses: leave MemPool's argument allocator out."
            )
        self.id = (0, id(self))

    def use_count(self) -> int:
        return 1

    def snapshot(self, include_traces: bool = True) -> list:
        return []


def _use_mem_pool(pool: MemPool, device: Any = None) -> nullcontext:
    return nullcontext()


def _external_stream(stream_ptr: int, device: Any = None, **more: Any) -> streams.Stream:
    """The stream whose cuda_stream is `stream_ptr`: a program's other library has none."""
    index = torch.cuda._utils._get_device_index(device, optional=True)
    return streams.Stream(stream_id=stream_ptr, device_index=index)


class _PlanCache:
    """torch.backends.cuda.cufft_plan_cache, and that of each device: it keeps no plans."""

    size = 0
    max_size = 4096

    def __getitem__(self, device: Any) -> "_PlanCache":
        return self

    def clear(self) -> None:
        pass


def _call_now(original: Callable) -> Callable:
    """_lazy_call: CUDA's set-up is never pending, so no call has to wait for it."""
    return lambda function, **more: function()


def _nvml_index(device: Any) -> int:
    """NVML's number of a GPU, which CUDA_VISIBLE_DEVICES does not change."""
    index = torch.cuda._utils._get_device_index(device, optional=True)
    return driver.meter_at(index).number


def _storage_cuda(original: Callable) -> Callable:
    """torch.load(map_location=lambda storage, location: storage.cuda(1))."""

    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        index = inner("cuda" if device is None else device).index
        return locate(self, driver.meter_at(index).device)

    return cuda


class _EmitNvtx(nullcontext):
    """torch.autograd.profiler.emit_nvtx, which marks nothing: no profiler of NVIDIA runs."""

    def __init__(self, enabled: bool = True, record_shapes: bool = False):
        super().__init__(self if enabled else None)


_AT_IMPORT = "torch looks for CUDA when it is imported"
_NO_LIBRARY = "torch would ask a library of NVIDIA's driver"
_NO_GRAPHS = "a graph replays kernels, and a virtual GPU has none"


def _row(owner: str, name: str, make: Callable[[Any], Any], why: str) -> Replacement:
    # Optional, because not each version of torch has all of these names.
    return Replacement(owner, name, make, why, optional=True)


ROWS: tuple[Row, ...] = (
    *(
        _row("torch.cuda", name, _becomes(value), _AT_IMPORT)
        for name, value in {
            "_is_in_bad_fork": driver.is_in_bad_fork,
            "_exchange_device": driver.exchange_device,
            "_maybe_exchange_device": driver.exchange_device,
            "_get_device_properties": driver.get_device_properties,
            "_cudart": _Cudart,
            "_cached_device_count": None,
            # Activation checkpoints keep the random state only if this is set.
            "_initialized": True,
            "_device_count_nvml": driver.device_count,
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
        _row(owner, name, _becomes(value), _NO_GRAPHS)
        for owner in ("torch.cuda", "torch.cuda.graphs")
        for name, value in (
            ("CUDAGraph", CUDAGraph),
            ("graph", CUDAGraph),
            ("make_graphed_callables", _refuse_graphs),
            ("is_current_stream_capturing", lambda: False),
        )
    ),
    *(
        _row(owner, name, _becomes(value), "a virtual GPU has one pool of memory")
        for owner in ("torch.cuda", "torch.cuda.memory")
        for name, value in (("MemPool", MemPool), ("use_mem_pool", _use_mem_pool))
    ),
    *(
        _row(owner, "ExternalStream", _becomes(_external_stream), _AT_IMPORT)
        for owner in ("torch.cuda", "torch.cuda.streams")
    ),
    _row("torch.backends.cuda", "cufft_plan_cache", _becomes(_PlanCache()), _NO_LIBRARY),
    _row(
        "torch._C",
        "_set_linalg_preferred_backend",
        _becomes(lambda backend: None),
        "it asks for libraries of NVIDIA; the CPU computes the numbers",
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
