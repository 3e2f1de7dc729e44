"""Compare a parallel run with a serial one: the serial training loop, and the verdict."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def train_serially(
    model: nn.Module,
    train: TensorDataset,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    seed: int,
    momentum: float = 0.9,
    after_step: Callable[[int, nn.Module], None] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Train `model` in this process alone, without torch.distributed, and return it.

    `train` has images (n, …) and labels (n,) on the model's device. Epoch e (from 0) takes the
    images in the order that a generator seeded with seed + e gives, as DistributedSampler
    does. Each batch has `batch_size` images; an epoch's last batch can have fewer. The default
    optimizer is SGD with momentum; `optimizer`, made from the model's parameters, replaces it.
    `after_step` is called with the number of steps done and the model.
    """
    images, labels = train.tensors
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.SGD(trainable, lr=lr, momentum=momentum)
    steps = 0
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(len(train), generator=generator)
        for batch in order.split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            steps += 1
            if after_step:
                after_step(steps, model)
    return model


def difference(model: nn.Module, other: nn.Module) -> float:
    """The largest absolute difference between the parameters of two models."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return largest((a.detach().cpu() - b.detach().cpu()).abs().max().item() for a, b in pairs)


def largest(differences: Iterable[float]) -> float:
    """The largest difference; NaN if one of them is NaN. Python's max([0, nan]) is 0."""
    return torch.tensor(list(differences), dtype=torch.float64).max().item()


def verdict(claim: str, max_difference: float, limit: float) -> dict:
    """Print the proof's line, and return its values for metrics.json. NaN fails."""
    holds = max_difference <= limit
    result = "holds" if holds else "fails"
    print(
        f"proof: {claim}: max difference {max_difference:.1e}, limit {limit:.0e}: {result}",
        flush=True,
    )
    return {
        "claim": claim,
        "max_difference": max_difference,
        "limit": limit,
        "holds": holds,
    }
