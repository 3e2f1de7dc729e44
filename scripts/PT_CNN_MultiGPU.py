"""Lesson 05: train on many GPUs, on one node or several, by DDP: one process for each GPU.

    torchrun --standalone --nproc-per-node=2 scripts/PT_CNN_MultiGPU.py     on GPUs or the CPU
    multigpu prove torchrun --nproc-per-node=2 scripts/PT_CNN_MultiGPU.py   do they equal one?
    sbatch slurm/PT_CNN_MultiGPU.slurm                                      on a cluster

With --resume results/PT_CNN_MultiGPU/last.pt a run continues after its last complete epoch.
Needs torch and scikit-learn. To begin your own work, copy this file.
"""

import argparse
import json
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the process group is made: see the end of main
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

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


def find_rank():
    """This process's rank, the number of ranks, and its rank on its node, by its launcher."""
    for names in (
        "RANK WORLD_SIZE LOCAL_RANK",  # torchrun
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK",  # mpirun
        # srun. A job's shell, which is no rank, has SLURM_NTASKS, too, but not the second.
        "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID",
    ):
        values = [os.environ.get(name) for name in names.split()]
        if all(values):
            return map(int, values)
    return 0, 1, 0


def join(rank, ranks, local_rank):
    """Connect the ranks. Returns this rank's device: its GPU, or the CPU if there is none."""
    if ranks == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")  # any free port
    elif "MASTER_PORT" not in os.environ:
        raise SystemExit("Export MASTER_ADDR=<rank 0's node> and MASTER_PORT=<a free port>.")
    gpus = torch.cuda.device_count()
    # With srun --gpus-per-task a rank sees its own GPU alone, as cuda:0.
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", rank=rank, world_size=ranks)
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


def train_epoch(ddp, optimizer, scaler, autocast, loader, accumulate, device):
    """Train for one epoch. Returns the mean loss over the images of all ranks."""
    train, rank, ranks = loader.dataset, loader.sampler.rank, loader.sampler.num_replicas
    batch_size = loader.batch_size * ranks * accumulate
    total = torch.zeros((), dtype=torch.float64, device=device)
    ddp.train()
    for index, (images, labels) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        is_last = (index + 1) % accumulate == 0 or index + 1 == len(loader)
        images_in_step = min(batch_size, len(train) - index // accumulate * batch_size)
        # The sampler repeats images until all ranks have equally many. Repeats get weight 0.
        row = index * loader.batch_size + torch.arange(len(labels), device=device)
        weight = row * ranks + rank < len(train)
        # DDP averages the gradients in the backward of the step's last micro-batch alone.
        with nullcontext() if is_last else ddp.no_sync():
            with autocast:
                loss = (F.cross_entropy(ddp(images), labels, reduction="none") * weight).sum()
            # DDP divides by the ranks, so this is the mean over the images of all ranks.
            scaler.scale(loss * ranks / images_in_step).backward()
        total += loss.detach()
        if is_last:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item() / len(train)


# Evaluate


@torch.no_grad()
def accuracy(model, test, rank, ranks, device):
    """The share of the test images that the model names correctly. Each rank counts some."""
    model.eval()
    hits = torch.zeros((), dtype=torch.float64, device=device)
    # No image is repeated, so ranks may have more batches than others: no DDP in this loop.
    for images, labels in DataLoader(Subset(test, range(rank, len(test), ranks)), 256):
        hits += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(hits)
    return hits.item() / len(test)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="Train a CNN with DDP, under any launcher.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, in all")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--amp", action="store_true", help="16 bit where that is safe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_CNN_MultiGPU"))
    parser.add_argument("--resume", metavar="FILE", help="go on from the last.pt of a run")
    return parser.parse_args(arguments)


@record  # so that torchrun's report of a failed run has the traceback
def main(args):
    rank, ranks, local_rank = find_rank()
    shares = ranks * args.accumulate
    if args.epochs < 1 or args.batch_size < 1 or args.batch_size % shares:
        raise SystemExit(f"--batch-size must be a multiple of {shares}, --epochs at least 1.")
    settings = {name: vars(args)[name] for name in ("batch_size", "lr", "amp", "seed")}
    checkpoint = {"history": [], "settings": settings}
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()  # it is writable
        train, test = read_digits(args.data)
        if args.resume:
            checkpoint = torch.load(args.resume, map_location="cpu", weights_only=True)
    except (OSError, KeyError, ValueError) as error:
        raise SystemExit(error) from None
    if (found := checkpoint.get("settings", "none, as it is no last.pt")) != settings:
        raise SystemExit(f"{args.resume} has other settings: {found}.")
    device = join(rank, ranks, local_rank)
    if rank == 0:
        print(f"{ranks} × {device.type}, {args.batch_size} images a step", flush=True)
    sampler = DistributedSampler(train, ranks, rank, seed=args.seed)
    rows = args.batch_size // shares
    loader = DataLoader(train, rows, sampler=sampler, pin_memory=device.type == "cuda")
    torch.manual_seed(args.seed)
    model = CNN().to(device)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    autocast = torch.autocast(device.type, torch.bfloat16 if bf16 else torch.float16, args.amp)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp and not bf16)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    for name in parts.keys() & checkpoint.keys():
        parts[name].load_state_dict(checkpoint[name])

    history = checkpoint["history"]
    for epoch in range(len(history), args.epochs):
        sampler.set_epoch(epoch)
        # For dropout: other random numbers on each rank, the same ones in a resumed run.
        torch.manual_seed(args.seed + epoch * ranks + rank)
        loss = train_epoch(ddp, optimizer, scaler, autocast, loader, args.accumulate, device)
        if not np.isfinite(loss):
            raise SystemExit(f"The loss is {loss} in epoch {epoch + 1}: lower --lr.")
        found = accuracy(model, test, rank, ranks, device)
        history.append({"loss": loss, "accuracy": found})
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {found:.4f}", flush=True)
            checkpoint |= {name: part.state_dict() for name, part in parts.items()}
            torch.save(checkpoint, args.out / "last.pt.new")
            (args.out / "last.pt.new").replace(args.out / "last.pt")  # never half a checkpoint
    if rank == 0:
        torch.save(model.cpu().state_dict(), args.out / "model.pt")
        (args.out / "metrics.json").write_text(json.dumps({**history[-1], "epochs": history}))
    # Without this line and the import of functional, gloo's threads can abort or hang the end.
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse())
