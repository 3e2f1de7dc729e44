"""Lesson 12: train on ranks that may die, come and go. The same command goes on after a stop.

    torchrun --standalone --nproc-per-node=2 --max-restarts=1 scripts/PT_CNN_Elastic.py
    multigpu prove torchrun --nproc-per-node=2 scripts/PT_CNN_Elastic.py    do they equal one?
    sbatch slurm/PT_CNN_Elastic.slurm                                       on a cluster

A new run needs another --out. Needs torch, scikit-learn and multigpu, this course's library.
"""

import argparse
import json
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

from multigpu import elastic, launch

# Design the model


class CNN(nn.Module):
    """Images (batch, 1, 8, 8) → logits (batch, 10). Smooth, so that rounding stays small."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = torch.tanh(self.conv1(images))
        x = torch.tanh(self.conv2(x))
        x = torch.tanh(self.fc1(x.flatten(1)))
        return self.fc2(x)


# Set up the run


@dataclass
class Position:
    """How far a run is, and its records. Each checkpoint holds all of it."""

    epoch: int = 0  # epochs that are done
    images: int = 0  # images of this epoch that are done, over all ranks
    steps: int = 0  # steps since the run began
    loss_sum: float = 0.0  # over the images of this epoch that are done
    starts: int = 0  # how often the ranks were started
    history: list = field(default_factory=list)  # a row for each epoch
    curve: list = field(default_factory=list)  # per step: loss, ranks, number of start


class Run:
    """Model, optimizer and position; before the first step. It saves if it has checkpoints."""

    def __init__(self, args, device, checkpoints=None):
        torch.manual_seed(args.seed)
        self.args, self.device, self.checkpoints = args, device, checkpoints
        self.ddp = DDP(CNN().to(device))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), args.lr, momentum=0.9)
        self.parts = {"model": self.ddp.module, "optimizer": self.optimizer}
        self.position = Position()
        # After its first backward DDP changes its buckets, and with them the order of sums.
        self.ddp(torch.zeros(1, 1, 8, 8, device=device)).sum().backward()

    def save(self):  # a thread of rank 0 writes a copy, while training goes on
        if self.checkpoints:
            self.checkpoints.save(self.position.steps, self.parts, asdict(self.position))


# Read in the data


def read_digits(path=None):
    """Train and test set: scikit-learn's digits of 8 × 8 pixels, or an .npz like them."""
    if path:
        data = np.load(path)
        arrays = [data[name] for name in ("x_train", "y_train", "x_test", "y_test")]
    else:
        digits = load_digits()
        order = np.random.RandomState(0).permutation(len(digits.target))
        x, y = digits.images[order] / 16, digits.target[order]
        arrays = [x[:1437], y[:1437], x[1437:], y[1437:]]
    images, labels, test_images, test_labels = map(torch.as_tensor, arrays)
    train = TensorDataset(images.float().unsqueeze(1), labels.long())
    return train, TensorDataset(test_images.float().unsqueeze(1), test_labels.long())


def order_of_epoch(images, seed, epoch):
    """A permutation of the whole epoch: the same on each rank, whatever their number."""
    return torch.randperm(images, generator=torch.Generator().manual_seed(seed + epoch))


def own_shard(batch, rank, ranks):
    """Every N-th image of a global batch; the last one again if N does not divide it."""
    places = torch.arange(rank, len(batch) + rank, ranks)
    return batch[places.clamp(max=len(batch) - 1)]


# Train


def train_epoch(run, train):
    """Train for the rest of the epoch. Returns the mean loss over all its images."""
    args, device, position = run.args, run.device, run.position
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rest = order_of_epoch(len(train), args.seed, position.epoch)[position.images :]
    for batch in rest.split(args.batch_size) if len(rest) else ():
        if args.kill == [rank, position.steps] and position.starts == 1:
            signal.raise_signal(signal.SIGKILL)
        # For dropout: a step that is made again after a failure draws the same numbers.
        torch.manual_seed((args.seed << 40) + (position.steps << 16) + rank)
        images, labels = (part.to(device) for part in train[own_shard(batch, rank, ranks)])
        weight = torch.arange(len(labels), device=device) * ranks + rank < len(batch)
        loss = (F.cross_entropy(run.ddp(images), labels, reduction="none") * weight).sum()
        run.optimizer.zero_grad()
        # DDP divides by the ranks, so this is the mean over the images of all ranks.
        (loss * ranks / len(batch)).backward()
        run.optimizer.step()
        loss_sum, stop = elastic.add_up(loss.detach())
        position.images += len(batch)
        position.steps += 1
        position.loss_sum += loss_sum
        position.curve.append([loss_sum / len(batch), ranks, position.starts])
        if stop:  # after the position: a stop loses no step and repeats none
            raise elastic.Stop(stop)
        if position.steps % args.save_every == 0:
            run.save()
        time.sleep(args.pause)
    return position.loss_sum / len(train)


# Evaluate


@torch.no_grad()
def accuracy(model, test, device):
    """The share of the test images that the model names correctly."""
    images, labels = test.tensors
    return (model(images.to(device)).argmax(1).cpu() == labels).double().mean().item()


def train_to_end(run, train, test):
    """Train from the run's position to its last epoch. Raises Stop after a signal."""
    at = run.position
    while at.epoch < run.args.epochs:
        loss = train_epoch(run, train)
        found = accuracy(run.ddp.module, test, run.device)
        at.history.append({"loss": loss, "accuracy": found})
        at.epoch, at.images, at.loss_sum = at.epoch + 1, 0, 0.0
        run.save()
        if run.checkpoints and dist.get_rank() == 0:
            print(f"epoch {at.epoch}: loss {loss:.4f}, accuracy {found:.4f}", flush=True)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="Train with DDP; go on after a failure.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, in all")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_CNN_Elastic"))
    parser.add_argument("--save-every", type=int, default=10, help="steps to a checkpoint")
    parser.add_argument("--timeout", type=float, default=120, help="seconds, for a rank")
    parser.add_argument("--end-on-term", action="store_true", help="end with 0 after SIGTERM")
    parser.add_argument("--prove", action="store_true", help="compare with an unstopped run")
    parser.add_argument("--kill", type=int, nargs=2, help="rank and step, in the first start")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    args = parser.parse_args(arguments)
    if min(args.epochs, args.batch_size, args.save_every) < 1:
        parser.error("--epochs, --batch-size and --save-every are at least 1")
    if args.data and not Path(args.data).is_file():
        parser.error(f"--data: there is no file {args.data}")
    return args


@elastic.report_lost_ranks()  # a sentence, if a collective fails because a rank has ended
def main(args):
    train, test = read_digits(args.data)
    device = elastic.join(args.timeout, exact=args.prove)
    settings = {"the global --batch-size": args.batch_size, "--seed": args.seed}
    settings |= {"--lr": args.lr, "--data (its sum)": train.tensors[0].sum().item()}
    run = Run(args, device, elastic.Checkpoints(args.out / "checkpoints", settings))
    at = run.position = Position(**(run.checkpoints.load(run.parts) or {}))
    at.starts = max(at.starts, elastic.restarts()) + 1
    rank, proof = dist.get_rank(), None
    if rank == 0:
        done = f"start {at.starts}: epoch {at.epoch + 1}, {at.images} images done"
        print(f"{dist.get_world_size()} × {device.type}, {done}", flush=True)
    try:
        train_to_end(run, train, test)
        if args.prove:  # train again without a stop, and compare the weights
            train_to_end(again := Run(args, device), train, test)
            proof = elastic.verdict(run, again)
    except elastic.Stop as stop:
        return elastic.leave(stop, run, args.end_on_term)
    if rank == 0:
        run.checkpoints.wait()
        torch.save(run.ddp.module.state_dict(), args.out / "model.pt")
        last = {**at.history[-1], "epochs": at.history, "starts": at.starts, "curve": at.curve}
        (args.out / "metrics.json").write_text(json.dumps({**last, "proof": proof}))
    dist.destroy_process_group()
    if proof and not proof["holds"]:
        raise SystemExit(1)


if __name__ == "__main__":
    launch.start(main, parse())
