"""Lesson 03: train a CNN whose layers lie on two GPUs, with one process.

    python scripts/PT_CNN_ModelParallel.py                        on a machine with two GPUs
    multigpu virtual --gpus 2 scripts/PT_CNN_ModelParallel.py     on a laptop
    multigpu prove --gpus 2 --reference scripts/PT_CNN_SingleGPU.py \\
        scripts/PT_CNN_ModelParallel.py                           does it equal one GPU?
    sbatch slurm/PT_CNN_ModelParallel.slurm                       on a cluster

Needs torch and scikit-learn. To begin your own work, copy this file.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

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
    """A CNN with its convolutions on the GPU `first` and its linear layers on `second`."""

    def __init__(self, cnn, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.conv1, self.conv2 = cnn.conv1.to(first), cnn.conv2.to(first)
        self.fc1, self.fc2 = cnn.fc1.to(second), cnn.fc2.to(second)

    def forward(self, images):
        x = torch.tanh(self.conv1(images))
        x = torch.tanh(self.conv2(x)).to(self.second)  # the one line that differs
        x = torch.tanh(self.fc1(x.flatten(1)))
        return self.fc2(x)


# Set up the GPUs


def find_gpus():
    """cuda:0 and cuda:1."""
    try:
        torch.zeros(1, device="cuda:1")
    except (AssertionError, RuntimeError):  # no CUDA, or no second GPU
        sentence = f"It needs two GPUs. Try: multigpu virtual --gpus 2 {__file__}"
        raise SystemExit(sentence) from None
    return torch.device("cuda", 0), torch.device("cuda", 1)


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


def step(model, optimizer, images, labels, micro_batches=1):
    """One step of the optimizer. Returns the mean loss, on the labels' GPU."""
    optimizer.zero_grad()
    # The program does not wait for the GPUs: both compute, each another micro-batch.
    outputs = [model(micro_batch) for micro_batch in images.chunk(micro_batches)]
    loss = F.cross_entropy(torch.cat(outputs), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train_epoch(model, optimizer, loader, micro_batches):
    """Train for one epoch. Returns the mean loss over its images."""
    total = 0.0
    for images, labels in loader:
        images, labels = images.to(model.first), labels.to(model.second)  # where they are used
        total += step(model, optimizer, images, labels, micro_batches).item() * len(labels)
    return total / len(loader.dataset)


# Evaluate


@torch.no_grad()
def accuracy(model, test):
    """The share of the test images that the model names correctly."""
    images, labels = test.tensors
    return (model(images.to(model.first)).argmax(1).cpu() == labels).double().mean().item()


def main():
    parser = argparse.ArgumentParser(description="Train a CNN whose layers are on two GPUs.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step")
    parser.add_argument("--micro-batches", type=int, default=4, help="parts of a batch")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_CNN_ModelParallel"))
    args = parser.parse_args()
    if args.epochs < 1 or not 1 <= args.micro_batches <= args.batch_size:
        parser.error("--epochs is from 1 up, --micro-batches from 1 to --batch-size")
    try:
        train, test = read_digits(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))

    first, second = find_gpus()
    torch.manual_seed(args.seed)
    model = Halves(CNN(), first, second)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        order = torch.Generator().manual_seed(args.seed + epoch)  # as DistributedSampler's
        sampler = RandomSampler(train, generator=order)
        loader = DataLoader(train, args.batch_size, sampler=sampler)
        loss = train_epoch(model, optimizer, loader, args.micro_batches)
        found = accuracy(model, test)
        print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {found:.4f}", flush=True)

    torch.save(model.cpu().state_dict(), args.out / "model.pt")
    (args.out / "metrics.json").write_text(json.dumps({"loss": loss, "accuracy": found}))


if __name__ == "__main__":
    main()
