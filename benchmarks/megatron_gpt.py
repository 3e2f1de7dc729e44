"""Megatron's GPT in plain torch, for shapes only: the kernels of vTrain's tables.

It has the operations of VIA-Research/vTrain, src/model/gpt_modeling.py, which are Megatron's:
fp16, unfused attention, and two fused elementwise kernels. A fused kernel is one operation
with the same memory traffic here, because numbers do not matter: `Fused`.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Fused(torch.autograd.Function):
    """A fused elementwise kernel of a tensor and a bias, and of a residual if it is given.

    For Megatron's bias_gelu and bias_dropout_add. It reads the tensors and writes one; its
    backward reads the gradient and a saved tensor, writes one, and sums it for the bias.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.has_residual = residual is not None
        return x + (bias if residual is None else residual)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        own = grad * x
        return own, own.sum((0, 1)), grad if ctx.has_residual else None


class Layer(nn.Module):
    """A transformer layer: (sequence, batch, hidden) → the same shape."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.first_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden, bias=False)
        self.dense_bias = nn.Parameter(torch.empty(hidden))
        self.second_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.up_bias = nn.Parameter(torch.empty(4 * hidden))
        self.down = nn.Linear(4 * hidden, hidden, bias=False)
        self.down_bias = nn.Parameter(torch.empty(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, batch, hidden = x.shape
        mixed = self.qkv(self.first_norm(x))
        mixed = mixed.view(length, batch * self.heads, 3 * hidden // self.heads)
        query, key, value = mixed.split(hidden // self.heads, dim=2)
        scores = query.new_empty(batch * self.heads, length, length)
        key = key.permute(1, 2, 0)
        scores = torch.baddbmm(scores, query.transpose(0, 1), key, beta=0.0)
        chances = F.dropout(torch.softmax(scores, dim=2), 0.1)
        context = torch.bmm(chances, value.transpose(0, 1))
        context = context.transpose(0, 1).contiguous().view(length, batch, hidden)
        x = Fused.apply(self.dense(context), self.dense_bias, x)
        inner = Fused.apply(self.up(self.second_norm(x)), self.up_bias)
        return Fused.apply(self.down(inner), self.down_bias, x)


class GPT(nn.Module):
    """Token numbers (batch, sequence) → logits (batch, sequence, words)."""

    def __init__(self, layers: int, hidden: int, heads: int, length: int, words: int):
        super().__init__()
        self.words = nn.Embedding(words, hidden)
        self.places = nn.Embedding(length, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.logits = nn.Linear(hidden, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.words(tokens) + self.places(places), 0.1)
        x = x.transpose(0, 1).contiguous()
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.norm(x.transpose(0, 1).contiguous()))
