"""Lesson 10: train a CNN with a strategy of the Trainer. Only the strategy's name differs.

    python scripts/PTL_Strategies.py --strategy ddp --devices 2
    torchrun --nproc-per-node=2 scripts/PTL_Strategies.py --strategy horovod
    multigpu virtual --gpus 2 scripts/PTL_Strategies.py --strategy dp --devices 2
    multigpu prove scripts/PTL_Strategies.py --strategy ddp --devices 2
    sbatch slurm/PTL_Strategies.slurm --strategy ddp

Strategies: dp, pipeline, ddp_spawn, ddp, horovod, bagua:gradient_allreduce, ddp2. The first
two and ddp2 use several GPUs in one process. To begin your own work, copy this file.
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
from multigpu.strategies import HorovodStrategy, PipelineStrategy

# Design the model


class LitCNN(L.LightningModule):
    """Lesson 01's CNN in two stages, with a loss that is right for each strategy."""

    def __init__(self, train, test, args):
        super().__init__()
        self.train_set, self.test_set, self.args = train, test, args
        conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2)
        self.first = nn.Sequential(conv1, nn.Tanh(), conv2, nn.Tanh(), nn.Flatten())
        self.second = nn.Sequential(nn.Linear(32 * 4 * 4, 64), nn.Tanh(), nn.Linear(64, 10))

    def pipeline_stages(self):
        """The part of each GPU, for the strategy pipeline."""
        return [self.first, self.second]

    def forward(self, images):
        return self.second(self.first(images))

    def train_dataloader(self):
        shards, shard = self.trainer.strategy.shard  # one shard for each process
        if self.args.batch_size % shards:
            text = f"--batch-size must be a multiple of {shards}, the number of ranks."
            raise UserError(text, already_reported=shard > 0)
        sampler = DistributedSampler(self.train_set, shards, shard, seed=self.args.seed)
        return DataLoader(self.train_set, self.args.batch_size // shards, sampler=sampler)

    def training_step(self, batch, batch_idx):
        """The loss of each image. In dp, ddp2 and pipeline it gets a part of the batch."""
        images, labels = batch
        logits = self(images)
        return F.cross_entropy(logits, labels.to(logits.device), reduction="none")

    def training_step_end(self, losses):
        """This process's share of the mean over all images, from the losses of its images."""
        shards, shard = self.trainer.strategy.shard
        index, total = self.trainer.fit_loop.batch_idx, len(self.train_set)
        # The sampler repeats images until all ranks have equally many. Repeats get weight 0.
        row = index * (self.args.batch_size // shards) + torch.arange(len(losses))
        loss = (losses * (row * shards + shard < total).to(losses.device)).sum()
        how = {"on_step": False, "on_epoch": True, "reduce_fx": "sum", "sync_dist": True}
        self.log("loss", loss / total, **how)
        return loss * shards / min(self.args.batch_size, total - index * self.args.batch_size)

    def on_train_epoch_end(self):
        self.log("accuracy", found := accuracy(self, self.test_set))
        if self.trainer.is_global_zero:
            loss = self.trainer.callback_metrics["loss"]
            print(f"epoch {self.current_epoch + 1}: loss {loss:.4f}, accuracy {found:.4f}")

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
    """What the Trainer gets: the name, or an object if the strategy needs an option."""
    if args.strategy == "pipeline":
        return PipelineStrategy(micro_batches=2)
    if args.strategy == "horovod":
        return HorovodStrategy(scale_learning_rate=args.scale_lr)
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
    parser = argparse.ArgumentParser(description="Train a CNN with a strategy of the Trainer.")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--devices", default="auto", help="GPUs, or processes on the CPU")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step, in all")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--scale-lr", action="store_true", help="horovod: --lr × ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", help="an .npz file (default: the digits)")
    parser.add_argument("--out", type=Path, default=Path("results/PTL_Strategies"))
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
