"""Lesson 13: measure how fast DDP trains on these ranks: one point of a scaling curve.

    torchrun --standalone --nproc-per-node=2 scripts/PT_CNN_Scaling.py --out results/curve/2
    multigpu scaling --measured results/curve                      draw all points of a folder
    multigpu prove torchrun --nproc-per-node=2 scripts/PT_CNN_Scaling.py    do they equal one?
    sbatch slurm/PT_CNN_Scaling.slurm                              on a cluster

On GPUs or the CPU. Strong scaling: --batch-size is the batch of all ranks together. With
--weak it is the batch of each rank: on more ranks, that is another training.
Needs torch and scikit-learn. To begin your own work, copy this file.
"""

import argparse
import json
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the process group is made: see the end of main
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


# Set up the ranks


def join():
    """Connect the ranks. Returns this rank's device: its GPU, or the CPU if there is none."""
    of_srun = {"RANK": "PROCID", "WORLD_SIZE": "STEP_NUM_TASKS", "LOCAL_RANK": "LOCALID"}
    for name, ending in of_srun.items():  # torchrun sets them, srun has other names for them
        os.environ.setdefault(name, os.environ.get(f"SLURM_{ending}", ""))
    if not os.environ["WORLD_SIZE"]:
        raise SystemExit(f"Try: torchrun --standalone --nproc-per-node=2 {__file__}")
    gpus = torch.cuda.device_count()
    local_rank = int(os.environ["LOCAL_RANK"])
    # With srun --gpus-per-task a rank sees its own GPU alone, as cuda:0.
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    return device


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


# Train


def train_epoch(ddp, optimizer, loader, device):
    """Train for one epoch. Returns the mean loss over all images, and each step's seconds."""
    train, rank, ranks = loader.dataset, loader.sampler.rank, loader.sampler.num_replicas
    batch_size = loader.batch_size * ranks
    total = torch.zeros((), dtype=torch.float64, device=device)
    ends = [time.perf_counter()]
    for step, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        # The sampler repeats images until all ranks have equally many. Repeats get weight 0.
        row = step * loader.batch_size + torch.arange(len(labels), device=device)
        weight = row * ranks + rank < len(train)
        optimizer.zero_grad()
        loss = (F.cross_entropy(ddp(images), labels, reduction="none") * weight).sum()
        # DDP divides by the ranks, so this is the mean over the images of all ranks.
        (loss * ranks / min(batch_size, len(train) - step * batch_size)).backward()
        optimizer.step()
        total += loss.detach()
        if device.type == "cuda":
            torch.cuda.synchronize()  # without it, the clock would stop at the launch
        ends.append(time.perf_counter())
    dist.all_reduce(total)
    return total.item() / len(train), [end - begin for begin, end in pairwise(ends)]


# Evaluate


@torch.no_grad()
def accuracy(model, test, device):
    """The share of the test images that the model names correctly."""
    images, labels = test.tensors
    model.eval()
    hits = model(images.to(device)).argmax(1).cpu() == labels
    model.train()
    return hits.double().mean().item()


def main():
    parser = argparse.ArgumentParser(description="Train with DDP, and measure the steps.")
    parser.add_argument("--epochs", type=int, default=10, help="the first one warms up")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, in all")
    parser.add_argument("--weak", action="store_true", help="--batch-size is for each rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_CNN_Scaling"))
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs is at least 1")
    try:
        train, test = read_digits(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))
    device = join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch_size = args.batch_size * (ranks if args.weak else 1)
    if batch_size < ranks or batch_size % ranks:
        parser.error(f"--batch-size must be a multiple of the {ranks} ranks")
    scaling = "weak" if args.weak else "strong"
    if rank == 0:
        print(f"{ranks} × {device.type}, {batch_size} images a step ({scaling} scaling)")
    torch.manual_seed(args.seed)
    model = CNN().to(device)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, batch_size // ranks, sampler=sampler)
    measured = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss, seconds = train_epoch(ddp, optimizer, loader, device)
        found = accuracy(model, test, device)
        # An epoch's last batch can be smaller. The first epoch warms up.
        measured = (measured if epoch > 1 else []) + (seconds[:-1] or seconds)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {found:.4f}", flush=True)

    if rank == 0:
        median = statistics.median(measured)
        speed = min(batch_size, len(train)) / median
        print(f"{len(measured)} steps, median {1e3 * median:.2f} ms: {speed:,.0f} images/s")
        torch.save(model.cpu().state_dict(), args.out / "model.pt")
        metrics = {"loss": loss, "accuracy": found, "scaling": scaling, "world_size": ranks}
        metrics |= {"batch_size": batch_size, "step_seconds": measured, "images_per_s": speed}
        (args.out / "metrics.json").write_text(json.dumps(metrics))
    # Without this line and the import of functional, gloo's threads can abort or hang the end.
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
