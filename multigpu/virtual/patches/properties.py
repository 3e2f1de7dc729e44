"""What kind of GPU a device is: name, compute capability, number of multiprocessors."""

from dataclasses import dataclass

from multigpu.virtual.patches.device_index import Device, index_of, meter_of

# The threads of a multiprocessor by compute capability, where they are not 2048.
THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}


@dataclass(frozen=True)
class DeviceProperties:
    """A device's properties, with the names that torch.cuda gives them; memory in bytes."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0


def get_device_name(device: Device = None) -> str:
    """The preset's name, marked as virtual: "V100-16GB (virtual)"."""
    return f"{meter_of(device).gpu.name} (virtual)"


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """The compute capability of the preset: (8, 0) for an A100."""
    return meter_of(device).gpu.capability


def get_device_properties(device: Device = None) -> DeviceProperties:
    """The device's properties; a Gpu without shares has one multiprocessor.

    Threads per multiprocessor: CUDA C++ Programming Guide, table "Technical Specifications per
    Compute Capability".
    """
    meter = meter_of(device)
    gpu = meter.gpu
    major, minor = gpu.capability
    return DeviceProperties(
        name=get_device_name(device),
        major=major,
        minor=minor,
        total_memory=meter.capacity,
        multi_processor_count=gpu.shares.sms if gpu.shares else 1,
        max_threads_per_multi_processor=THREADS.get(gpu.capability, 2048),
    )


def get_arch_list() -> list[str]:
    """The architecture for which there are kernels: ["sm_80"] on A100s."""
    return ["sm_{}{}".format(*get_device_capability())]


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Whether the devices copy directly: two virtual GPUs do, and none does with itself."""
    first, second = (meter_of(each).index for each in (device, peer_device))
    return first != second


def utilization(device: Device = None) -> int:
    """The percentage of the simulated time so far in which the device computed."""
    clock = meter_of(device).machine.clock
    index = index_of(device)
    now = clock.synchronize(index)
    return round(100 * clock.computed(index) / now) if now else 0
