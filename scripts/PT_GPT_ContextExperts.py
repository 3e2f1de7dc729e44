"""Lesson 19: a small GPT whose ranks share each sequence, by ring attention.

    torchrun --standalone --nproc-per-node=2 scripts/PT_GPT_ContextExperts.py
    sbatch slurm/PT_GPT_ContextExperts.slurm                        on a cluster
On GPUs, else on the CPU. Needs torch and scikit-learn. To begin your own work, copy this file.
Its experts are in lessons/19-context-experts/experts.py.
"""

import argparse
import json
import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


# Design the model
class Block(nn.Module):
    """Causal attention and an MLP, each after its norm: (batch, tokens, hidden) → the same."""

    def __init__(self, hidden, heads, attend):
        super().__init__()
        self.size, self.attend = hidden // heads, attend
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        up, down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x):
        # A head's q, k and v stand together: a part of the rows of qkv is whole heads.
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.size)).permute(3, 0, 2, 1, 4)
        x = x + self.out(self.attend(*qkv).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens' numbers, and their places → logits (batch, tokens, vocabulary)."""

    def __init__(self, layers, hidden, heads, attend, tokens=64, vocabulary=27):
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.places = nn.Embedding(tokens, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, attend) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens, places):
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# Share each sequence
def zigzag(ranks):
    """The numbers of the two chunks of a sequence that each rank has."""
    return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]


def pairs(owned, rank, step):
    """What a rank computes in a step: its i-th chunk and the visitor's j-th; the same one?"""
    visitor = owned[(rank - step) % len(owned)]
    every = [(i, j) for i in range(len(visitor)) for j in range(len(visitor))]
    own = owned[rank]  # a chunk attends to none after it
    return [(i, j, own[i] == visitor[j]) for i, j in every if visitor[j] <= own[i]]


def send_on(tensor):
    """Send to the next rank of the ring; the result waits for what the rank before sends."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return lambda: tensor
    came = torch.empty_like(tensor)
    sends = dist.P2POp(dist.isend, tensor, (rank + 1) % ranks)
    receives = dist.P2POp(dist.irecv, came, (rank - 1) % ranks)
    works = dist.batch_isend_irecv([sends, receives])
    return lambda: [work.wait() for work in works] and came


def scores(q, k, same):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if same:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


class RingAttention(torch.autograd.Function):
    """q, k, v (batch, heads, own tokens, size) → attention to all ranks' tokens."""

    @staticmethod
    def forward(ctx, owned, q, k, v):
        rank, parts = dist.get_rank(), len(owned[0])
        out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
        outs, lses, kv = out.chunk(parts, 2), lse.chunk(parts, 2), torch.stack([k, v])
        for step in range(len(owned)):
            if step < len(owned) - 1:
                came = send_on(kv)
            ks, vs = (tensor.chunk(parts, 2) for tensor in kv)
            for i, j, same in pairs(owned, rank, step):
                new = scores(q.chunk(parts, 2)[i], ks[j], same)
                total = torch.logaddexp(lses[i], new.logsumexp(-1, True))
                outs[i].mul_((lses[i] - total).exp()).add_((new - total).exp() @ vs[j])
                lses[i].copy_(total)
            kv = came() if step < len(owned) - 1 else kv
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.owned = owned
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse = ctx.saved_tensors
        rank, parts = dist.get_rank(), len(ctx.owned[0])
        own = (gradient * out).sum(-1, True)
        qs, lses, gs, owns = (each.chunk(parts, 2) for each in (q, lse, gradient, own))
        dq, kv = torch.zeros_like(q), torch.stack([k, v])
        dqs, dkv = dq.chunk(parts, 2), torch.zeros_like(kv)
        for step in range(len(ctx.owned)):
            came = send_on(kv)
            ks, vs, dks, dvs = (each.chunk(parts, 2) for each in (*kv, *dkv))
            for i, j, same in pairs(ctx.owned, rank, step):
                chance = (scores(qs[i], ks[j], same) - lses[i]).exp()
                of_scores = chance * (gs[i] @ vs[j].mT - owns[i]) / math.sqrt(q.shape[-1])
                dqs[i].add_(of_scores @ ks[j])
                dks[j].add_(of_scores.mT @ qs[i])
                dvs[j].add_(chance.mT @ gs[i])
            # The gradients go with their keys and values: after the last step they are home.
            kv, dkv = came(), send_on(dkv)()
        return None, dq, *dkv


# Read in the data
def read_tokens(path=None):
    """(n, 65): a digit's label as 17 to 26, then its 64 pixels as grey levels from 0 to 16."""
    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))[:1437]
    data = {"x_train": digits.images[order] / 16, "y_train": digits.target[order]}
    data = np.load(path) if path else data
    pixels = torch.as_tensor(data["x_train"] * 16).round().clamp(0, 16).flatten(1)
    return torch.cat([torch.as_tensor(data["y_train"])[:, None] + 17, pixels], 1).long()


# Train
def train_step(model, optimizer, tokens, places):
    """Learn to predict the tokens after `places`. Returns the mean loss of this rank's."""
    logits = model(tokens[:, places], places)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, places + 1].flatten())
    loss.backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main():
    parser = argparse.ArgumentParser(description="Train a GPT whose tokens the ranks share.")
    sizes = dict(epochs=6, batch_size=32, layers=2, hidden=48, heads=4)
    for name, default in (sizes | dict(lr=0.006, seed=0)).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_GPT_ContextExperts"))
    args = parser.parse_args()
    alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=0)
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    owned = zigzag(ranks)
    for name in sizes:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is not a multiple of --heads {args.heads}")
    if 64 % (2 * ranks):
        parser.error(f"{ranks} ranks cannot share 64 tokens: each has two equal chunks")
    try:
        train = read_tokens(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))
    if len(train) < args.batch_size:
        parser.error(f"the data have {len(train)} rows, fewer than --batch-size")

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    torch.manual_seed(args.seed)
    attend = partial(RingAttention.apply, owned)
    model = GPT(args.layers, args.hidden, args.heads, attend)
    model, train = model.to(kind), train.to(kind)
    each = torch.arange(64, device=kind).chunk(2 * ranks)
    places = torch.cat([each[chunk] for chunk in owned[rank]])  # this rank's, of all rows
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)

    for epoch in range(args.epochs):
        order = torch.Generator().manual_seed(args.seed + epoch)
        batches = torch.randperm(len(train), generator=order).split(args.batch_size)
        batches = batches[: len(train) // args.batch_size]
        losses = [train_step(model, optimizer, train[rows], places) for rows in batches]
        loss = torch.stack(losses).mean() / ranks
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    if rank == 0:
        torch.save(model.cpu().state_dict(), args.out / "model.pt")
        (args.out / "metrics.json").write_text(json.dumps({"loss": loss.item()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
