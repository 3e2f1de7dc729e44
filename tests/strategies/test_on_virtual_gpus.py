"""The algorithms on virtual GPUs, one a rank: the same bits as on the CPU."""

import time

import pytest
import torch
import torch.distributed as dist
from ranked import LR, gap, loss, mine, mlp, small_buckets, vector

from multigpu import launch, rendezvous
from multigpu.strategies import horovod as hvd
from multigpu.strategies.bagua.async_average import AsyncModelAverage
from multigpu.strategies.bagua.bytegrad import ByteGrad
from multigpu.strategies.bagua.decentralized import Decentralized
from multigpu.strategies.bagua.gradient_allreduce import GradientAllReduce
from multigpu.strategies.bagua.low_precision import LowPrecisionDecentralized
from multigpu.strategies.bagua.qadam import QAdam, QAdamOptimizer

ALGORITHMS = {
    "gradient_allreduce": GradientAllReduce,
    "bytegrad": ByteGrad,
    "qadam": QAdam,
    "decentralized": Decentralized,
    "shift_one": lambda: Decentralized("shift_one"),
    "low_precision": LowPrecisionDecentralized,
}


def trained(device: torch.device, wrapped, optimizer, pause: float = 0) -> None:
    for step in range(5):
        loss(wrapped, tuple(part.to(device) for part in mine(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause)


def by(name: str, device: torch.device) -> torch.Tensor:
    """The weights after five steps."""
    model = mlp(0).to(device)
    if name == "horovod":
        plain = torch.optim.SGD(model.parameters(), LR)
        optimizer = hvd.DistributedOptimizer(plain, compression=hvd.Compression.fp16)
        hvd.broadcast_parameters(model.state_dict())
        trained(device, model, optimizer)
        hvd.broadcast_optimizer_state(optimizer)
        return vector(model).cpu()
    kind = QAdamOptimizer(model.parameters(), warmup_steps=2) if name == "qadam" else None
    optimizer = kind or torch.optim.SGD(model.parameters(), LR)
    algorithm = ALGORITHMS[name]()
    trained(device, algorithm.attach(model, [optimizer], small_buckets), optimizer)
    algorithm.close()
    return vector(model).cpu()


def experiments() -> dict:
    from multigpu import vgpu

    world = launch.find()
    torch.set_num_threads(1)
    (device,) = vgpu.start(1)
    store = rendezvous.meet(world, device)
    dist.init_process_group("vgpu", store=store, rank=world.rank, world_size=world.size)
    hvd.init()
    told = {
        name: gap(by(name, device), by(name, torch.device("cpu")))
        for name in (*ALGORITHMS, "horovod")
    }
    model = mlp().to(device)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = AsyncModelAverage(sync_interval_ms=1)
    trained(device, algorithm.attach(model, [optimizer], small_buckets), optimizer, pause=0.05)
    deadline = time.monotonic() + 60
    while algorithm.syncs < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    dist.barrier()
    told["syncs"] = algorithm.syncs
    algorithm.close()
    told["finite"] = vector(model).isfinite().all().item()
    return told


@pytest.fixture(scope="module")
def ranks():
    """What each of two ranks tells."""
    return launch.call(experiments, 2)


@pytest.mark.parametrize("name", [*ALGORITHMS, "horovod"])
def test_a_virtual_gpu_gives_the_cpus_bits(ranks, name):
    for told in ranks:
        assert told[name] == 0


def test_the_asynchronous_average_runs_beside_the_virtual_training(ranks):
    for told in ranks:
        assert told["syncs"] > 2 and told["finite"]
