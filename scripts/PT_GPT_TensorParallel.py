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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


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


# Share the layers by hand
class Exchange(torch.autograd.Function):
    """ahead(x) in forward, back(gradient) in backward; None leaves the tensor as it is."""

    @staticmethod
    def forward(ctx, x, ahead, back):
        ctx.back = back
        return ahead(x) if ahead else x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient) if ctx.back else gradient, None, None


def add(x):
    """All-reduce: the sum of all ranks' x."""
    dist.all_reduce(total := x.clone(memory_format=torch.contiguous_format))
    return total


def own(x):
    """This rank's part of the tokens."""
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def gather(x):
    """All-gather: all tokens, of which each rank has a part."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return torch.cat(found, 1)


def add_own(x):
    """Reduce-scatter: this rank's tokens of the sum of all ranks' x."""
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), 1)]
    dist.reduce_scatter(total := torch.empty_like(parts[0]), parts)
    return total


class Column(nn.Module):
    """Some outputs of a linear layer, from all inputs: some rows of its weight."""

    def __init__(self, linear, mesh, exchange):
        super().__init__()
        self.exchange = exchange
        for name, whole in linear.named_parameters():  # a DTensor knows what it is a part of
            setattr(self, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))

    def forward(self, x):
        x = Exchange.apply(x, *self.exchange)
        return F.linear(x, self.weight.to_local(), self.bias.to_local())


class Row(nn.Module):
    """All outputs, from some inputs on each rank: some columns of the weight."""

    def __init__(self, linear, mesh, exchange):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(linear.weight, mesh, [Shard(1)]))
        self.bias, self.exchange = linear.bias, exchange

    def forward(self, x):
        return Exchange.apply(F.linear(x, self.weight.to_local()), *self.exchange) + self.bias


def share(model, mesh, sequence):
    """Divide heads and MLPs over the ranks; with `sequence` the tokens around them, too."""
    enter = (gather, add_own) if sequence else (None, add)
    leave = enter[::-1]  # the same two, the other way round
    for block in model.blocks:
        block.qkv, block.up = Column(block.qkv, mesh, enter), Column(block.up, mesh, enter)
        block.out, block.down = Row(block.out, mesh, leave), Row(block.down, mesh, leave)
    if sequence:
        model.blocks[0].register_forward_pre_hook(
            lambda _, x: Exchange.apply(x[0], own, gather)
        )
        model.norm.register_forward_hook(lambda _, x, y: Exchange.apply(y, gather, own))


def add_gradients(model):
    """Of the weights that see this rank's tokens alone: norms, and biases after add_own."""
    for name, weight in model.named_parameters():
        if "norm" in name or name.endswith(("out.bias", "down.bias")):
            dist.all_reduce(weight.grad)


def share_with_torch(model, mesh):
    """The same with torch's own classes, and the vocabulary divided as well."""
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
def train_step(model, optimizer, tokens, sequence):
    """Learn to predict each token from those before it. Returns the batch's mean loss."""
    logits = model(tokens[:, :-1]).flatten(0, 1)
    with tp.loss_parallel():  # if logits are divided, no rank ever has all of them
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
    if sequence:
        add_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main():
    parser = argparse.ArgumentParser(description="Train a GPT whose layers the ranks share.")
    sizes = dict(epochs=6, batch_size=32, layers=2, hidden=48, heads=4)
    for name, default in sizes.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--way", choices=["tensor", "sequence", "torch"], default="sequence")
    parser.add_argument("--lr", type=float, default=0.006)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_GPT_TensorParallel"))
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if min(getattr(args, name) for name in sizes) < 1 or args.hidden % args.heads:
        parser.error("sizes are from 1 up, and --hidden is a multiple of --heads")
    if args.heads % ranks or 64 % ranks:
        parser.error(f"{ranks} ranks cannot share {args.heads} heads and 64 tokens equally")
    try:
        train = read_tokens(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(str(error))

    device, group = torch.device("cpu"), {"backend": "gloo"}
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        group = {"backend": "nccl", "device_id": device}
    torch.manual_seed(args.seed)
    model, train = GPT(args.layers, args.hidden, args.heads).to(device), train.to(device)
    sequence = ranks > 1 and args.way == "sequence"
    if ranks > 1:
        dist.init_process_group(**group)
        mesh = init_device_mesh(device.type, (ranks,))
        share_with_torch(model, mesh) if args.way == "torch" else share(model, mesh, sequence)
    # foreach's kernels for several weights take plain tensors or DTensors, not both.
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, foreach=False)
    steps = len(train) // args.batch_size
    for epoch in range(args.epochs):
        order = torch.Generator().manual_seed(args.seed + epoch)
        order = torch.randperm(len(train), generator=order)[: steps * args.batch_size]
        loss = 0
        for rows in order.split(args.batch_size):  # all ranks read the same rows
            loss += train_step(model, optimizer, train[rows], sequence) / steps
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
