"""Lesson 17: a small GPT in pipeline stages, each with tensor parallelism and FSDP: one mesh.

    torchrun --standalone --nproc-per-node=8 scripts/PT_GPT_Mesh.py --mesh 2 1 2 2
    sbatch slurm/PT_GPT_Mesh.slurm                                on a cluster
On GPUs, else on the CPU. Needs torch and scikit-learn. To begin your own work, copy this file.
"""

import argparse
import json
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor


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
        # By name, so that a block of a stage has the name that it has in the whole GPT.
        self.blocks = nn.ModuleDict((f"{i}", Block(hidden, heads)) for i in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x):
        if self.words:
            x = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.head else x


def keep_stage(gpt, index, stages):
    """Keep some blocks; the first stage has embeddings, too, the last one norm and head."""
    each = len(gpt.blocks) // stages
    gpt.blocks = nn.ModuleDict([*gpt.blocks.items()][index * each : (index + 1) * each])
    if index > 0:
        gpt.words = gpt.places = None
    if index < stages - 1:
        gpt.norm = gpt.head = None
    return gpt


# Set up the ranks
DIMENSIONS = ("stages", "copies", "shards", "tensor")  # neighbours in the last: within a node


def divide(stage, mesh, **options):
    """Divide a stage's layers by tensor parallelism, then what is left by fully_shard."""
    plan = {f"blocks.*.{name}": tp.ColwiseParallel() for name in ("qkv", "up")}
    plan |= {f"blocks.*.{name}": tp.RowwiseParallel() for name in ("out", "down")}
    plan |= {"head": tp.ColwiseParallel(use_local_output=False)} if stage.head else {}
    if mesh["tensor"].size() > 1:
        tp.parallelize_module(stage, mesh["tensor"], plan)
    names = ("copies", "shards") if mesh["copies"].size() > 1 else "shards"
    # With several stages, each micro-batch would gather the weights again.
    options |= dict(mesh=mesh[names], reshard_after_forward=mesh["stages"].size() == 1)
    for module in (*stage.blocks.values(), stage):
        fully_shard(module, **options)


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


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
def train_step(schedule, stage, optimizer, tokens):
    """Learn to predict each token from those before it. Returns the last stage's loss."""
    losses, given = [], (tokens[:, :-1],) if stage.words else ()
    with tp.loss_parallel():  # of logits that are divided no rank ever has all
        schedule.step(*given, target=tokens[:, 1:], losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    losses = [one.to_local() if isinstance(one, DTensor) else one for one in losses]
    return torch.stack(losses).mean() if losses else torch.zeros((), device=tokens.device)


def main():
    parser = argparse.ArgumentParser(description="Train a GPT on a mesh of ranks.")
    sizes = dict(epochs=6, batch_size=32, micro_batches=4, layers=2, hidden=48, heads=4)
    for name, default in (sizes | dict(lr=0.006, seed=0)).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    parser.add_argument("--mesh", type=int, nargs=4, metavar=DIMENSIONS)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_GPT_Mesh"))
    args = parser.parse_args()
    alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=0)
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stages, copies, shards, tensor = shape = args.mesh or (1, 1, ranks, 1)
    batches = copies * shards  # that are read at the same time
    if min(shape) < 1 or math.prod(shape) != ranks:
        parser.error(f"--mesh has {math.prod(shape)} ranks, torchrun has started {ranks}")
    for name in sizes:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is not a multiple of --heads {args.heads}")
    if args.heads % tensor or args.layers % stages:
        sizes = f"--heads {args.heads}, --layers {args.layers}"
        parser.error(f"{sizes}: give multiples of tensor {tensor}, and of {stages} stages")
    try:
        train = read_tokens(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))
    parts = batches * args.micro_batches  # of a batch
    if args.micro_batches < stages or args.batch_size % parts or args.batch_size > len(train):
        rule = f"--batch-size a multiple of {parts} of at most {len(train)}"
        parser.error(f"give {rule}, and --micro-batches of {stages} or more")

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, tuple(shape), mesh_dim_names=DIMENSIONS)
    index, copy, shard, _ = mesh.get_coordinate()
    torch.manual_seed(args.seed)
    # Each rank makes the whole small GPT; a large one begins on torch.device("meta").
    stage = keep_stage(GPT(args.layers, args.hidden, args.heads), index, stages).to(kind)
    divide(stage, mesh)
    # foreach's kernels take weights of one mesh, and norms are not in "tensor".
    optimizer = torch.optim.AdamW(stage.parameters(), args.lr, foreach=False)
    train = train.to(kind)
    pipe = PipelineStage(stage, index, stages, train.device, group=mesh.get_group("stages"))
    schedule = Schedule1F1B(pipe, args.micro_batches, loss_fn=mean_loss)
    mine = slice(copy * shards + shard, None, batches)

    for epoch in range(args.epochs):
        order = torch.Generator().manual_seed(args.seed + epoch)
        steps = torch.randperm(len(train), generator=order).split(args.batch_size)
        steps = steps[: len(train) // args.batch_size]
        losses = [train_step(schedule, stage, optimizer, train[rows[mine]]) for rows in steps]
        loss = torch.stack(losses).mean() / (batches * tensor)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    # Each rank writes its parts, under the names of the whole GPT.
    dcp.save(get_model_state_dict(stage), checkpoint_id=args.out / "checkpoint")
    if rank == 0:
        dcp_to_torch_save(args.out / "checkpoint", args.out / "model.pt")
        (args.out / "metrics.json").write_text(json.dumps({"loss": loss.item()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
