"""Lesson 15: a small GPT whose weights, gradients and optimizer state the ranks share.

    torchrun --standalone --nproc-per-node=2 scripts/PT_GPT_FSDP.py
    sbatch slurm/PT_GPT_FSDP.slurm                                     on a cluster
On GPUs, else on the CPU. Needs torch and scikit-learn. To begin your own work, copy this file.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the process group is made: it ends cleanly
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh


# Design the model
class Block(nn.Module):
    """Causal attention and an MLP, each after its norm: (batch, tokens, hidden) → the same."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.size = hidden // heads  # of a head
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        # A head's q, k and v stand together: a part of the rows of qkv is whole heads.
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.size)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens' numbers (batch, tokens) → logits (batch, tokens, vocabulary). Head not tied."""

    def __init__(self, layers, hidden, heads, tokens=64, vocabulary=27):
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.places = nn.Embedding(tokens, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# Share the weights
def fsdp(model, lr, mesh, **options):
    """Each rank keeps a part of each weight, its gradient and AdamW's state, as DTensors."""
    for module in (*model.blocks, model):  # what is in no block comes last
        fully_shard(module, mesh=mesh, **options)
    return torch.optim.AdamW(model.parameters(), lr)


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
def train_step(model, optimizer, tokens):
    """Learn to predict each token from those before it. Returns this rank's mean loss."""
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main(share=fsdp):
    parser = argparse.ArgumentParser(description="Train a GPT that the ranks share.")
    sizes = dict(epochs=6, batch_size=32, layers=2, hidden=48, heads=4)
    for name, default in (sizes | dict(lr=0.006, seed=0)).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    parser.add_argument("--group", type=int, help="HSDP: ranks that share a copy of the model")
    parser.add_argument("--precision", choices=["fp32", "bf16-mixed"], default="fp32")
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_GPT_FSDP"))
    args = parser.parse_args()
    alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=0)
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = ranks if args.group is None else args.group
    for name in sizes:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is not a multiple of --heads {args.heads}")
    for name in ("hidden", "batch_size"):
        if getattr(args, name) % ranks:
            size = f"--{name.replace('_', '-')} {getattr(args, name)}"
            parser.error(f"{size} is not a multiple of the {ranks} ranks")
    if group < 1 or ranks % group:
        parser.error(f"--group {group} does not divide the {ranks} ranks")
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
    model, train = GPT(args.layers, args.hidden, args.heads).to(kind), train.to(kind)
    mesh = init_device_mesh(kind, (ranks,))
    if args.group:  # HSDP: each group of ranks shares a copy of the model
        names = ("copies", "parts")
        mesh = init_device_mesh(kind, (ranks // group, group), mesh_dim_names=names)
    options = {}
    if args.precision == "bf16-mixed":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    optimizer = share(model, args.lr, mesh, **options)

    for epoch in range(args.epochs):
        order = torch.Generator().manual_seed(args.seed + epoch)
        batches = torch.randperm(len(train), generator=order).split(args.batch_size)
        batches = batches[: len(train) // args.batch_size]
        losses = [train_step(model, optimizer, train[rows[rank::ranks]]) for rows in batches]
        loss = torch.stack(losses).mean() / ranks
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    weights = model.state_dict()
    for name, weight in weights.items():
        weights[name] = (weight.full_tensor() if isinstance(weight, DTensor) else weight).cpu()
    if rank == 0:
        torch.save(weights, args.out / "model.pt")
        (args.out / "metrics.json").write_text(json.dumps({"loss": loss.item()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
