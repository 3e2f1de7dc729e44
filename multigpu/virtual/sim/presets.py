"""The GPUs and links that can be simulated: published figures, each with its source.

Rates are the vendors' peaks for dense matrices, in decimal units as in their datasheets. What
share of a peak a kernel can reach is in a GPU's Shares. Capacities are binary (16 GiB for
"16GB"), as in CUDA's reports.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Literal, TypeVar

from multigpu.errors import UserError, did_you_mean

GIB = 2**30


@dataclass(frozen=True)
class Shares:
    """What shares of a GPU's peaks its best kernels reach, from 0 to 1, and its SMs.

    sms                 streaming multiprocessors: the tiles that are computed at the same time
    tensor              large matrix products in float16 and bfloat16 on tensor cores
    tf32                large matrix products in TF32 on tensor cores
    simt                large matrix products on CUDA cores (float32 without TF32, float64)
    convolution         a convolution, relative to a matrix product of the same size
    attention           fused attention, of the peak of its dtype
    attention_backward  its backward
    memory              kernels bound by memory traffic, of the bandwidth
    ramp                seconds until a kernel reaches its bandwidth, added to each kernel

    Raises UserError for a share outside of 0 to 1, and for fewer than one SM.
    """

    sms: int
    tensor: float
    tf32: float
    simt: float
    convolution: float
    attention: float
    attention_backward: float
    memory: float
    ramp: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "sms":
                if value < 1:
                    raise UserError(f"sms is {value!r}: a GPU has at least one SM.")
            elif field.name == "ramp":
                if value < 0:
                    raise UserError(f"ramp is {value!r}: give seconds, 0 or more.")
            elif not 0 < value <= 1:
                raise UserError(
                    f"{field.name} is {value!r}: give the share of the peak that is reached, "
                    f"above 0 and at most 1."
                )


@dataclass(frozen=True)
class Gpu:
    """A GPU model: memory in bytes, memory bandwidth in bytes/s, arithmetic peaks in FLOP/s.

    `fp32` is the peak of matrix products in float32. `tf32` is the peak of convolutions in
    float32, which PyTorch computes on TF32 units by default if the GPU has such units, and
    of matrix products for which the program allows it (cost.py). `fp64` is the peak of
    CUDA cores; products in float64 on tensor cores (A100, H100) are up to twice as fast.
    `fp16` is the peak of float16 on tensor cores, and of bfloat16 if `bf16` is True. A GPU
    without bfloat16 units computes it as float32 (cost.py). `host` names the link to the
    host, one of LINKS. `shares` says what part of the peaks is reached; a GPU without shares
    reaches all of them (the roofline model). `capability` is NVIDIA's compute capability.
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
    shares: Shares | None = None
    capability: tuple[int, int] = (8, 0)


@dataclass(frozen=True)
class Nccl:
    """The figures of a link in NCCL's tuning model, which sim/network.py uses.

    bandwidth     bytes/s of all channels together, in each direction
    ring, tree    seconds per step with the protocols LL, LL128 and Simple
    ll_bandwidth  the limit of protocol LL in a ring inside one node, in bytes/s
    ll128         whether NCCL uses the protocol LL128 over this link
    plateau       the factor of the latency of a ring across nodes with protocol Simple
    """

    bandwidth: float
    ring: tuple[float, float, float]
    tree: tuple[float, float, float]
    ll_bandwidth: float
    ll128: bool
    plateau: float = 1.4


@dataclass(frozen=True)
class Link:
    """A link between devices: bandwidth in bytes/s in each direction, latency in seconds.

    `adapter` is set for a network between nodes: with "gpu" each GPU has a network adapter of
    its own, and `bandwidth` is one adapter's. With "node" the GPUs of a node share `bandwidth`
    in equal parts. None is a link inside a node; between nodes it is the same as "node".

    `nccl` has the figures for collectives. A link without them takes `latency` for each step
    of a collective.
    """

    name: str
    bandwidth: float
    latency: float
    adapter: Literal["gpu", "node"] | None = None
    nccl: Nccl | None = None

    def divided(self, parts: int) -> "Link":
        """The same link with a `parts`-th of the bandwidth."""
        nccl = self.nccl and replace(self.nccl, bandwidth=self.nccl.bandwidth / parts)
        return replace(self, bandwidth=self.bandwidth / parts, nccl=nccl)


# Figures, from NVIDIA's datasheets and white papers unless said. Where one gives a peak with
# sparsity, half of it is used.
# V100: "NVIDIA V100 Tensor Core GPU" datasheet (2020), column SXM2: 7.8 TFLOPS double, 15.7
#   single, 125 tensor (fp16), HBM2 900 GB/s, PCIe 3. It has no TF32 and no bfloat16 units.
# T4: "NVIDIA T4" datasheet (2019): 8.1 / fp16 65, 320 GB/s, PCIe 3. No TF32, no bfloat16.
# A100: "NVIDIA A100 Tensor Core GPU" datasheet (2021), SXM4: 9.7 / 19.5 / TF32 156 / 312,
#   1,555 GB/s (40 GB) and 2,039 GB/s (80 GB), PCIe 4.
# A10: "NVIDIA A10 Tensor Core GPU" datasheet (2021): 31.2 / TF32 62.5 / 125, 600 GB/s. A10G:
#   "NVIDIA A10G" datasheet (2022; AWS alone has it): 35 / TF32 35 / 70, 600 GB/s.
# L4: "NVIDIA L4 Tensor Core GPU" datasheet (2023): 30.3; TF32 120 and fp16 242 with sparsity;
#   300 GB/s. L40S: "NVIDIA L40S" datasheet (2023): 91.6 / TF32 183 / 362.05, 864 GB/s.
# RTX3090: "NVIDIA Ampere GA102 GPU Architecture" (2020): 35.6 / TF32 35.6 / 71, 936 GB/s.
#   RTX3060-12GB: NVIDIA's product page: 3,584 cores at 1.78 GHz, so 12.7, and 360 GB/s; its
#   SMs are those of GA102, so TF32 12.7 and 25.5.
# RTX4090: "NVIDIA Ada GPU Architecture" (2022): 82.6 / TF32 82.6 / 165.2, 1,008 GB/s.
# RTX5090: "NVIDIA RTX Blackwell GPU Architecture" (2025): 104.8 / TF32 104.8 / 209.5,
#   1,792 GB/s, PCIe 5. The fp16 of GeForce cards is that with sums in float32, as cuBLAS adds:
#   it is half of that with sums in float16, which other cards do not have.
# fp64: 1/32 of fp32 (T4: "NVIDIA Turing GPU Architecture"), 1/64 (GA102's and later papers,
#   for A10, A10G, L4, L40S and the GeForce cards).
# H100: "NVIDIA H100 Tensor Core GPU" datasheet (2023), SXM5: 34 / 67; TF32 989 and fp16 1,979
#   with sparsity; 3.35 TB/s, PCIe 5. H200: "NVIDIA H200 Tensor Core GPU" datasheet (2024),
#   SXM: H100's peaks, 141 GB, 4.8 TB/s.
# B200: "NVIDIA Blackwell Architecture Technical Brief" (2024), HGX B200: 40 / 80; TF32 2,200
#   and fp16 4,500 with sparsity; 8 TB/s, PCIe 5. 180 GB: NVIDIA DGX B200 datasheet (1,440 GB
#   of eight).
# GB200, each of its GPUs: "NVIDIA GB200 NVL72" datasheet (2024), a 72nd of the rack's figures:
#   40 / 80; TF32 2,500 and fp16 5,000 with sparsity; 13.4 TB in all, 8 TB/s. Its link to the
#   host is NVLink-C2C.
#
# Shares, in the order of the fields. None of them was fitted to a row of
# benchmarks/vgpu_fidelity.json or to a configuration of vtrain.csv with more than 2 GPUs.
# sms: NVIDIA's architecture white papers, or a datasheet's cores, 64 (T4) or 128 for each SM;
#   for A10G, B200 and GB200 what torch.cuda.get_device_properties reports.
# tensor: V100: 83 of 112.7 TFLOP/s, Markidis et al., "NVIDIA Tensor Core Programmability,
#   Performance & Precision" (arXiv 1803.04014). A100: 271.2 of 312; H100: 794.5 of 989,
#   Bekman, "Machine Learning Engineering" (github.com/stas00/ml-engineering,
#   compute/accelerator, table of maximum achievable matmul FLOPS).
# tf32: A100: 143 TFLOP/s of 156 with CUDA 11.3, 39% more than with 11.2, the version of the
#   tables that the benchmarks have (github.com/NVIDIA/cutlass, discussion 241). H100: 425.6 of
#   494.5 (github.com/xzwgit/gpu-flops-bench, an H200 NVL). V100 has no TF32 units.
# simt: V100: a seventh of 83 TFLOP/s, of 14.0 (Markidis et al.). A100: 17.7 of 19.5 TFLOP/s
#   (github.com/AG0708/sgBLAS, release 0.1.0), at 94% of cuBLAS. H100: no source; as A100.
# convolution: an assumption; no published ratio was found.
# attention: A100: 73% forward and 63% backward, Dao, "FlashAttention-2" (arXiv 2307.08691).
#   H100: 35%, the share of FlashAttention-2 in Shah et al., "FlashAttention-3" (arXiv
#   2407.08608); backward has A100's ratio. V100: the upper and lower end of what the abstract
#   of arXiv 2307.08691 says of FlashAttention 1, 25 to 40%; no source for V100 itself.
# memory: what a stream of loads and stores reaches, times 0.72, what PyTorch's kernels reach
#   of that. Streams: V100: 750 of 900 GB/s, Jia et al., "Dissecting the NVIDIA Volta GPU
#   Architecture via Microbenchmarking" (arXiv 1804.06826). A100: 90%, Isaev et al., "Calculon"
#   (github.com/calculon-ai/calculon, systems/a100_80g.json). H100: 3.31 of 4.0 TB/s on a GH200
#   (github.com/UoB-HPC/BabelStream, issue 194). The factor 0.72 is calibrated on the
#   configurations of vtrain.csv with 2 GPUs (benchmarks/vtrain.py).
# ramp: about 1,000 cycles for a load that misses all caches (Jia et al.) at the start and as
#   much at the end, at 1.4 GHz.
# Other GPUs, all assumed: T4 has V100's shares; A10, A10G, L4, L40S and the GeForce cards have
#   A100's, because their tensor cores have its instruction, mma.sync; H200, B200 and GB200
#   have H100's.
_V100 = partial(
    Shares,
    tensor=0.74,
    tf32=0.74,
    simt=0.85,
    convolution=0.8,
    attention=0.4,
    attention_backward=0.25,
    memory=0.60,
    ramp=1.5e-6,
)
_A100 = partial(
    Shares,
    tensor=0.869,
    tf32=0.66,
    simt=0.91,
    convolution=0.8,
    attention=0.73,
    attention_backward=0.63,
    memory=0.65,
    ramp=1.5e-6,
)
_H100 = partial(
    Shares,
    tensor=0.803,
    tf32=0.86,
    simt=0.91,
    convolution=0.8,
    attention=0.35,
    attention_backward=0.3,
    memory=0.60,
    ramp=1.5e-6,
)


def _gpu(
    name: str,
    gib: int,
    bandwidth: float,
    fp64: float,
    fp32: float,
    tf32: float,
    fp16: float,
    host: str,
    capability: tuple[int, int],
    sms: int,
    shares: Callable[..., Shares],
) -> Gpu:
    """A row of the table: memory in GiB, bandwidth in GB/s, peaks in TFLOP/s."""
    peaks = (peak * 1e12 for peak in (fp64, fp32, tf32, fp16))
    has_bf16 = capability >= (8, 0)
    size, rate = gib * GIB, bandwidth * 1e9
    return Gpu(name, size, rate, *peaks, host, has_bf16, shares(sms=sms), capability)


_GPUS = (
    # name, GiB, GB/s; TFLOP/s: fp64, fp32, tf32, fp16; host, capability, SMs, shares
    _gpu("V100-16GB", 16, 900, 7.8, 15.7, 15.7, 125, "PCIe3", (7, 0), 80, _V100),
    _gpu("V100-32GB", 32, 900, 7.8, 15.7, 15.7, 125, "PCIe3", (7, 0), 80, _V100),
    _gpu("T4", 16, 320, 8.1 / 32, 8.1, 8.1, 65, "PCIe3", (7, 5), 40, _V100),
    _gpu("A100-40GB", 40, 1555, 9.7, 19.5, 156, 312, "PCIe4", (8, 0), 108, _A100),
    _gpu("A100-80GB", 80, 2039, 9.7, 19.5, 156, 312, "PCIe4", (8, 0), 108, _A100),
    _gpu("A10", 24, 600, 31.2 / 64, 31.2, 62.5, 125, "PCIe4", (8, 6), 72, _A100),
    _gpu("A10G", 24, 600, 35 / 64, 35, 35, 70, "PCIe4", (8, 6), 80, _A100),
    _gpu("L4", 24, 300, 30.3 / 64, 30.3, 60, 121, "PCIe4", (8, 9), 58, _A100),
    _gpu("L40S", 48, 864, 91.6 / 64, 91.6, 183, 362.05, "PCIe4", (8, 9), 142, _A100),
    _gpu("RTX3060-12GB", 12, 360, 12.7 / 64, 12.7, 12.7, 25.5, "PCIe4", (8, 6), 28, _A100),
    _gpu("RTX3090", 24, 936, 35.6 / 64, 35.6, 35.6, 71, "PCIe4", (8, 6), 82, _A100),
    _gpu("RTX4090", 24, 1008, 82.6 / 64, 82.6, 82.6, 165.2, "PCIe4", (8, 9), 128, _A100),
    _gpu("RTX5090", 32, 1792, 104.8 / 64, 104.8, 104.8, 209.5, "PCIe5", (12, 0), 170, _A100),
    _gpu("H100-80GB", 80, 3350, 34, 67, 494.5, 989.5, "PCIe5", (9, 0), 132, _H100),
    _gpu("H200", 141, 4800, 34, 67, 494.5, 989.5, "PCIe5", (9, 0), 132, _H100),
    _gpu("B200", 180, 8000, 40, 80, 1100, 2250, "PCIe5", (10, 0), 148, _H100),
    _gpu("GB200", 186, 8000, 40, 80, 1250, 2500, "NVLink-C2C", (10, 0), 152, _H100),
)
GPUS = {gpu.name: gpu for gpu in _GPUS}

# Bandwidths, each direction:
# PCIe, 16 lanes: 8, 16 and 32 GT/s per lane with 128b/130b coding (PCI-SIG, base
#   specifications 3.0, 4.0 and 5.0): 15.75, 31.5 and 63 GB/s.
# NVLink: NVIDIA's datasheets give both directions together, 300 GB/s (V100), 600 (A100),
#   900 (H100), 1,800 (B200), and 900 for NVLink-C2C (GB200); each direction has half of that.
# InfiniBand, 4 lanes: HDR 200 Gb/s, NDR 400 Gb/s (InfiniBand Trade Association, "InfiniBand
#   Roadmap"). Each GPU has its own adapter: NVIDIA DGX A100 and DGX H100 datasheets, eight
#   adapters for eight GPUs.
# Ethernet: IEEE 802.3ae (10 Gb/s), 802.3by (25) and 802.3bj (100, here with RoCE: RDMA over
#   Ethernet). Each node has one adapter.
#
# Latencies and NCCL's figures: NCCL 2.30.7, https://github.com/NVIDIA/nccl
# src/graph/tuning.cc: ncclTunerConstantsDefaults has the latencies (hwLatencies) and LL's
#   limits (llMaxBws, one node); ncclTopoTuneModel turns LL128 off over PCIe;
#   ncclTopoGetAlgoTime has the plateau (1.9 for V100, 1.4 for later GPUs).
# src/graph/topo.h: NVLink's bandwidth per lane, 20 GB/s (V100: 6 lanes, A100: 12 lanes), 20.6
#   (H100: 18 lanes) and 40.1 (B200: 18 lanes). src/graph/topo.cc: PCIe, 16 lanes of 6, 12 and
#   24 Gb/s; networks, the speed that the adapter reports. NCCL adds nothing for TCP
#   (net_socket.cc: latency "Not set"), so the times over Ethernet are those of a fast network
#   card.
# `latency` is that of a ring's step with the protocol Simple.
_NVLINK = {"ring": (0.6e-6, 1.9e-6, 3.4e-6), "tree": (0.6e-6, 1.25e-6, 4e-6), "ll128": True}
_PCIE = {"ring": (1e-6, 2.5e-6, 5.7e-6), "tree": (1e-6, 1.9e-6, 4e-6), "ll128": False}
_NETWORK = {"ring": (2.7e-6, 4e-6, 14e-6), "tree": (5e-6, 8.5e-6, 14e-6)}
_VOLTA, _AMPERE, _HOPPER, _BLACKWELL = 39e9, 87.7e9, 141e9, 282e9


def _network(
    name: str, bandwidth: float, adapter: Literal["gpu", "node"], ll128: bool
) -> Link:
    nccl = Nccl(bandwidth, **_NETWORK, ll_bandwidth=_VOLTA, ll128=ll128)
    return Link(name, bandwidth, latency=14e-6, adapter=adapter, nccl=nccl)


_LINKS = (
    Link("PCIe3", 15.75e9, 5.7e-6, nccl=Nccl(12e9, **_PCIE, ll_bandwidth=_VOLTA)),
    Link("PCIe4", 31.5e9, 5.7e-6, nccl=Nccl(24e9, **_PCIE, ll_bandwidth=_AMPERE)),
    Link("PCIe5", 63e9, 5.7e-6, nccl=Nccl(48e9, **_PCIE, ll_bandwidth=_HOPPER)),
    Link(
        "NVLink2",
        150e9,
        3.4e-6,
        nccl=Nccl(120e9, **_NVLINK, ll_bandwidth=_VOLTA, plateau=1.9),
    ),
    Link("NVLink3", 300e9, 3.4e-6, nccl=Nccl(240e9, **_NVLINK, ll_bandwidth=_AMPERE)),
    Link("NVLink4", 450e9, 3.4e-6, nccl=Nccl(370.8e9, **_NVLINK, ll_bandwidth=_HOPPER)),
    Link("NVLink5", 900e9, 3.4e-6, nccl=Nccl(721.8e9, **_NVLINK, ll_bandwidth=_BLACKWELL)),
    Link("NVLink-C2C", 450e9, 3.4e-6),
    _network("HDR200", 25e9, adapter="gpu", ll128=True),
    _network("NDR400", 50e9, adapter="gpu", ll128=True),
    _network("RoCE100", 12.5e9, adapter="node", ll128=True),
    _network("Ethernet25", 3.125e9, adapter="node", ll128=False),
    _network("Ethernet10", 1.25e9, adapter="node", ll128=False),
)
LINKS = {link.name: link for link in _LINKS}
# The links between nodes.
NETWORKS = {link.name: link for link in _LINKS if link.adapter is not None}

# The seconds that the host spends to launch a transfer, a collective or a simple operation.
# sim/host.py has those of other operations, with the sources.
# The seconds that the device needs between two kernels: a round number of the usual order of
# magnitude.
LAUNCH_OVERHEAD = 10e-6
KERNEL_OVERHEAD = 2e-6

Kind = TypeVar("Kind", Gpu, Link)


def find_gpus(gpu: str | Gpu | Sequence[str | Gpu], count: int | None = None) -> list[Gpu]:
    """`count` GPUs: all are `gpu`, or `gpu` is a list with one for each. Default: 2.

    The default count for a list is its length. Raises UserError for an unknown name, and for
    a list of another length.
    """
    if not isinstance(gpu, (list, tuple)):
        return [find_preset(gpu, GPUS)] * (2 if count is None else count)
    models = [find_preset(model, GPUS) for model in gpu]
    if not models or count not in (None, len(models)):
        wanted = "at least one" if count is None else f"one name for all, or {count}"
        raise UserError(f"{len(models)} GPUs are named: give {wanted}.")
    return models


def models_label(models: Sequence[Gpu]) -> str:
    """The GPUs for a label: "2 × V100-16GB", or "1 × A100-80GB + 1 × T4"."""
    groups = (list(group) for _, group in groupby(models, key=lambda gpu: gpu.name))
    return " + ".join(f"{len(group)} × {group[0].name}" for group in groups)


def find_preset(preset: str | Kind, table: dict[str, Kind]) -> Kind:
    """The preset of this name in GPUS, LINKS or NETWORKS; a Gpu or Link is returned unchanged.

    Raises UserError for an unknown name, and for anything else.
    """
    if isinstance(preset, Gpu if table is GPUS else Link):
        return preset
    if not isinstance(preset, str) or preset not in table:
        if table is GPUS:
            word, example = "GPU", "a Gpu(…)"
        elif table is NETWORKS:
            word, example = "network", "a Link(…)"
        else:
            word, example = "link", "a Link(…)"
        near = did_you_mean(preset, table)
        raise UserError(
            f'there is no {word} "{preset}": {f"{near} There are" if near else "use one of"} '
            f"{', '.join(table)}, or {example} of your own."
        )
    return table[preset]


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


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes as CUDA's messages do: "64.00 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
