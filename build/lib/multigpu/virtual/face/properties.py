"""What CUDA says about a GPU: torch.cuda.get_device_properties."""

from dataclasses import asdict, dataclass

from multigpu.vgpu.patches.properties import DeviceProperties, get_device_properties
from multigpu.vgpu.sim.memory import Meter
from multigpu.vgpu.sim.presets import Gpu

KIB = 2**10
MIB = 2**20


@dataclass(frozen=True)
class Processors:
    """The memory and the clock of a GPU's processors; sizes in bytes.

    Sources: CUDA C++ Programming Guide, table "Technical Specifications per Compute
    Capability"; NVIDIA's white papers on V100, A100 and H100 (caches, clocks).
    """

    shared_memory: int
    l2_cache: int
    clock_khz: int


V100 = Processors(96 * KIB, 6 * MIB, 1_530_000)
A100 = Processors(164 * KIB, 40 * MIB, 1_410_000)
H100 = Processors(228 * KIB, 50 * MIB, 1_980_000)
_BY_NAME = {"V100": V100, "A100": A100, "H100": H100}


def processors(gpu: Gpu) -> Processors:
    """The processors of a preset; another Gpu has those of a V100, or of an A100 with bf16."""
    for name, known in _BY_NAME.items():
        if gpu.name.startswith(name):
            return known
    return A100 if gpu.bf16 else V100


@dataclass(frozen=True, kw_only=True)
class CudaProperties(DeviceProperties):
    """The attributes of torch's _CudaDeviceProperties; sizes in bytes, the clock in kHz."""

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
    gcnArchName: str = ""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, "
            f"minor={self.minor}, total_memory={self.total_memory // MIB}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // MIB}MB)"
        )


# Bits of the memory bus: HBM2 with four stacks, HBM2e and HBM3 with five.
_BUS_BITS = {V100: 4096, A100: 5120, H100: 5120}


def properties_of(meter: Meter) -> CudaProperties:
    """The properties of a virtual GPU, whose name says that it is virtual."""
    gpu = meter.machine.gpu
    known = processors(gpu)
    bus = _BUS_BITS[known]
    shared = asdict(get_device_properties(meter.index))
    return CudaProperties(
        **shared,
        L2_cache_size=known.l2_cache,
        shared_memory_per_multiprocessor=known.shared_memory,
        # From compute capability 8.0 on CUDA keeps 1 KiB of a block's shared memory.
        shared_memory_per_block_optin=known.shared_memory
        - (KIB if shared["major"] > 7 else 0),
        clock_rate=known.clock_khz,
        # The memory transfers twice per clock.
        memory_clock_rate=round(gpu.bandwidth * 8 / bus / 2 / 1000),
        memory_bus_width=bus,
        uuid=f"00000000-0000-0000-0000-{meter.index:012x}",
        pci_bus_id=meter.index,
    )
