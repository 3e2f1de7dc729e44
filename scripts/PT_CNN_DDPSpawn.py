"""Lesson 04: train with DDP on processes that the program starts itself, by mp.spawn.

    python scripts/PT_CNN_DDPSpawn.py                        on all GPUs, else on the CPU
    multigpu virtual --gpus 2 scripts/PT_CNN_DDPSpawn.py     on a laptop, as on two GPUs
    multigpu prove --gpus 2 scripts/PT_CNN_DDPSpawn.py       does it equal one GPU?
    sbatch slurm/PT_CNN_DDPSpawn.slurm                       on one node of a cluster

Needs torch and scikit-learn. To begin your own work, copy this file.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group is made: see the end of work
import torch.multiprocessing as mp
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


def join(rank, ranks, port):
    """Join the process group as rank `rank`. Returns its device: cuda:RANK, or the CPU."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))  # they share the cores
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        backend, device = "nccl", torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
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
    """Train for one epoch. Returns the mean loss over the images of all ranks."""
    train, rank, ranks = loader.dataset, loader.sampler.rank, loader.sampler.num_replicas
    batch_size = loader.batch_size * ranks
    total = torch.zeros((), dtype=torch.float64, device=device)
    for step, (images, labels) in enumerate(loader):
        # The sampler repeats images until all ranks have equally many. Repeats get weight 0.
        row = step * loader.batch_size + torch.arange(len(labels), device=device)
        weight = row * ranks + rank < len(train)
        losses = F.cross_entropy(ddp(images.to(device)), labels.to(device), reduction="none")
        loss = (losses * weight).sum()
        optimizer.zero_grad()
        # DDP divides by the ranks, so this is the mean over the images of all ranks.
        (loss * ranks / min(batch_size, len(train) - step * batch_size)).backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(train)


def work(rank, args, port):
    """What each rank does. Its process is new, and has only the arguments of its parent."""
    device = join(rank, args.nprocs, port)
    train, test = read_digits(args.data)
    sampler = DistributedSampler(train, args.nprocs, rank, seed=args.seed)
    loader = DataLoader(train, args.batch_size // args.nprocs, sampler=sampler)
    torch.manual_seed(args.seed)
    model = CNN().to(device)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        loss = train_epoch(ddp, optimizer, loader, device)
        found = accuracy(model, test, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {found:.4f}", flush=True)
    if rank == 0:  # mp.spawn returns nothing to the parent: the result is in files
        torch.save(model.cpu().state_dict(), args.out / "model.pt")
        (args.out / "metrics.json").write_text(json.dumps({"loss": loss, "accuracy": found}))
    # Without this line and the import of functional, gloo's threads can abort or hang the end.
    del ddp
    dist.destroy_process_group()


# Evaluate


@torch.no_grad()
def accuracy(model, test, device):
    """The share of the test images that the model names correctly."""
    images, labels = test.tensors
    return (model(images.to(device)).argmax(1).cpu() == labels).double().mean().item()


def main():
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description="Train a CNN with DDP on spawned processes.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nprocs", type=int, default=gpus or 2, help="ranks, one a GPU")
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PT_CNN_DDPSpawn"))
    args = parser.parse_args()
    if min(args.epochs, args.nprocs, args.batch_size) < 1 or args.batch_size % args.nprocs:
        parser.error("--batch-size must be a multiple of --nprocs, all of them at least 1")
    if 0 < gpus < args.nprocs:
        parser.error(f"--nprocs can be at most {gpus}: each rank needs a GPU of its own")
    try:  # here, so that a wrong path is one sentence and not an error of each rank
        read_digits(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()  # it is writable
    except (OSError, KeyError, ValueError) as error:
        parser.error(error)
    # The ranks find each other through this store. At port 0 the system chooses a free port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(work, (args, store.port), args.nprocs)  # in each process work(rank, args, port)


if __name__ == "__main__":
    main()
