"""Lesson 17: a small GPT in pipeline stages, each with tensor parallelism and FSDP: one mesh.

    torchrun --nproc-per-node=8 scripts/PT_GPT_Mesh.py --mesh 2 1 2 2
    torchrun --nproc-per-node=2 scripts/PT_GPT_Mesh.py --load results/PT_GPT_Mesh/checkpoint
    sbatch slurm/PT_GPT_Mesh.slurm                                    on a cluster
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
from torch.distributed.checkpoint import state_dict as states
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
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Stage(nn.Module):
    """Some blocks of a GPT; the first stage has embeddings, too, the last norm and head."""

    def __init__(self, gpt, index, stages):
        super().__init__()
        self.first, self.last = index == 0, index == stages - 1
        if self.first:
            self.words, self.places = gpt.words, gpt.places
        blocks = [*gpt.blocks.named_children()][index * len(gpt.blocks) // stages :]
        # Under the GPT's names, so that a checkpoint fits any number of stages.
        self.blocks = nn.ModuleDict(blocks[: len(gpt.blocks) // stages])
        if self.last:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x):
        if self.first:
            x = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


# Set up the ranks
DIMENSIONS = ("stages", "copies", "shards", "tensor")  # neighbours in the last: within a node


def divide(stage, mesh, **options):
    """Divide a stage's layers by tensor parallelism, then what is left by fully_shard."""
    enter, leave = tp.ColwiseParallel, tp.RowwiseParallel
    plan = {f"blocks.*.{name}": enter() for name in ("qkv", "up")}
    plan |= {f"blocks.*.{name}": leave() for name in ("out", "down")}
    if stage.last:
        plan["head"] = enter(use_local_output=False)
    if mesh["tensor"].size() > 1:
        tp.parallelize_module(stage, mesh["tensor"], plan)
    copies = mesh["copies"].size() > 1
    options["mesh"] = mesh["copies", "shards"] if copies else mesh["shards"]
    # With several stages, each micro-batch would gather the weights again.
    options["reshard_after_forward"] = mesh["stages"].size() == 1
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
    losses = []
    given = (tokens[:, :-1],) if stage.first else ()
    wanted = {"target": tokens[:, 1:], "losses": losses} if stage.last else {}
    with tp.loss_parallel():  # of logits that are divided no rank ever has all
        schedule.step(*given, **wanted)
    optimizer.step()
    optimizer.zero_grad()
    losses = [one.to_local() if isinstance(one, DTensor) else one for one in losses]
    return torch.stack(losses).mean() if losses else torch.zeros((), device=tokens.device)


# Save and load
FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True)


def parts(stage, optimizer):
    """This rank's parts of weights and AdamW's state, under the names of the whole GPT."""
    model, optim = states.get_state_dict(stage, optimizer, options=FLAT)
    return {"model": model, "optimizer": optim}


def main():
    parser = argparse.ArgumentParser(description="Train a GPT on a mesh of ranks.")
    sizes = dict(epochs=6, batch_size=32, micro_batches=4, layers=2, hidden=48, heads=4)
    for name, default in (sizes | dict(lr=0.006, seed=0)).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    parser.add_argument("--mesh", type=int, nargs=4, metavar=DIMENSIONS)
    parser.add_argument("--load", help="go on from this checkpoint")
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_GPT_Mesh"))
    args = parser.parse_args()
    alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=0)
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stages, copies, shards, tensor = shape = tuple(args.mesh or (1, 1, ranks, 1))
    batches = copies * shards  # that are read at the same time
    if min(*shape, *(getattr(args, name) for name in sizes)) < 1 or args.hidden % args.heads:
        parser.error("sizes are from 1 up, and --hidden is a multiple of --heads")
    if math.prod(shape) != ranks:
        parser.error(f"--mesh has {math.prod(shape)} ranks, torchrun has started {ranks}")
    if args.heads % tensor or args.layers % stages:
        parser.error(f"--heads is a multiple of {tensor}, --layers of {stages}, as in --mesh")
    if args.batch_size % (batches * args.micro_batches) or args.micro_batches < stages:
        parser.error(f"--micro-batches is {stages} or more, --batch-size {batches} × as many")
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
    mesh = init_device_mesh(kind, shape, mesh_dim_names=DIMENSIONS)
    index, copy, shard, _ = mesh.get_coordinate()
    torch.manual_seed(args.seed)
    model = dict(layers=args.layers, hidden=args.hidden, heads=args.heads)
    # Each rank makes the whole small GPT; a large one begins on torch.device("meta").
    stage, train = Stage(GPT(**model), index, stages).to(kind), train.to(kind)
    divide(stage, mesh)
    # foreach's kernels take weights of one mesh, and norms are not in "tensor".
    optimizer = torch.optim.AdamW(stage.parameters(), args.lr, foreach=False)
    pipe = PipelineStage(stage, index, stages, train.device, group=mesh.get_group("stages"))
    schedule = Schedule1F1B(pipe, args.micro_batches, loss_fn=mean_loss)
    done = 0
    if args.load:
        about = dict.fromkeys([*model, "epochs"], 0)
        try:
            dcp.load(about, checkpoint_id=args.load)
        except dcp.api.CheckpointException:
            parser.error(f"{args.load} has no checkpoint of this script")
        done = about.pop("epochs")
        if about != model or done >= args.epochs:
            parser.error(f"{args.load} has {done} epochs of the model {about}")
        dcp.load(state := parts(stage, optimizer), checkpoint_id=args.load)
        state = dict(model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        states.set_state_dict(stage, optimizer, **state, options=FLAT)

    mine = slice(copy * shards + shard, None, batches)
    for epoch in range(done, args.epochs):
        order = torch.Generator().manual_seed(args.seed + epoch)
        steps = torch.randperm(len(train), generator=order).split(args.batch_size)
        steps = steps[: len(train) // args.batch_size]
        losses = [train_step(schedule, stage, optimizer, train[rows[mine]]) for rows in steps]
        loss = torch.stack(losses).mean() / (batches * tensor)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    state = parts(stage, optimizer) | model | {"epochs": args.epochs}
    dcp.save(state, checkpoint_id=args.out / "checkpoint")
    weights = GPT(**model).state_dict()  # whole: one rank could read it, too
    dcp.load({"model": weights}, checkpoint_id=args.out / "checkpoint")
    if rank == 0:
        torch.save(weights, args.out / "model.pt")
        (args.out / "metrics.json").write_text(json.dumps({"loss": loss.item()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
