"""Lesson 14: a small GPT that draws digits, and the memory that its training takes.

    python scripts/PT_GPT_Memory.py                        on a GPU, else on the CPU
    multigpu virtual --gpus 1 scripts/PT_GPT_Memory.py     on a laptop, as on a GPU
    sbatch slurm/PT_GPT_Memory.slurm                       on a cluster
Needs torch and scikit-learn. To begin your own work, copy this file.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.checkpoint import checkpoint

# Design the model
keep_inputs = partial(checkpoint, use_reentrant=False)  # torch's own, for any function


class Checkpoint(torch.autograd.Function):
    """The same by hand: block(x), of which only x is kept. Backward computes it again."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block, ctx.half = block, torch.is_autocast_enabled(x.device.type)
        ctx.save_for_backward(x)
        return block(x)  # in here, autograd keeps nothing

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(x.device.type, torch.bfloat16, ctx.half):
            again = ctx.block(x)
        again.backward(gradient)  # adds to the gradients of the block's weights
        return None, x.grad


class Block(nn.Module):
    """Causal attention and an MLP, each after its norm: (batch, tokens, hidden) → the same."""

    def __init__(self, hidden, heads, attention="flash", selective=False):
        super().__init__()
        self.size, self.attention, self.selective = hidden // heads, attention, selective
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def mix(self, q, k, v):
        if self.attention == "flash":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ v

    def forward(self, x):
        # A head's q, k and v stand together: a part of the rows of qkv is whole heads.
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.size)).permute(3, 0, 2, 1, 4)
        mixed = keep_inputs(self.mix, *qkv) if self.selective else self.mix(*qkv)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens' numbers (batch, tokens) → logits (batch, tokens, vocabulary). Head not tied."""

    def __init__(self, layers, hidden, heads, tokens, vocabulary, attention, checkpointing):
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.places = nn.Embedding(tokens, hidden)
        block = partial(Block, hidden, heads, attention, checkpointing == "selective")
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        ways = {"full": keep_inputs, "hand": Checkpoint.apply}
        self.compute = ways.get(checkpointing, Block.__call__)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = self.compute(block, x)
        return self.head(self.norm(x))


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
def train_step(model, optimizer, tokens, half=False):
    """Learn to predict each token from those before it. Returns the batch's mean loss."""
    with torch.autocast(tokens.device.type, torch.bfloat16, half):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def draw(model, labels):
    """Images (n, 8, 8) of the labels (n), pixel by pixel."""
    tokens = labels[:, None] + 17
    for _ in range(64):
        odds = (2 * model(tokens)[:, -1, :17]).softmax(-1)  # doubled: fewer odd pixels
        tokens = torch.cat([tokens, torch.multinomial(odds, 1)], 1)
    return tokens[:, 1:].view(-1, 8, 8)


def main():
    parser = argparse.ArgumentParser(description="Train a GPT that draws digits.")
    sizes = dict(epochs=6, batch_size=32, layers=2, hidden=48, heads=4)
    for name, default in (sizes | dict(lr=0.006, seed=0)).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    parser.add_argument("--precision", choices=["fp32", "bf16-mixed"], default="fp32")
    ways = ["none", "selective", "full", "hand"]
    parser.add_argument("--checkpointing", choices=ways, default="none")
    parser.add_argument("--attention", choices=["flash", "math"], default="flash")
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_GPT_Memory"))
    args = parser.parse_args()
    for name in sizes:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is not a multiple of --heads {args.heads}")
    try:
        train = read_tokens(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))
    steps, half = len(train) // args.batch_size, args.precision == "bf16-mixed"
    if not steps:
        parser.error(f"--batch-size is at most {len(train)}, the number of images")

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    shape, how = (args.layers, args.hidden, args.heads), (args.attention, args.checkpointing)
    model, train = GPT(*shape, 64, 27, *how).to(device), train.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    for epoch in range(args.epochs):
        order = torch.Generator().manual_seed(args.seed + epoch)  # as DistributedSampler's
        batches = torch.randperm(len(train), generator=order).split(args.batch_size)[:steps]
        loss = sum(train_step(model, optimizer, train[rows], half) for rows in batches) / steps
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    for rows in draw(model, torch.arange(10, device=device)).transpose(0, 1):
        print("  ".join("".join(" .:-=+*#@"[grey // 2] for grey in row) for row in rows))
    torch.save(model.cpu().state_dict(), args.out / "model.pt")
    (args.out / "metrics.json").write_text(json.dumps({"loss": loss.item()}))


if __name__ == "__main__":
    main()
