"""Train the digits' CNN with one strategy after another; only the strategy differs."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from multigpu import data, devices, flags, launch, vgpu
from multigpu.comparison.names import devices_of, strategy_for_short_run
from multigpu.comparison.record import Record
from multigpu.models import CNN
from multigpu.strategies import QAdamOptimizer
from multigpu.strategies.costs import ONE_PROCESS
from multigpu.trainer import LightningModule, Trainer

QADAM_WARMUP = 10  # steps


class Digits(LightningModule):
    """The CNN in two stages, with a loss that is right for each strategy.

    `training_step` may get a shard of a rank's batch, as in dp. `training_step_end` gets the
    outputs of all shards in this process, joined, so the loss is computed there. An image that
    the sampler repeats has weight 0.
    """

    def __init__(
        self,
        name: str,
        train: TensorDataset,
        cnn: CNN,
        args: argparse.Namespace,
        batch: data.Batch,
    ):
        super().__init__()
        self.name = name
        self.train_set = train
        self.args = args
        self.batch = batch
        first = nn.Sequential(cnn.conv1, nn.Tanh(), cnn.conv2, nn.Tanh(), nn.Flatten())
        second = nn.Sequential(cnn.fc1, nn.Tanh(), cnn.fc2)
        self.halves = nn.ModuleList([first, second])

    def pipeline_stages(self) -> list[nn.Module]:
        return list(self.halves)

    def train_dataloader(self) -> DataLoader:
        # dp has one shard, and splits each batch itself.
        num_shards, self.shard = self.trainer.strategy.shard
        self.batch = flags.split_batch(self.batch.global_size, num_shards)
        sampler = DistributedSampler(
            self.train_set, num_shards, self.shard, seed=self.args.seed
        )
        return DataLoader(self.train_set, self.batch.per_micro_batch, sampler=sampler)

    def on_train_batch_start(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.batch_idx = batch_idx

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        logits = self.halves[1](self.halves[0](images))
        return F.cross_entropy(logits, labels.to(logits.device), reduction="none")

    def training_step_end(self, losses: torch.Tensor) -> torch.Tensor:
        images = len(self.train_set)
        real = data.real_rows(
            images, self.batch, self.shard, self.batch_idx, len(losses), losses.device
        )
        own = int(real.sum())
        total = (losses * real).sum()
        mean = total / max(1, own)
        self.log("loss", mean, on_step=False, on_epoch=True, batch_size=own)
        return total * self.batch.ranks / self.batch.images_in_step(self.batch_idx, images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.name == "bagua:qadam":
            return QAdamOptimizer(self.parameters(), self.args.lr / 50, QADAM_WARMUP)
        lr = self.args.lr
        if self.name == "horovod":
            lr /= self.trainer.world_size  # the strategy multiplies it by the world size
        return torch.optim.SGD(self.parameters(), lr, momentum=0.9)


def new_model(train: TensorDataset, test: TensorDataset, args: argparse.Namespace) -> CNN:
    """The CNN with `args.hidden` units and the weights of `args.seed`."""
    torch.manual_seed(args.seed)
    return CNN(tuple(train[0][0].shape), data.num_classes(train, test), args.hidden)


def train(
    names: list[str], args: argparse.Namespace, batch: data.Batch
) -> dict[str, list[dict]]:
    """Train with one strategy after the other, and return what their ranks recorded."""
    records = {}
    for name in names:
        devices_of_rank = devices_of(name, batch.ranks)
        if name == "ddp2" and launch.find_world().launcher == "--spawn":
            # Each rank stands for a node. On one machine each has GPUs of its own: NCCL
            # refuses two ranks on one GPU.
            first = 2 * launch.find_world().rank
            if torch.cuda.device_count() >= 2 * batch.ranks:
                devices_of_rank = [first, first + 1]
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        if args.prove:
            devices.compute_exactly()
        train_set, test_set = data.load(data.fetch(args.data))
        cnn = new_model(train_set, test_set, args)

        record = Record()
        trainer = Trainer(
            strategy=strategy_for_short_run(name),
            devices=devices_of_rank,
            max_epochs=args.epochs,
            callbacks=[record],
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        started_here = not vgpu.devices()
        trainer.fit(Digits(name, train_set, cnn, args, batch))
        records[name] = record.ranks
        if name in ONE_PROCESS and started_here:
            vgpu.stop()
    return records
