"""The numbers of the pictures of docs/static/pictures.js, computed by the library."""

from multigpu.memory import MODELS
from multigpu.scaling.cluster import network
from multigpu.virtual.sim.network import collective_seconds
from multigpu.virtual.sim.presets import GPUS

CLUSTERS = {
    "8 × V100 a node: NVLink2, RoCE 100 Gbit/s": ("NVLink2", "RoCE100", 8),
    "8 × A100 a node: NVLink3, InfiniBand HDR": ("NVLink3", "HDR200", 8),
    "8 × H100 a node: NVLink4, InfiniBand NDR": ("NVLink4", "NDR400", 8),
    "8 GPUs a node: PCIe 3, 10 Gbit/s Ethernet": ("PCIe3", "Ethernet10", 8),
}
RANKS = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
SIZES = [4**power for power in range(5, 18)]  # 1 KiB to 16 GiB


def numbers() -> dict:
    """What the pictures show.

    models, gpus           weights of a model and bytes of a GPU, by name
    ranks, sizes, seconds  of all-reduces; seconds[cluster] has a row for each number of ranks
    """
    seconds = {}
    for name, (link, between, per_node) in CLUSTERS.items():
        groups = [network(link, between, per_node).group(ranks) for ranks in RANKS]
        seconds[name] = [
            [float(f"{collective_seconds('allreduce', size, group):.4g}") for size in SIZES]
            for group in groups
        ]
    return {
        "models": {name: model.weights for name, model in MODELS.items()},
        "gpus": {name: GPUS[name].memory for name in ("V100-32GB", "A100-40GB", "A100-80GB")},
        "ranks": RANKS,
        "sizes": SIZES,
        "seconds": seconds,
    }
