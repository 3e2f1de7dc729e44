"""The GPUs and links that can be simulated: published figures, each with its source.

Rates are the vendors' peaks for dense matrices, in decimal units as in their datasheets; real
programs reach only a part of a peak. Capacities are binary (16 GiB for "16GB"), as in CUDA's
reports.
"""

from dataclasses import dataclass
from typing import TypeVar

from multigpu.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU model: memory in bytes, memory bandwidth in bytes/s, arithmetic peaks in FLOP/s.

    `fp32` is the peak of matrix products in float32. `tf32` is the peak of convolutions in
    float32: by default PyTorch computes them on TF32 units if the GPU has such units
    (torch.backends.cudnn.allow_tf32). `fp16` is the peak of float16 and bfloat16 on tensor
    cores. `host` names the link to the host, one of LINKS. `bf16` is False for a GPU without
    bfloat16 units.
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
    """A link between devices: bandwidth in bytes/s in each direction, latency in seconds."""

    name: str
    bandwidth: float
    latency: float


# V100: "NVIDIA V100 Tensor Core GPU" datasheet (2020), column SXM2: 7.8 TFLOPS double, 15.7
#   single, 125 tensor (fp16), HBM2 900 GB/s, PCIe 3. It has no TF32 and no bfloat16 units.
#   In the simulation an operation in bfloat16 takes the same time as in fp16.
# A100: "NVIDIA A100 Tensor Core GPU" datasheet (2021), SXM4: 9.7 / 19.5 / TF32 156 / 312,
#   1,555 GB/s (40 GB) and 2,039 GB/s (80 GB), PCIe 4.
# H100: "NVIDIA H100 Tensor Core GPU" datasheet (2023), SXM5: 34 / 67; TF32 989 and fp16 1,979
#   are figures with sparsity, so half of each is used below; 3.35 TB/s, PCIe 5.
_GPUS = (
    Gpu(
        name="V100-16GB",
        memory=16 * GIB,
        bandwidth=900e9,
        fp64=7.8e12,
        fp32=15.7e12,
        tf32=15.7e12,
        fp16=125e12,
        host="PCIe3",
        bf16=False,
    ),
    Gpu(
        name="A100-40GB",
        memory=40 * GIB,
        bandwidth=1555e9,
        fp64=9.7e12,
        fp32=19.5e12,
        tf32=156e12,
        fp16=312e12,
        host="PCIe4",
    ),
    Gpu(
        name="A100-80GB",
        memory=80 * GIB,
        bandwidth=2039e9,
        fp64=9.7e12,
        fp32=19.5e12,
        tf32=156e12,
        fp16=312e12,
        host="PCIe4",
    ),
    Gpu(
        name="H100-80GB",
        memory=80 * GIB,
        bandwidth=3350e9,
        fp64=34e12,
        fp32=67e12,
        tf32=494.5e12,
        fp16=989.5e12,
        host="PCIe5",
    ),
)
GPUS = {gpu.name: gpu for gpu in _GPUS}

# PCIe, 16 lanes, each direction: 8, 16 and 32 GT/s per lane with 128b/130b coding (PCI-SIG,
#   base specifications 3.0, 4.0 and 5.0): 15.75, 31.5 and 63 GB/s.
# NVLink: NVIDIA's datasheets give both directions together, 300 GB/s (V100), 600 (A100) and
#   900 (H100); each direction has half of that.
# Latency: NCCL's own model, src/graph/tuning.cc, hwLat, ring, simple protocol: 3.4 µs per step
#   over NVLink and 5.7 µs over PCIe (the figures of NCCL 2.12).
_LINKS = (
    Link("PCIe3", bandwidth=15.75e9, latency=5.7e-6),
    Link("PCIe4", bandwidth=31.5e9, latency=5.7e-6),
    Link("PCIe5", bandwidth=63e9, latency=5.7e-6),
    Link("NVLink2", bandwidth=150e9, latency=3.4e-6),
    Link("NVLink3", bandwidth=300e9, latency=3.4e-6),
    Link("NVLink4", bandwidth=450e9, latency=3.4e-6),
)
LINKS = {link.name: link for link in _LINKS}

# Seconds that the host spends per launch, and that the device needs between two kernels. No
# datasheet gives these figures: they are round numbers of the usual order of magnitude for
# PyTorch's eager mode. benchmarks/vgpu_fidelity.py shows where they give wrong ratios (tiny
# batches).
LAUNCH_OVERHEAD = 10e-6
KERNEL_OVERHEAD = 2e-6

Kind = TypeVar("Kind", Gpu, Link)


def find_preset(what: str | Kind, table: dict[str, Kind]) -> Kind:
    """The preset named `what` in GPUS or LINKS; a Gpu or Link is returned unchanged.

    Raises UserError for an unknown name.
    """
    if not isinstance(what, str):
        return what
    if what not in table:
        word, own = ("GPU", "a Gpu(…)") if table is GPUS else ("link", "a Link(…)")
        raise UserError(
            f'there is no {word} "{what}": use one of {", ".join(table)}, '
            f"or {own} of your own."
        )
    return table[what]


def size_in_bytes(text: int | str) -> int:
    """A size as a number of bytes: "64MiB" gives 2**26. The units are B, KiB, MiB and GiB.

    An integer is already a number of bytes. Raises UserError for anything else.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "B": 1}
    if isinstance(text, str):
        for unit, factor in units.items():
            number = text.removesuffix(unit).strip()
            is_decimal = number.replace(".", "", 1).isdecimal()
            if text.endswith(unit) and is_decimal and float(number) > 0:
                return int(float(number) * factor)
    raise UserError(f'memory is {text!r}: give bytes, or a size such as "64MiB" or "1.5GiB".')
