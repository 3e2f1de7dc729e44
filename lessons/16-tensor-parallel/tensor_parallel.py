"""Tensor and sequence parallelism by hand, in the program of scripts/PT_GPT_TensorParallel.py.

    torchrun --nproc-per-node=2 lessons/16-tensor-parallel/tensor_parallel.py --way sequence
    multigpu prove torchrun --nproc-per-node=2 lessons/16-tensor-parallel/tensor_parallel.py

--way is tensor or sequence; the other options are the script's.
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from multigpu.course import find_root

sys.path.insert(0, str(find_root() / "scripts"))

import PT_GPT_TensorParallel as script


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


def share_by_hand(model, mesh, sequence):
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
            weight.register_post_accumulate_grad_hook(lambda w: dist.all_reduce(w.grad))


def tensor(model, mesh):
    share_by_hand(model, mesh, sequence=False)


def sequence(model, mesh):
    share_by_hand(model, mesh, sequence=True)
    add_gradients(model)


WAYS = {"tensor": tensor, "sequence": sequence}


def main():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--way", choices=WAYS, default="sequence")
    args, sys.argv[1:] = parser.parse_known_args()
    script.main(WAYS[args.way])


if __name__ == "__main__":
    main()
