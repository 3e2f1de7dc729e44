"""Lesson 01: train on one GPU. The scripts of the other lessons are held against this one.

    python scripts/PT_CNN_SingleGPU.py                        on a GPU, else on the CPU
    multigpu virtual --gpus 1 scripts/PT_CNN_SingleGPU.py     on a laptop, as on a GPU
    sbatch slurm/PT_CNN_SingleGPU.slurm                       on a cluster

Needs torch and scikit-learn. To begin your own work, copy this file.
"""

import argparse
import json
import tempfile
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


def make_loader(train, batch_size, order, workers=0):
    """The training set in batches; `order` is the random generator that shuffles it."""
    return DataLoader(
        train,
        batch_size,
        sampler=RandomSampler(train, generator=order),
        num_workers=workers,  # processes that read the next batches while the GPU computes
        persistent_workers=workers > 0,  # they start once, not in each epoch
        pin_memory=torch.cuda.is_available(),  # so that non_blocking copies do not wait
    )


# Train


def train_epoch(model, optimizer, loader, device):
    """Train for one epoch. Returns the mean loss over its images."""
    # .item() in each step would wait for the GPU, so the sum stays there until the end.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(labels)
    return total.item() / len(loader.dataset)


# Evaluate


@torch.no_grad()
def accuracy(model, test, device):
    """The share of the test images that the model names correctly."""
    images, labels = test.tensors
    return (model(images.to(device)).argmax(1).cpu() == labels).double().mean().item()


def main():
    parser = argparse.ArgumentParser(description="Train a CNN on one GPU, or on the CPU.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that read images")
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_CNN_SingleGPU"))
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1 or args.workers < 0:
        parser.error("--epochs and --batch-size are from 1 up, --workers from 0 up")
    try:
        train, test = read_digits(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()  # it is writable
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))

    # Set up the GPU
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    print(f"device: {device}")
    torch.manual_seed(args.seed)
    model = CNN().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    order = torch.Generator()
    loader = make_loader(train, args.batch_size, order, args.workers)
    for epoch in range(args.epochs):
        order.manual_seed(args.seed + epoch)  # as DistributedSampler's
        loss = train_epoch(model, optimizer, loader, device)
        found = accuracy(model, test, device)
        print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {found:.4f}", flush=True)

    torch.save(model.cpu().state_dict(), args.out / "model.pt")
    (args.out / "metrics.json").write_text(json.dumps({"loss": loss, "accuracy": found}))


if __name__ == "__main__":
    main()
