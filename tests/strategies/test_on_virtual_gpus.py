"""The algorithms on virtual GPUs, one per rank: the same bits as on the CPU."""

import time

import pytest
import torch
import torch.distributed as dist
from ranked import LR, local_batch, loss, max_difference, mlp, small_buckets, vector
from torch import nn

from multigpu import launch
from multigpu.launch import rendezvous
from multigpu.strategies import horovod as hvd
from multigpu.strategies.bagua.async_average import AsyncModelAverage
from multigpu.strategies.bagua.bytegrad import ByteGrad
from multigpu.strategies.bagua.decentralized import Decentralized
from multigpu.strategies.bagua.gradient_allreduce import GradientAllReduce
from multigpu.strategies.bagua.low_precision import LowPrecisionDecentralized
from multigpu.strategies.bagua.qadam import QAdam, QAdamOptimizer

pytestmark = pytest.mark.slow

ALGORITHMS = {
    "gradient_allreduce": GradientAllReduce,
    "bytegrad": ByteGrad,
    "qadam": QAdam,
    "decentralized": Decentralized,
    "shift_one": lambda: Decentralized(peer_selection_mode="shift_one"),
    "low_precision": LowPrecisionDecentralized,
}


def train(
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pause: float = 0,
) -> None:
    """Five steps, with a pause of as many seconds after each."""
    for step in range(5):
        x, y = local_batch(step)
        loss(model, (x.to(device), y.to(device))).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause)


def trained_with(name: str, device: torch.device) -> torch.Tensor:
    """The weights after five steps."""
    model = mlp(0).to(device)
    if name == "horovod":
        plain = torch.optim.SGD(model.parameters(), LR)
        optimizer = hvd.DistributedOptimizer(plain, compression=hvd.Compression.fp16)
        hvd.broadcast_parameters(model.state_dict())
        train(device, model, optimizer)
        hvd.broadcast_optimizer_state(optimizer)
        return vector(model).cpu()
    if name == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), warmup_steps=2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = ALGORITHMS[name]()
    train(device, algorithm.attach(model, [optimizer], small_buckets), optimizer)
    algorithm.close()
    return vector(model).cpu()


def experiments() -> dict:
    from multigpu.virtual import control

    world = launch.find_world()
    torch.set_num_threads(1)
    (device,) = control.start(1)
    store = rendezvous.open_store(world, device)
    dist.init_process_group("vgpu", store=store, rank=world.rank, world_size=world.size)
    hvd.init()
    report = {}
    for name in (*ALGORITHMS, "horovod"):
        on_cpu = trained_with(name, torch.device("cpu"))
        report[name] = max_difference(trained_with(name, device), on_cpu)
    model = mlp().to(device)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = AsyncModelAverage(sync_interval_ms=1)
    wrapped = algorithm.attach(model, [optimizer], small_buckets)
    train(device, wrapped, optimizer, pause=0.05)
    deadline = time.monotonic() + 60
    while algorithm.averaging_rounds < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    dist.barrier()
    report["rounds"] = algorithm.averaging_rounds
    algorithm.close()
    report["finite"] = vector(model).isfinite().all().item()
    return report


@pytest.fixture(scope="module")
def reports():
    """The reports of two ranks."""
    return launch.call(experiments, 2)


@pytest.mark.parametrize("name", [*ALGORITHMS, "horovod"])
def test_a_virtual_gpu_gives_the_cpus_bits(reports, name):
    for report in reports:
        assert report[name] == 0


def test_the_asynchronous_average_runs_beside_the_virtual_training(reports):
    for report in reports:
        assert report["rounds"] > 2 and report["finite"]
