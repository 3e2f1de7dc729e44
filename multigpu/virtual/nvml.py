"""The stand-in of pynvml (nvidia-ml-py), NVML's Python module, for virtual GPUs.

It has the functions that are below. Any other one raises NVMLError_NotSupported, as on a GPU
that lacks what it asks for. torch.cuda.utilization and its like call it, too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from multigpu.virtual import monitor
from multigpu.virtual.visible import uuid


class NVMLError(Exception):
    """An error of NVML; `value` is its code."""

    value = 999


def _error(name: str, value: int) -> type[NVMLError]:
    return type(f"NVMLError_{name}", (NVMLError,), {"value": value, "__module__": __name__})


NVMLError_Uninitialized = _error("Uninitialized", 1)
NVMLError_InvalidArgument = _error("InvalidArgument", 2)
NVMLError_NotSupported = _error("NotSupported", 3)
NVMLError_NoPermission = _error("NoPermission", 4)
NVMLError_NotFound = _error("NotFound", 6)
NVMLError_DriverNotLoaded = _error("DriverNotLoaded", 9)
NVMLError_LibraryNotFound = _error("LibraryNotFound", 12)
NVMLError_FunctionNotFound = _error("FunctionNotFound", 13)
NVMLError_GpuIsLost = _error("GpuIsLost", 15)
NVMLError_Unknown = _error("Unknown", 999)


class Memory(NamedTuple):
    """A GPU's memory in bytes."""

    total: int
    free: int
    used: int


class Utilization(NamedTuple):
    """Percentages of time: it computed, and its memory was used, which is not simulated: 0."""

    gpu: int
    memory: int


class Process(NamedTuple):
    """A process that uses a GPU, and the bytes that it occupies."""

    pid: int
    usedGpuMemory: int
    gpuInstanceId: int | None = None
    computeInstanceId: int | None = None


class Handle(NamedTuple):
    """A GPU, by its number on the machine."""

    number: int


# How often nvmlInit was called, less the calls of nvmlShutdown.
_inits = 0


def nvmlInit() -> None:
    global _inits
    _inits += 1


def nvmlShutdown() -> None:
    global _inits
    if not _inits:
        raise NVMLError_Uninitialized("Uninitialized")
    _inits -= 1


def _statuses() -> list[monitor.Status]:
    if not _inits:
        raise NVMLError_Uninitialized("Uninitialized: call nvmlInit() first.")
    return monitor.statuses()


def _status(handle: Handle) -> monitor.Status:
    return _statuses()[handle.number]


def nvmlSystemGetDriverVersion() -> str:
    return monitor.DRIVER


def nvmlSystemGetCudaDriverVersion() -> int:
    major, minor = monitor.CUDA
    return 1000 * major + 10 * minor


def nvmlDeviceGetCount() -> int:
    return len(_statuses())


def nvmlDeviceGetHandleByIndex(index: int) -> Handle:
    if not 0 <= index < nvmlDeviceGetCount():
        raise NVMLError_InvalidArgument("Invalid Argument")
    return Handle(index)


def nvmlDeviceGetName(handle: Handle) -> str:
    return _status(handle).name


def nvmlDeviceGetUUID(handle: Handle) -> str:
    return uuid(handle.number)


def nvmlDeviceGetCudaComputeCapability(handle: Handle) -> tuple[int, int]:
    return _status(handle).model.capability


def nvmlDeviceGetMemoryInfo(handle: Handle, version: int | None = None) -> Memory:
    status = _status(handle)
    return Memory(status.capacity, status.capacity - status.used, status.used)


def nvmlDeviceGetUtilizationRates(handle: Handle) -> Utilization:
    return Utilization(_status(handle).utilization, 0)


def nvmlDeviceGetComputeRunningProcesses(handle: Handle) -> list[Process]:
    return [Process(pid, nbytes) for pid, nbytes in _status(handle).processes]


nvmlDeviceGetComputeRunningProcesses_v2 = nvmlDeviceGetComputeRunningProcesses
nvmlDeviceGetComputeRunningProcesses_v3 = nvmlDeviceGetComputeRunningProcesses


def __getattr__(name: str) -> Any:
    if name.startswith("nvml"):
        return _unsupported(name)
    if name.startswith("NVML_"):
        # The functions that have such a constant as an argument are not supported.
        return 0
    raise AttributeError(f"module 'pynvml' has no attribute {name!r}")


def _unsupported(name: str) -> Callable[..., NoReturn]:
    def function(*arguments: Any, **more: Any) -> NoReturn:
        raise NVMLError_NotSupported(
            f"Not Supported: {name} has no value on a virtual GPU, whose memory and time are "
            f"simulated and nothing else: leave the call out, or catch NVMLError."
        )

    return function
