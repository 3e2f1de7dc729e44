"""Lesson 10: train a CNN with a strategy whose ranks have different weights.

    python scripts/PTL_Decentralized.py --strategy bagua:decentralized --devices 2
    torchrun --nproc-per-node=4 scripts/PTL_Decentralized.py --strategy bagua:async
    multigpu prove scripts/PTL_Decentralized.py --strategy bagua:decentralized --devices 2
    sbatch slurm/PTL_Decentralized.slurm --strategy bagua:async

Strategies: bagua:decentralized averages the weights of all ranks,
bagua:decentralized:shift_one those of two; bagua:low_precision_decentralized sends changes of
the weights to two neighbours; bagua:async averages when a timer says so. The proof does not
hold: it says how far the ranks are apart.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import multigpu.trainer as L
from multigpu.errors import UserError
from multigpu.strategies import BaguaStrategy

# Design the model


class LitCNN(L.LightningModule):
    """Lesson 01's CNN with its data, loss and optimizer."""

    def __init__(self, train, test, args):
        super().__init__()
        self.train_set, self.test_set, self.args = train, test, args
        conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2)
        fc1, fc2 = nn.Linear(32 * 4 * 4, 64), nn.Linear(64, 10)
        layers = conv1, nn.Tanh(), conv2, nn.Tanh(), nn.Flatten(), fc1, nn.Tanh(), fc2
        self.cnn = nn.Sequential(*layers)

    def forward(self, images):
        return self.cnn(images)

    def train_dataloader(self):
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        if self.args.batch_size % ranks:
            text = f"--batch-size must be a multiple of {ranks}, the number of ranks."
            raise UserError(text, already_reported=rank > 0)
        sampler = DistributedSampler(self.train_set, ranks, rank, seed=self.args.seed)
        return DataLoader(self.train_set, self.args.batch_size // ranks, sampler=sampler)

    def training_step(self, batch, batch_idx):
        """This rank's share of the mean over the images of all ranks."""
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        (images, labels), total, size = batch, len(self.train_set), self.args.batch_size
        losses = F.cross_entropy(self(images), labels, reduction="none")
        # The sampler repeats images until all ranks have equally many. Repeats get weight 0.
        row = batch_idx * (size // ranks) + torch.arange(len(losses))
        loss = (losses * (row * ranks + rank < total).to(losses.device)).sum()
        how = {"on_step": False, "on_epoch": True, "reduce_fx": "sum", "sync_dist": True}
        self.log("loss", loss / total, **how)
        # The average over the ranks is then the mean over the images of all ranks.
        return loss * ranks / min(size, total - batch_idx * size)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        # At an epoch's end async goes on averaging while ranks wait: these are a step's.
        self.weights = nn.utils.parameters_to_vector(self.parameters()).detach()

    def on_train_epoch_end(self):
        # The consensus distance: the farthest rank's distance from the mean of all ranks.
        every = self.trainer.strategy.all_gather(self.weights)
        mean = every.mean(0)
        apart = ((every - mean).norm(dim=1).max() / mean.norm()).item()
        self.log("accuracy", found := accuracy(self, self.test_set))
        self.log("apart", apart)
        if self.trainer.is_global_zero:
            loss = self.trainer.callback_metrics["loss"]
            line = f"epoch {self.current_epoch + 1}: loss {loss:.4f}, accuracy {found:.4f}"
            print(f"{line}, ranks apart {apart:.2%} of the weights' norm")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.args.lr, momentum=0.9)


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


def make_strategy(args):
    """The strategy with this name; async averages every --interval ms."""
    if args.strategy == "bagua:async":
        return BaguaStrategy("async", sync_interval_ms=args.interval)
    return args.strategy


def fit(args, *callbacks):
    """Train on all ranks. Returns the Trainer and the model."""
    train, test = read_digits(args.data)
    torch.manual_seed(args.seed)
    model = LitCNN(train, test, args)
    trainer = L.Trainer(
        strategy=make_strategy(args),
        devices=args.devices,
        max_epochs=args.epochs,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return trainer, model


# Evaluate


@torch.no_grad()
def accuracy(model, test):
    """The share of the test images that the model names correctly."""
    images, labels = test.tensors
    return (model(images.to(model.device)).argmax(1).cpu() == labels).double().mean().item()


def parse(arguments=None):
    parser = argparse.ArgumentParser(description="Train a CNN with ranks that are apart.")
    parser.add_argument("--strategy", default="bagua:decentralized")
    parser.add_argument("--devices", default="auto", help="GPUs, or processes on the CPU")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, in all")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--interval", type=float, default=10, help="async: ms (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PTL_Decentralized"))
    args = parser.parse_args(arguments)
    if min(args.epochs, args.batch_size) < 1:
        parser.error("--epochs and --batch-size are from 1 up")
    return args


def main(args):
    try:
        read_digits(args.data)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, KeyError, ValueError) as error:
        raise SystemExit(error) from None
    trainer, model = fit(args)
    if trainer.is_global_zero:
        torch.save(model.cpu().state_dict(), args.out / "model.pt")
        found = {name: value.item() for name, value in trainer.callback_metrics.items()}
        (args.out / "metrics.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(parse())
