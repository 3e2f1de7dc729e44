"""A mixture of experts on several ranks, in the GPT of scripts/PT_GPT_ContextExperts.py.

    torchrun --standalone --nproc-per-node=2 lessons/19-context-experts/experts.py
    multigpu prove torchrun --nproc-per-node=2 lessons/19-context-experts/experts.py

Each rank has its rows of a batch, and some experts of each block.
"""

import argparse
import json
import math
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from multigpu.course import find_root

sys.path.insert(0, str(find_root() / "scripts"))

from PT_GPT_ContextExperts import GPT, read_tokens


class AllToAll(torch.autograd.Function):
    """The r-th part of the first dimension goes to rank r; rank r's for this rank comes."""

    @staticmethod
    def forward(ctx, parts):
        came = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(came, parts.contiguous())
        return came

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient)


class Experts(nn.Module):
    """MLPs, of which a token goes to one; a row's tokens beyond its capacity go to none."""

    def __init__(self, hidden, experts, capacity, mesh):
        super().__init__()
        self.ranks, self.experts, self.capacity = mesh.size(), experts, capacity
        self.router = nn.Linear(hidden, experts, bias=False)
        up, down = torch.randn(2, experts, hidden, 4 * hidden) / math.sqrt(hidden)
        for name, whole in (("up", up), ("down", down.mT / 2)):  # this rank's experts alone
            part = whole.chunk(self.ranks)[mesh.get_local_rank()].clone()
            part = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            self.register_parameter(name, nn.Parameter(part))

    def forward(self, x):
        chances = self.router(x).softmax(-1)
        chance, expert = chances.max(-1, keepdim=True)
        chosen = F.one_hot(expert.squeeze(-1), self.experts)  # rows, tokens, experts
        # Of each row, so that the ranks' mean is one rank's: 1 if all experts get as many.
        self.balance = self.experts * (chosen.to(x).mean(1) * chances.mean(1)).sum(-1).mean()
        places = math.ceil(self.capacity * x.shape[1] / self.experts)
        queue = (chosen.cumsum(1) * chosen).sum(-1)[..., None, None] - 1
        at = queue == torch.arange(places, device=x.device)  # no place: dropped
        slots = (chosen[..., None] * at).to(x)  # rows, tokens, experts, places
        self.load, self.dropped = chosen.sum((0, 1)), 1 - slots.sum() / x[..., 0].numel()
        sent = torch.einsum("rtep,rth->erph", slots, x)
        came = AllToAll.apply(sent).unflatten(0, (self.ranks, -1)).transpose(0, 1)
        up, down = self.up.to_local(), self.down.to_local()
        done = F.gelu(came.flatten(1, 3) @ up) @ down
        back = done.view(came.shape).transpose(0, 1).flatten(0, 1)
        return chance * torch.einsum("rtep,erph->rth", slots, AllToAll.apply(back))


def train_step(model, optimizer, tokens, places, balance=0.0):
    """Learn to predict the tokens after `places`. Returns the mean loss of this rank's."""
    logits = model(tokens[:, places], places)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, places + 1].flatten())
    (loss + balance * sum(block.mlp.balance for block in model.blocks)).backward()
    for weight in model.parameters():
        if not isinstance(weight, DTensor):  # an expert's has come from all ranks' tokens
            dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main():
    parser = argparse.ArgumentParser(description="Train a GPT whose experts the ranks share.")
    sizes = dict(epochs=6, batch_size=32, layers=2, hidden=48, heads=4, experts=8)
    more = dict(lr=0.006, seed=0, capacity=1.25, balance=0.01)
    for name, default in (sizes | more).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/experts"))
    args = parser.parse_args()
    alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=0)
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in sizes:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    if args.capacity <= 0:
        parser.error("--capacity is above 0: an expert without places drops all tokens")
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is not a multiple of --heads {args.heads}")
    for name in ("experts", "batch_size"):
        if getattr(args, name) % ranks:
            size = f"--{name.replace('_', '-')} {getattr(args, name)}"
            parser.error(f"{size} is not a multiple of the {ranks} ranks")
    try:
        train = read_tokens(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(str(error))
    if len(train) < args.batch_size:
        parser.error(f"the data have {len(train)} rows, fewer than --batch-size")

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    torch.manual_seed(args.seed)
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    model = GPT(args.layers, args.hidden, args.heads, attend)
    mesh = init_device_mesh(kind, (ranks,))
    for block in model.blocks:
        block.mlp = Experts(args.hidden, args.experts, args.capacity, mesh)
    model, train, places = model.to(kind), train.to(kind), torch.arange(64, device=kind)
    # foreach's kernels for several weights take plain tensors or DTensors, not both.
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, foreach=False)

    for epoch in range(args.epochs):
        order = torch.Generator().manual_seed(args.seed + epoch)
        batches = torch.randperm(len(train), generator=order).split(args.batch_size)
        batches = batches[: len(train) // args.batch_size]
        losses = [
            train_step(model, optimizer, train[rows[rank::ranks]], places, args.balance)
            for rows in batches
        ]
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
