"""Which GPUs and links can be simulated? Published figures, each with its source, and any of your own.

Rates are the vendor's peaks for dense matrices, in decimal units, as its sheets give them; a real program reaches
a part of them. Capacities are binary (16 GiB for "16GB"), as CUDA counts them.
"""

from dataclasses import dataclass
from typing import TypeVar

from multigpu.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU model: memory in bytes, bandwidth in bytes/s, peaks in FLOP/s by the arithmetic that a kernel uses.

    `fp32` is for matrix products, `tf32` for convolutions, which PyTorch gives to the TF32 units by default where a
    GPU has them (torch.backends.cudnn.allow_tf32); `fp16` is for float16 and bfloat16 on tensor cores.
    `host` names the link to the host, one of LINKS. `bf16` is False for a GPU without bfloat16 units.
    """

    name: str
    memory: int
    bandwidth: float
    fp64: float
    fp32: float
    tf32: float
    fp16: float
    host: str
    bf16: bool = True


@dataclass(frozen=True)
class Link:
    """A link between devices: bytes/s in each direction and seconds of latency."""

    name: str
    bandwidth: float
    latency: float


# V100: "NVIDIA V100 Tensor Core GPU" datasheet (2020), column SXM2: 7.8 TFLOPS double, 15.7 single, 125 tensor (fp16),
#   HBM2 900 GB/s, PCIe 3. It has no TF32, and no bfloat16 units; whoever computes in bfloat16 all the same is counted as in fp16.
# A100: "NVIDIA A100 Tensor Core GPU" datasheet (2021), SXM4: 9.7 / 19.5 / TF32 156 / 312, 1,555 GB/s (40 GB) and
#   2,039 GB/s (80 GB), PCIe 4.
# H100: "NVIDIA H100 Tensor Core GPU" datasheet (2023), SXM5: 34 / 67 / TF32 989 and fp16 1,979 with sparsity, so half
#   of those without, 3.35 TB/s, PCIe 5.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "V100-16GB", 16 * GIB, 900e9, 7.8e12, 15.7e12, 15.7e12, 125e12, "PCIe3", bf16=False
        ),
        Gpu("A100-40GB", 40 * GIB, 1555e9, 9.7e12, 19.5e12, 156e12, 312e12, "PCIe4"),
        Gpu("A100-80GB", 80 * GIB, 2039e9, 9.7e12, 19.5e12, 156e12, 312e12, "PCIe4"),
        Gpu("H100-80GB", 80 * GIB, 3350e9, 34e12, 67e12, 494.5e12, 989.5e12, "PCIe5"),
    )
}

# PCIe, 16 lanes, each direction: 8, 16 and 32 GT/s a lane with 128b/130b coding (PCI-SIG, base specifications 3.0,
#   4.0 and 5.0): 15.75, 31.5 and 63 GB/s.
# NVLink: NVIDIA's sheets give both directions together, 300 GB/s (V100), 600 (A100) and 900 (H100); half of it each way.
# Latency: NCCL's own model, src/graph/tuning.cc, hwLat, ring, simple protocol: 3.4 µs a step over NVLink and 5.7 over
#   PCIe (the figures of NCCL 2.12).
LINKS = {
    link.name: link
    for link in (
        Link("PCIe3", 15.75e9, 5.7e-6),
        Link("PCIe4", 31.5e9, 5.7e-6),
        Link("PCIe5", 63e9, 5.7e-6),
        Link("NVLink2", 150e9, 3.4e-6),
        Link("NVLink3", 300e9, 3.4e-6),
        Link("NVLink4", 450e9, 3.4e-6),
    )
}

# Seconds of the host for each operation, and of the device between two kernels: round figures of the usual order for
# PyTorch's eager mode, not a sheet's. benchmarks/vgpu_fidelity.py tells where they lead astray (tiny batches).
LAUNCH_OVERHEAD = 10e-6
KERNEL_OVERHEAD = 2e-6

Kind = TypeVar("Kind", Gpu, Link)


def named(what: str | Kind, table: dict[str, Kind]) -> Kind:
    """The preset of that name; a Gpu or Link of your own is returned as it is. Raises UserError for an unknown name."""
    if isinstance(what, str):
        if what not in table:
            word = "GPU" if table is GPUS else "link"
            raise UserError(
                f'there is no {word} "{what}": use one of {", ".join(table)}, or a {"Gpu" if table is GPUS else "Link"}(…) of your own.'
            )
        return table[what]
    return what


def size_in_bytes(text: int | str) -> int:
    """64 MiB for "64MiB", likewise KiB, GiB and B; a number is bytes. Raises UserError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "B": 1}
    if isinstance(text, str):
        for unit, factor in units.items():
            number = text.removesuffix(unit).strip()
            if (
                text.endswith(unit)
                and number.replace(".", "", 1).isdecimal()
                and float(number) > 0
            ):
                return int(float(number) * factor)
    raise UserError(f'memory is {text!r}: give bytes, or a size such as "64MiB" or "1.5GiB".')
