"""Point 1: the numbers of a virtual GPU are the CPU's, for every kind of model, optimizer and update."""

import pytest
import torch
from beside import encoder, images, sequences, tokens, train
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from multigpu.models import CNN


class Function(nn.Module):
    """A parameter and a function of it and the input."""

    def __init__(self, function, *shape):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x):
        return self.function(x, self.weight)


def indexing(x, weight):
    y = (x * weight).clone()
    where = torch.tensor([1, 2], device=x.device)
    y[:, where] = 0.5
    y[:, 3] += 1
    y[:, :, ::2] *= 2
    y.view(-1)[::3].add_(1)  # an update through a view reaches the whole
    positive = y[y > 0].sum()
    picked = y[:, [0, 2]].sum() + y.gather(2, torch.zeros_like(y, dtype=torch.long)).sum()
    ordered = y.sort(1)[0][:, 0].sum() + y.cumsum(1).mean() + y.topk(2, 2)[0].mean()
    return (
        y[:, -1]
        + positive
        + picked
        + ordered
        + torch.where(y > 0, y, -y).mean()
        + torch.einsum("bij,bkj->bik", y, y).mean()
    )


def attention(x, weight):
    q, k, v = (x @ weight).reshape(4, 7, 3, 3, 4).permute(2, 0, 3, 1, 4)
    mask = torch.ones(7, 7, dtype=torch.bool, device=x.device).tril()
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True
    ) + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x))


class Cells(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(12, 6)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.body, self.reentrant = (
            nn.Sequential(nn.Linear(12, 30), nn.Dropout(0.3), nn.Tanh(), nn.Linear(30, 12)),
            reentrant,
        )

    def forward(self, x):
        return checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)


# What, how to make it, its input. The kernels are the CPU's own, so the numbers are equal to the bit.
SAME_KERNELS = {
    "the course's CNN": (CNN, lambda: torch.randn(8, 1, 8, 8)),
    "conv, batch norm, pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2),
            nn.GroupNorm(2, 8), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
        ),
        images,
    ),
    "transposed conv, upsampling": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2), nn.Upsample(scale_factor=2), nn.PReLU(), nn.InstanceNorm2d(4)),
        images,
    ),
    "conv1d, layer norm": (lambda: nn.Sequential(nn.Conv1d(7, 5, 3), nn.GELU(), nn.LayerNorm(10)), sequences),
    "embedding": (lambda: nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 2)), tokens),
    "tied weights": (Tied, tokens),
    "attention": (lambda: Function(attention, 12, 36), sequences),
    "transformer encoder": (lambda: encoder(0.0), sequences),
    "indexing, in-place updates, views": (lambda: Function(indexing, 7, 12), sequences),
}  # fmt: skip
# A GPU's kernel has its sums or its dropout in another order than the CPU's: equal to the last bits.
OTHER_KERNELS = {
    "dropout": (
        lambda: nn.Sequential(nn.Linear(12, 50), nn.Dropout(0.5), nn.Linear(50, 3)),
        sequences,
    ),
    "transformer encoder with dropout": (lambda: encoder(0.1), sequences),
    "multi-head attention": (
        lambda: Function(lambda x, w: nn.functional.softmax(x @ w @ x.mT, -1) @ x, 12, 12),
        sequences,
    ),
    "RNN": (lambda: nn.RNN(12, 6, 2, batch_first=True, bidirectional=True), sequences),
    "LSTM": (lambda: nn.LSTM(12, 6, 2, batch_first=True, bidirectional=True), sequences),
    "GRU": (lambda: nn.GRU(12, 6, 2, batch_first=True, bidirectional=True), sequences),
    "LSTM without bias": (lambda: nn.LSTM(12, 6, bias=False), sequences),
    "GRU without bias": (lambda: nn.GRU(12, 6, bias=False), sequences),
    "LSTM cells": (lambda: Cells(nn.LSTMCell), sequences),
    "GRU cells": (lambda: Cells(nn.GRUCell), sequences),
    "checkpoint": (lambda: Checkpointed(False), sequences),
    "checkpoint, re-entrant": (lambda: Checkpointed(True), sequences),
}


@pytest.mark.parametrize("name", SAME_KERNELS)
def test_equal_to_the_bit(two, name):
    make, data = SAME_KERNELS[name]
    assert train(make, data(), device=two[1])[0] == 0


@pytest.mark.parametrize("name", OTHER_KERNELS)
def test_equal_to_the_last_bits(two, name):
    make, data = OTHER_KERNELS[name]
    assert train(make, data(), device=two[1])[0] <= 1e-6


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_in_double_and_their_derivatives(two, kind):
    make = lambda: kind(12, 6, 2, batch_first=True).double()  # noqa: E731
    assert train(make, sequences().double(), device=two[0])[0] <= 1e-15
    layer = kind(3, 2).double().to(two[0])
    data = torch.randn(2, 1, 3, dtype=torch.double, device=two[0], requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x)[0], (data,))
