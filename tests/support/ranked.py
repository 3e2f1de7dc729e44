"""Helpers of the strategies' tests: gloo ranks, a small model, and plain training loops."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multigpu import launch
from multigpu.launch import rendezvous
from multigpu.network import wire
from multigpu.strategies.bagua.base import Algorithm
from multigpu.strategies.gather import all_gather_stacked as gather_ranks

LR = 0.1
ROWS = 4  # per rank and step
NUMBERS = 100 * 400 + 400 + 400 * 20 + 20  # of the model's parameters

Pair = tuple[torch.Tensor, torch.Tensor]


def start_gloo(seed: int = 0) -> tuple[int, int]:
    """(rank, number of ranks), connected by gloo; each rank has its own random numbers."""
    world = launch.find_world()
    torch.set_num_threads(1)
    store = rendezvous.open_store(world, torch.device("cpu"))
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    torch.manual_seed(seed + world.rank)
    return world.rank, world.size


def mlp(seed: int | None = None, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A model with 48,420 parameters. Without a seed, each rank's weights are different."""
    if seed is not None:
        torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(100, 400), nn.Tanh(), nn.Linear(400, 20)).to(dtype)


def wrap(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model)


def small_buckets(model: nn.Module) -> DistributedDataParallel:
    """DDP with several buckets: the layers' gradients are in different ones."""
    return DistributedDataParallel(model, bucket_cap_mb=0.02)


def batch(
    step: int, rows: slice = slice(None), ranks: int = 1, dtype: torch.dtype = torch.float32
) -> Pair:
    """Inputs and targets of a step, the same in each process; `rows` of the global batch."""
    source = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(ROWS * ranks, 100, generator=source, dtype=torch.float64).to(dtype)
    y = torch.randn(ROWS * ranks, 20, generator=source, dtype=torch.float64).to(dtype)
    return x[rows], y[rows]


def local_batch(step: int, dtype: torch.dtype = torch.float32) -> Pair:
    """This rank's shard of the global batch."""
    rank = dist.get_rank()
    return batch(step, slice(ROWS * rank, ROWS * (rank + 1)), dist.get_world_size(), dtype)


def loss(model: nn.Module, pair: Pair) -> torch.Tensor:
    return (model(pair[0]) - pair[1]).square().mean()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The ordinary loop."""
    for step in steps:
        loss(model, local_batch(step, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_in_micro_batches(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The ordinary loop with two micro-batches per step; the first does not synchronise."""
    half = ROWS // 2
    for step in steps:
        x, y = local_batch(step, dtype)
        with model.no_sync() if hasattr(model, "no_sync") else torch.enable_grad():
            (loss(model, (x[:half], y[:half])) / 2).backward()
        (loss(model, (x[half:], y[half:])) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def vector(model: nn.Module) -> torch.Tensor:
    """The weights as one vector, a copy."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def gradient(model: nn.Module, pair: Pair, at: torch.Tensor | None = None) -> torch.Tensor:
    """The loss's gradient as one vector. The weights are set to `at` first, if it is given."""
    parameters = list(model.parameters())
    if at is not None:
        with torch.no_grad():
            nn.utils.vector_to_parameters(at, parameters)
    return torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(loss(model, pair), parameters)]
    )


def rank_difference(model: nn.Module) -> float:
    """The largest difference between two ranks in any weight."""
    weights = gather_ranks(vector(model))
    return (weights.amax(0) - weights.amin(0)).max().item()


def max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def bytes_per_step(run: Callable[[range], None], k: int = 5) -> float:
    """Bytes that this rank sends per step of `run`.

    It is the difference between 2k and k steps, so that what is sent once does not count. The
    barriers make sure that all bytes have arrived; their own cancel out.
    """
    counts = []
    for steps in (k, 2 * k):
        dist.barrier()
        before = wire.bytes_sent()
        run(range(steps))
        dist.barrier()
        counts.append(wire.bytes_sent() - before)
    return (counts[1] - counts[0]) / k


def attached(
    algorithm: Algorithm,
    how: Callable[[nn.Module], DistributedDataParallel] = wrap,
    lr: float = LR,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose weights differ between ranks until it is attached, and its optimizer."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return algorithm.attach(model, [optimizer], how), optimizer
