"""Lesson 06: model and data parallel: DDP over ranks that have a model on two GPUs each.

    torchrun --nproc-per-node 2 scripts/PT_CNN_HybridParallel.py    on a machine with 4 GPUs
    multigpu virtual --gpus 4 torchrun --nproc-per-node 2 scripts/PT_CNN_HybridParallel.py
    multigpu prove --gpus 4 torchrun --nproc-per-node 2 scripts/PT_CNN_HybridParallel.py
    sbatch slurm/PT_CNN_HybridParallel.slurm                        on a cluster

`virtual` needs no GPU, `prove` compares with one process on one GPU. This file needs torch and
scikit-learn. To begin your own work, copy it.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
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


class Halves(nn.Module):
    """A CNN in two stages, each on its own GPU. A batch passes them in micro-batches."""

    def __init__(self, cnn, gpus, micro_batches):
        super().__init__()
        self.first = nn.Sequential(cnn.conv1, nn.Tanh(), cnn.conv2, nn.Tanh()).to(gpus[0])
        self.second = nn.Sequential(nn.Flatten(), cnn.fc1, nn.Tanh(), cnn.fc2).to(gpus[1])
        self.gpus, self.micro_batches = gpus, micro_batches

    def forward(self, images):
        outputs = []
        for micro_batch in images.to(self.gpus[0]).chunk(self.micro_batches):
            activations = self.first(micro_batch)
            outputs.append(self.second(activations.to(self.gpus[1])))
        return torch.cat(outputs)


# Set up the ranks


def set_up():
    """Join the ranks. Returns this rank's two GPUs: local rank 1 has cuda:2 and cuda:3."""
    of_srun = {"RANK": "PROCID", "WORLD_SIZE": "STEP_NUM_TASKS", "LOCAL_RANK": "LOCALID"}
    for name, ending in of_srun.items():  # torchrun sets them, srun has other names for them
        os.environ.setdefault(name, os.environ.get(f"SLURM_{ending}", ""))
    first = 2 * int(os.environ["LOCAL_RANK"] or 0)
    if not os.environ["WORLD_SIZE"] or torch.cuda.device_count() < first + 2:
        command = f"multigpu virtual --gpus 4 torchrun --nproc-per-node 2 {__file__}"
        raise SystemExit(f"It needs torchrun and two GPUs for each rank. Try: {command}")
    torch.cuda.set_device(first)
    dist.init_process_group("nccl")
    return torch.device("cuda", first), torch.device("cuda", first + 1)


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


def train_epoch(model, optimizer, loader):
    """Train for one epoch on this rank's images. Returns the mean loss over all images."""
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), len(loader.dataset)
    last = model.module.gpus[1]
    total = torch.zeros((), device=last)
    for step, (images, labels) in enumerate(loader):
        done = step * loader.batch_size  # images of each rank
        # The sampler repeats images until all ranks have equally many. A repeat is ignored.
        labels[(done + torch.arange(len(labels))) * ranks + rank >= count] = -100
        loss = F.cross_entropy(model(images), labels.to(last), reduction="sum")
        optimizer.zero_grad()
        # DDP averages over the ranks, stage by stage. The mean over images is wanted.
        (loss * ranks / min(loader.batch_size * ranks, count - done * ranks)).backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / count


# Evaluate


@torch.no_grad()
def accuracy(model, test):
    """The share of the test images that the model names correctly."""
    images, labels = test.tensors
    return (model(images).argmax(1).cpu() == labels).double().mean().item()


def main():
    parser = argparse.ArgumentParser(description="Train a CNN with DDP, on two GPUs a rank.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a rank, in each step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_CNN_HybridParallel"))
    args = parser.parse_args()
    if min(args.epochs, args.micro_batches) < 1:
        parser.error("--epochs and --micro-batches are from 1 up")
    try:
        train, test = read_digits(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))

    gpus = set_up()
    ranks = dist.get_world_size()
    if args.batch_size < ranks or args.batch_size % ranks:
        parser.error(f"--batch-size must be a multiple of the {ranks} ranks")
    torch.manual_seed(args.seed)
    cnn = CNN()
    model = DDP(Halves(cnn, gpus, args.micro_batches))  # device_ids are for a model on one GPU
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, args.batch_size // ranks, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        loss = train_epoch(model, optimizer, loader)
        found = accuracy(model.module, test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {found:.4f}", flush=True)

    if dist.get_rank() == 0:
        torch.save(cnn.cpu().state_dict(), args.out / "model.pt")
        (args.out / "metrics.json").write_text(json.dumps({"loss": loss, "accuracy": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
