"""Lesson 16: a small GPT whose layers several GPUs share, by tensor and sequence parallelism.

    torchrun --standalone --nproc-per-node=2 scripts/PT_GPT_TensorParallel.py     GPUs or CPU
    multigpu prove torchrun --nproc-per-node=2 scripts/PT_GPT_TensorParallel.py   equal to one?
    sbatch slurm/PT_GPT_TensorParallel.slurm                                      on a cluster
Needs torch and scikit-learn. To begin your own work, copy this file.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard


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


# Share the layers
def share(model, mesh):
    """Divide heads, MLPs and the vocabulary over the ranks, and the tokens around them."""
    tokens = Shard(1)
    enter = tp.ColwiseParallel(input_layouts=tokens)
    leave = tp.RowwiseParallel(output_layouts=tokens)
    parts = dict(
        input_layouts=Replicate(), desired_input_layouts=tokens, use_local_output=True
    )
    head = tp.ColwiseParallel(input_layouts=tokens, use_local_output=False)
    plan = {"blocks.0": tp.PrepareModuleInput(**parts), "head": head}
    plan |= dict.fromkeys(["blocks.*.norm1", "blocks.*.norm2", "norm"], tp.SequenceParallel())
    plan |= dict.fromkeys(["blocks.*.qkv", "blocks.*.up"], enter)
    plan |= dict.fromkeys(["blocks.*.out", "blocks.*.down"], leave)
    tp.parallelize_module(model, mesh, plan)


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
    """Learn to predict each token from those before it. Returns the batch's mean loss."""
    logits = model(tokens[:, :-1]).flatten(0, 1)
    with tp.loss_parallel():  # if logits are divided, no rank ever has all of them
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main(share=share):
    parser = argparse.ArgumentParser(description="Train a GPT whose layers the ranks share.")
    sizes = dict(epochs=6, batch_size=32, layers=2, hidden=48, heads=4)
    for name, default in sizes.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--lr", type=float, default=0.006)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_GPT_TensorParallel"))
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for name in sizes:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is not a multiple of --heads {args.heads}")
    for number, what in ((args.heads, "heads"), (64, "tokens")):
        if number % ranks:
            parser.error(f"{ranks} ranks cannot share {number} {what} equally")
    try:
        train = read_tokens(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))

    device, group = torch.device("cpu"), {"backend": "gloo"}
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        group = {"backend": "nccl", "device_id": device}
    torch.manual_seed(args.seed)
    model, train = GPT(args.layers, args.hidden, args.heads).to(device), train.to(device)
    if ranks > 1:
        dist.init_process_group(**group)
        share(model, init_device_mesh(device.type, (ranks,)))
    # foreach's kernels for several weights take plain tensors or DTensors, not both.
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, foreach=False)
    steps = len(train) // args.batch_size
    for epoch in range(args.epochs):
        order = torch.Generator().manual_seed(args.seed + epoch)
        order = torch.randperm(len(train), generator=order)[: steps * args.batch_size]
        loss = 0
        for rows in order.split(args.batch_size):  # all ranks read the same rows
            loss += train_step(model, optimizer, train[rows]) / steps
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    state = model.state_dict()
    for name, value in state.items():
        state[name] = (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
    if rank == 0:
        torch.save(state, args.out / "model.pt")
        (args.out / "metrics.json").write_text(json.dumps({"loss": loss.item()}))
    if ranks > 1:
        dist.barrier()  # gloo can abort a process that ends right after it has sent tensors
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
