"""What the tests of the strategies share: ranks that meet, a small model, and loops that a reference can repeat."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multigpu import launch, rendezvous, wire

LR = 0.1
ROWS = 4  # a rank's share of a batch
NUMBERS = 100 * 400 + 400 + 400 * 20 + 20


def meet(seed: int = 0) -> tuple[int, int]:
    """Start gloo. The rank and the number of ranks; each rank's random numbers are its own."""
    world = launch.find()
    torch.set_num_threads(1)
    store = rendezvous.meet(world, torch.device("cpu"))
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    torch.manual_seed(seed + world.rank)
    return world.rank, world.size


def mlp(seed: int | None = None, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """48,420 numbers. Without a seed, each rank's weights are its own."""
    if seed is not None:
        torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(100, 400), nn.Tanh(), nn.Linear(400, 20)).to(dtype)


def wrap(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model)


def small_buckets(model: nn.Module) -> DistributedDataParallel:
    """So that a step has several: the layers' gradients are in buckets of their own."""
    return DistributedDataParallel(model, bucket_cap_mb=0.02)


def batch(
    step: int, rows: slice = slice(None), ranks: int = 1, dtype: torch.dtype = torch.float32
) -> tuple:
    """Inputs and targets of a step, the same for all who ask; `rows` of them."""
    source = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(ROWS * ranks, 100, generator=source, dtype=torch.float64).to(dtype)
    y = torch.randn(ROWS * ranks, 20, generator=source, dtype=torch.float64).to(dtype)
    return x[rows], y[rows]


def mine(step: int, dtype: torch.dtype = torch.float32) -> tuple:
    rank = dist.get_rank()
    return batch(step, slice(ROWS * rank, ROWS * (rank + 1)), dist.get_world_size(), dtype)


def loss(model: nn.Module, pair: tuple) -> torch.Tensor:
    return (model(pair[0]) - pair[1]).square().mean()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, dtype=torch.float32
) -> None:
    """The ordinary loop."""
    for step in steps:
        loss(model, mine(step, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def vector(model: nn.Module) -> torch.Tensor:
    """The weights as one vector, a copy."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def gradient(model: nn.Module, pair: tuple, at: torch.Tensor | None = None) -> torch.Tensor:
    """The gradient of the loss as one vector, at the model's weights or `at` others, which it then keeps."""
    parameters = list(model.parameters())
    if at is not None:
        with torch.no_grad():
            nn.utils.vector_to_parameters(at, parameters)
    return torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(loss(model, pair), parameters)]
    )


def everywhere(tensor: torch.Tensor) -> torch.Tensor:
    """(…) of each rank → (ranks, …)."""
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor.contiguous())
    return torch.stack(pieces)


def spread(model: nn.Module) -> float:
    """The largest difference between two ranks in any weight."""
    all_of_them = everywhere(vector(model))
    return (all_of_them.amax(0) - all_of_them.amin(0)).max().item()


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def bytes_a_step(run: Callable[[range], None], k: int = 5) -> float:
    """What this rank sends in a step: the difference of 2k and k steps, so that what comes once does not count."""
    counts = []
    for steps in (k, 2 * k):
        dist.barrier()
        before = wire.sent()
        run(range(steps))
        dist.barrier()  # all that was sent has arrived; the barriers themselves cancel out
        counts.append(wire.sent() - before)
    return (counts[1] - counts[0]) / k


def refused(function: Callable[[], object]) -> str:
    """The sentence of the UserError that it raises; "" if it does not."""
    from multigpu.errors import UserError

    try:
        function()
    except UserError as error:
        return str(error)
    return ""


def attached(algorithm, how=wrap, lr=LR):
    """A model that differs between ranks until it is attached, and its optimizer."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return algorithm.attach(model, [optimizer], how), optimizer


def in_pieces(model, optimizer, step: int) -> None:
    """A step whose rows come in two pieces, only the last of which is synchronised."""
    x, y = mine(step)
    half = ROWS // 2
    with model.no_sync() if hasattr(model, "no_sync") else torch.enable_grad():
        (loss(model, (x[:half], y[:half])) / 2).backward()
    (loss(model, (x[half:], y[half:])) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
