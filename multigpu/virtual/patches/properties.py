"""What CUDA says about a GPU: torch.cuda.get_device_properties."""

from dataclasses import dataclass

from multigpu.virtual.sim.memory import Meter
from multigpu.virtual.sim.presets import Gpu
from multigpu.virtual.visible import uuid

KIB = 2**10
MIB = 2**20


@dataclass(frozen=True)
class Processors:
    """The memory and the clock of a GPU's processors; sizes in bytes.

    Sources: NVIDIA's white papers and datasheets of the GPUs; for the caches of H200, B200 and
    GB200, and the clocks of B200 and GB200, what such GPUs report.
    """

    l2_cache: int
    clock_khz: int
    bus_bits: int


_BY_NAME = {
    "V100": Processors(6 * MIB, 1_530_000, 4096),
    "T4": Processors(4 * MIB, 1_590_000, 256),
    "A100": Processors(40 * MIB, 1_410_000, 5120),
    "A10": Processors(6 * MIB, 1_695_000, 384),
    "A10G": Processors(6 * MIB, 1_710_000, 384),
    "L4": Processors(48 * MIB, 2_040_000, 192),
    "L40S": Processors(96 * MIB, 2_520_000, 384),
    "RTX3060": Processors(3 * MIB, 1_777_000, 192),
    "RTX3090": Processors(6 * MIB, 1_695_000, 384),
    "RTX4090": Processors(72 * MIB, 2_520_000, 384),
    "RTX5090": Processors(96 * MIB, 2_407_000, 512),
    "H100": Processors(50 * MIB, 1_980_000, 5120),
    "H200": Processors(60 * MIB, 1_980_000, 6144),
    "B200": Processors(126 * MIB, 1_965_000, 8192),
    "GB200": Processors(126 * MIB, 2_062_000, 8192),
}
# The shared memory of a multiprocessor in KiB, by compute capability: CUDA C++ Programming
# Guide, table "Technical Specifications per Compute Capability".
_SHARED = {(7, 0): 96, (7, 5): 64, (8, 0): 164, (8, 6): 100, (8, 9): 100, (12, 0): 100}
# The threads of a multiprocessor by compute capability, where they are not 2048: from the
# same table.
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}


def processors(gpu: Gpu) -> Processors:
    """The processors of a preset; another Gpu has those of a V100, or of an A100 with bf16."""
    listed = _BY_NAME.get(gpu.name.partition("-")[0])
    return listed or _BY_NAME["A100" if gpu.bf16 else "V100"]


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """The attributes of torch's _CudaDeviceProperties; sizes in bytes, the clock in kHz."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    L2_cache_size: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    uuid: str
    pci_bus_id: int
    pci_device_id: int = 0
    pci_domain_id: int = 0
    shared_memory_per_block: int = 48 * KIB
    regs_per_multiprocessor: int = 65536
    max_threads_per_block: int = 1024
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, "
            f"minor={self.minor}, total_memory={self.total_memory // MIB}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // MIB}MB)"
        )


def properties_of(meter: Meter) -> DeviceProperties:
    """The properties of a virtual GPU, whose name says that it is virtual.

    A Gpu without shares has one multiprocessor.
    """
    gpu = meter.gpu
    chip = processors(gpu)
    major, minor = gpu.capability
    shared_memory = _SHARED.get(gpu.capability, 228) * KIB
    return DeviceProperties(
        name=f"{gpu.name} (virtual)",
        major=major,
        minor=minor,
        total_memory=meter.capacity,
        multi_processor_count=gpu.shares.sms if gpu.shares else 1,
        max_threads_per_multi_processor=_THREADS.get(gpu.capability, 2048),
        L2_cache_size=chip.l2_cache,
        shared_memory_per_multiprocessor=shared_memory,
        # From compute capability 8.0 on CUDA keeps 1 KiB of a block's shared memory.
        shared_memory_per_block_optin=shared_memory - (KIB if major > 7 else 0),
        clock_rate=chip.clock_khz,
        # The memory transfers twice per clock.
        memory_clock_rate=round(gpu.bandwidth * 8 / chip.bus_bits / 2 / 1000),
        memory_bus_width=chip.bus_bits,
        uuid=uuid(meter.number).removeprefix("GPU-"),
        pci_bus_id=meter.number,
    )
