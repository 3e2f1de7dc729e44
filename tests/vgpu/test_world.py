"""One process is one rank of a large world: shapes, memory and times, and plain PyTorch."""

import pytest
import torch
import torch.distributed as dist

from multigpu import LINKS, NETWORKS
from multigpu.virtual import control
from multigpu.virtual.sim.network import Network, collective_seconds
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD

# torch 2.13 has new names for two collectives.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
NODES = Network(LINKS["NVLink4"], NETWORKS["NDR400"], 8)


@pytest.fixture
def world():
    """world(size, rank) starts one virtual H100 as a rank of a world of nodes with 8 GPUs."""

    def start(size: int, rank: int = 0, compute: bool = False) -> torch.device:
        (device,) = control.start(
            1,
            gpu="H100-80GB",
            link="NVLink4",
            gpus_per_node=8,
            between_nodes="NDR400",
            compute=compute,
        )
        store = dist.HashStore()
        dist.init_process_group("vgpu_world", rank=rank, world_size=size, store=store)
        return device

    yield start
    dist.destroy_process_group()
    control.stop()


def collectives(name: str) -> list[float]:
    """The seconds of each collective with this name."""
    events = control.timeline().events
    return [e.end - e.start for e in events if (e.kind, e.name) == ("collective", name)]


def seconds(name: str, nbytes: float, ranks: int | range) -> float:
    """The seconds of a collective of these ranks, by the model of the network."""
    return KERNEL_OVERHEAD + collective_seconds(name, nbytes, NODES.group(ranks))


def test_numbers_are_as_if_every_rank_had_this_ranks(world):
    device = world(6, rank=2, compute=True)
    x = torch.arange(6.0, device=device)
    dist.all_reduce(x)
    assert x.tolist() == [0, 6, 12, 18, 24, 30]
    dist.all_reduce(x, dist.ReduceOp.MAX)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [0, 6, 12, 18, 24, 30]
    whole, part = torch.empty(36, device=device), torch.empty(1, device=device)
    all_gather_single(whole, x)
    assert whole.view(6, 6).tolist() == [x.tolist()] * 6
    reduce_scatter_single(part, x)
    assert part.tolist() == [72]
    received = torch.empty(6, device=device)
    dist.all_to_all_single(received, x)
    assert received.tolist() == [12] * 6
    objects = [None] * 6
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    assert objects == [{"rank": 2}] * 6
    dist.barrier()
    assert control.elapsed() > 0
