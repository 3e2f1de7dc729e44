"""Lesson 02: train on several GPUs with one process, by nn.DataParallel.

    python scripts/PT_CNN_DataParallel.py                        on a machine with GPUs
    multigpu virtual --gpus 2 scripts/PT_CNN_DataParallel.py     on a laptop
    multigpu prove --gpus 2 scripts/PT_CNN_DataParallel.py       does it equal one GPU?
    sbatch slurm/PT_CNN_DataParallel.slurm                       on a cluster

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


# Set up the GPUs


def find_gpus(count):
    """cuda:0, cuda:1, …: `count` of them, or all that there are."""
    found = torch.cuda.device_count()
    if not found:
        raise SystemExit(f"This machine has no GPU. Try: multigpu virtual --gpus 2 {__file__}")
    if count is not None and not 1 <= count <= found:
        raise SystemExit(f"--devices is {count}: this machine has {found} GPUs.")
    return [torch.device("cuda", index) for index in range(count or found)]


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


def train_epoch(model, optimizer, loader, gpu):
    """Train for one epoch. Returns the mean loss over its images."""
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        # DataParallel scatters the images over the GPUs and gathers the outputs on the first.
        loss = F.cross_entropy(model(images.to(gpu)), labels.to(gpu))
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
    return total / len(loader.dataset)


# Evaluate


@torch.no_grad()
def accuracy(model, test, gpu):
    """The share of the test images that the model names correctly."""
    images, labels = test.tensors
    return (model(images.to(gpu)).argmax(1).cpu() == labels).double().mean().item()


def main():
    parser = argparse.ArgumentParser(description="Train a CNN with nn.DataParallel.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images in a step, all GPUs"
    )
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, help="GPUs to use (default: all)")
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_CNN_DataParallel"))
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size are from 1 up")
    gpus = find_gpus(args.devices)
    try:
        train, test = read_digits(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))
    torch.manual_seed(args.seed)
    model = nn.DataParallel(CNN().to(gpus[0]), gpus)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        order = torch.Generator().manual_seed(args.seed + epoch)  # as DistributedSampler's
        loader = DataLoader(
            train, args.batch_size, sampler=RandomSampler(train, generator=order)
        )
        loss = train_epoch(model, optimizer, loader, gpus[0])
        found = accuracy(model, test, gpus[0])
        print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {found:.4f}")

    torch.save(model.module.state_dict(), args.out / "model.pt")
    (args.out / "metrics.json").write_text(json.dumps({"loss": loss, "accuracy": found}))


if __name__ == "__main__":
    main()
