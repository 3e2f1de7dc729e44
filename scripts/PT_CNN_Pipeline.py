"""Lesson 03: train a CNN that is cut into stages, with a process for each stage.

    torchrun --nproc-per-node 2 scripts/PT_CNN_Pipeline.py    on two GPUs, else on the CPU
    multigpu virtual --gpus 2 torchrun --nproc-per-node 2 scripts/PT_CNN_Pipeline.py
    multigpu prove --reference scripts/PT_CNN_SingleGPU.py \\
        torchrun --nproc-per-node 2 scripts/PT_CNN_Pipeline.py
    sbatch slurm/PT_CNN_Pipeline.slurm                        on a cluster

Needs torch and scikit-learn. To begin your own work, copy this file.
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
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


def stage(cnn, rank, ranks):
    """The layers that a rank computes, with the CNN's own weights. There are 2 to 4 ranks."""
    layers = [
        nn.Sequential(cnn.conv1, nn.Tanh()),
        nn.Sequential(cnn.conv2, nn.Tanh(), nn.Flatten()),
        nn.Sequential(cnn.fc1, nn.Tanh()),
        cnn.fc2,
    ]
    return nn.Sequential(*layers[4 * rank // ranks : 4 * (rank + 1) // ranks])


# Set up the ranks


def find_ranks():
    """This process's rank and the number of ranks, which torchrun or srun have set."""
    of_srun = {"RANK": "PROCID", "WORLD_SIZE": "STEP_NUM_TASKS", "LOCAL_RANK": "LOCALID"}
    for name, ending in of_srun.items():
        os.environ.setdefault(name, os.environ.get(f"SLURM_{ending}", "0"))
    ranks = int(os.environ["WORLD_SIZE"])
    if not 2 <= ranks <= 4:
        raise SystemExit(f"It needs 2 to 4 ranks. Try: torchrun --nproc-per-node 2 {__file__}")
    return int(os.environ["RANK"]), ranks


def join():
    """Join the process group. Returns this rank's device: its GPU, or the CPU."""
    gpus = torch.cuda.device_count()
    device = torch.device(f"cuda:{int(os.environ['LOCAL_RANK']) % gpus}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo")
    return device


def schedule(name, layers, device, micro_batches):
    """What computes this rank's stage, in the order of "gpipe" or "1f1b"."""
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
    own_stage = PipelineStage(layers, dist.get_rank(), dist.get_world_size(), device)
    sum_of_losses = nn.CrossEntropyLoss(reduction="sum")  # train_epoch makes it a mean
    return kind(own_stage, micro_batches, loss_fn=sum_of_losses, scale_grads=False)


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


def ends(images, labels, batch_size, device):
    """This rank's inputs and target: the first rank has the images, the last the labels."""
    padding = batch_size - len(labels)  # all micro-batches must have one shape
    images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, padding)).to(device)
    labels = F.pad(labels, (0, padding), value=-100).to(device)  # the loss ignores -100
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    return (images,) if rank == 0 else (), labels if rank == last else None


# Train


def train_epoch(pipeline, layers, optimizer, loader, device):
    """Train this rank's layers for one epoch. The last rank gets the mean loss."""
    total = 0.0
    for images, labels in loader:  # all ranks read the same images
        inputs, target = ends(images, labels, loader.batch_size, device)
        losses = []  # of the micro-batches, on the last rank
        optimizer.zero_grad()
        pipeline.step(*inputs, target=target, losses=losses)
        for weight in layers.parameters():
            weight.grad /= len(labels)  # the mean over the images, without the padding
        optimizer.step()
        total += sum(loss.item() for loss in losses)
    return total / len(loader.dataset)


# Evaluate


@torch.no_grad()
def accuracy(pipeline, loader, device):
    """The last rank gets the share of the images that the model names correctly."""
    hits = 0
    for images, labels in loader:
        inputs, target = ends(images, labels, loader.batch_size, device)
        outputs = pipeline.eval(*inputs, target=target)
        if target is not None:
            hits += (outputs.argmax(1) == target).sum().item()
    return hits / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description="Train a CNN in stages, a process for each.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step")
    parser.add_argument("--micro-batches", type=int, default=4, help="parts of a batch")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="1f1b")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_CNN_Pipeline"))
    args = parser.parse_args()
    rank, ranks = find_ranks()
    if args.epochs < 1 or args.micro_batches < ranks or args.batch_size % args.micro_batches:
        parser.error(
            f"--epochs: 1 or more; --micro-batches: {ranks} or more, a divisor of the batch"
        )
    try:
        train, test = read_digits(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))

    device = join()
    torch.manual_seed(args.seed)
    cnn = CNN()
    layers = stage(cnn, rank, ranks).to(device)
    pipeline = schedule(args.schedule, layers, device, args.micro_batches)
    optimizer = torch.optim.SGD(layers.parameters(), args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        order = torch.Generator().manual_seed(args.seed + epoch)  # as DistributedSampler's
        sampler = RandomSampler(train, generator=order)
        loader = DataLoader(train, args.batch_size, sampler=sampler)
        loss = train_epoch(pipeline, layers, optimizer, loader, device)
        found = accuracy(pipeline, DataLoader(test, args.batch_size), device)
        if rank == ranks - 1:  # only the last rank has outputs
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {found:.4f}", flush=True)

    cnn.to(device)
    for owner in range(ranks):
        for weight in stage(cnn, owner, ranks).parameters():
            dist.broadcast(weight.detach(), src=owner)
    if rank == ranks - 1:
        torch.save(cnn.cpu().state_dict(), args.out / "model.pt")
        (args.out / "metrics.json").write_text(json.dumps({"loss": loss, "accuracy": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
