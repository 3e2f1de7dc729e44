"""The GPUs and links that can be simulated: published figures, each with its source.

Rates are the vendors' peaks for dense matrices, in decimal units as in their datasheets; real
programs reach only a part of a peak. Capacities are binary (16 GiB for "16GB"), as in CUDA's
reports.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

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

# Bandwidths, each direction:
# PCIe, 16 lanes: 8, 16 and 32 GT/s per lane with 128b/130b coding (PCI-SIG, base
#   specifications 3.0, 4.0 and 5.0): 15.75, 31.5 and 63 GB/s.
# NVLink: NVIDIA's datasheets give both directions together, 300 GB/s (V100), 600 (A100) and
#   900 (H100); each direction has half of that.
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
# src/graph/topo.h: NVLink's bandwidth per lane, 20 GB/s (V100: 6 lanes, A100: 12 lanes) and
#   20.6 (H100: 18 lanes). src/graph/topo.cc: PCIe, 16 lanes of 6, 12 and 24 Gb/s; networks,
#   the speed that the adapter reports. NCCL adds nothing for TCP (net_socket.cc: latency "Not
#   set"), so the times over Ethernet are those of a fast network card.
# `latency` is that of a ring's step with the protocol Simple.
_NVLINK = {"ring": (0.6e-6, 1.9e-6, 3.4e-6), "tree": (0.6e-6, 1.25e-6, 4e-6), "ll128": True}
_PCIE = {"ring": (1e-6, 2.5e-6, 5.7e-6), "tree": (1e-6, 1.9e-6, 4e-6), "ll128": False}
_NETWORK = {"ring": (2.7e-6, 4e-6, 14e-6), "tree": (5e-6, 8.5e-6, 14e-6)}
_VOLTA, _AMPERE, _HOPPER = 39e9, 87.7e9, 141e9


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
    _network("HDR200", 25e9, adapter="gpu", ll128=True),
    _network("NDR400", 50e9, adapter="gpu", ll128=True),
    _network("RoCE100", 12.5e9, adapter="node", ll128=True),
    _network("Ethernet25", 3.125e9, adapter="node", ll128=False),
    _network("Ethernet10", 1.25e9, adapter="node", ll128=False),
)
LINKS = {link.name: link for link in _LINKS}
# The links between nodes.
NETWORKS = {link.name: link for link in _LINKS if link.adapter is not None}

# Seconds that the host spends per launch, and that the device needs between two kernels. No
# datasheet gives these figures: they are round numbers of the usual order of magnitude for
# PyTorch's eager mode. benchmarks/vgpu_fidelity.py shows where they give wrong ratios (tiny
# batches).
LAUNCH_OVERHEAD = 10e-6
KERNEL_OVERHEAD = 2e-6

Kind = TypeVar("Kind", Gpu, Link)


def find_preset(what: str | Kind, table: dict[str, Kind]) -> Kind:
    """The preset named `what` in GPUS, LINKS or NETWORKS; a Gpu or Link is returned unchanged.

    Raises UserError for an unknown name, and for anything else.
    """
    if isinstance(what, Gpu if table is GPUS else Link):
        return what
    if not isinstance(what, str) or what not in table:
        if table is GPUS:
            word, own = "GPU", "a Gpu(…)"
        elif table is NETWORKS:
            word, own = "network", "a Link(…)"
        else:
            word, own = "link", "a Link(…)"
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
