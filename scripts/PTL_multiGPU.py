# %% [markdown]
# # 09 · The Lightning-style wrapper
# **The question.** Lesson 05 works, but half of its code is about GPUs and ranks, and the next
# model would need that half again. Can a library own that code and give the same result?
#
# **Predict first.** (1) How much of lesson 05's code is left? (2) Your loader has batches of
# 64, and you write `Trainer(devices=2)`: how many images does a step see? (3)
# `self.log("loss", loss)` on two ranks: whose loss is logged? (4) Each rank makes its weights
# with another seed: what happens?

# %%
import argparse
import os
import sys
import warnings

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

# With `import lightning as L`, the two classes below do the same.
import multigpu.trainer as L
from multigpu import data, devices, files, flags, launch, metrics, proof
from multigpu.errors import pluralize
from multigpu.models import CNN
from multigpu.trainer.callbacks.table import Table

# %% [markdown]
# What lesson 05 has and this lesson does not have, counted in the two scripts: prediction (1).

# %% tags=["active-ipynb"]
# !python ../lessons/09-lightning/what_moved.py

# %% [markdown]
# ## Step 0 · The flags
# Most of them go to the Trainer and say where to compute.


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PTL_multiGPU",
        "Train a CNN with a Trainer: it places, shards, synchronizes and saves.",
    )
    parser.add_argument(
        "--accelerator",
        choices=("auto", "cpu", "gpu", "vgpu"),
        default="auto",
    )
    parser.add_argument(
        "--devices",
        default="auto",
        help="of a node: a number, -1 for all, or 1,3 for these two",
    )
    parser.add_argument(
        "--nodes",
        type=flags.positive,
        default=1,
        help="nodes on which a launcher starts the script",
    )
    parser.add_argument(
        "--strategy",
        choices=("auto", "ddp"),
        default="auto",
        help="lesson 10 has the others",
    )
    parser.add_argument(
        "--precision",
        choices=("32", "bf16", "16", "64"),
        default="32",
        help="lesson 11 explains them",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FILE",
        help="continue from FILE, or from OUT/last.ckpt if there is one",
    )
    args = parser.parse_args(arguments)
    if args.prove and args.precision != "32":
        parser.error(
            "--prove compares runs in 32 bit, --precision asks for another: "
            "leave one of them out"
        )
    return args


# %% [markdown]
# ## Step 1 · The module: what only you know
# The model, the loss, the optimizer. No device, no loop. One thing of lesson 05 stays: DDP
# averages over *ranks*, we want the mean over *images*, and in the last batch the sampler
# repeats some images.


# %%
class LitCNN(L.LightningModule):
    def __init__(self, lr: float, seed: int, sizes: tuple | None = None):
        super().__init__()
        # Written into each checkpoint, from which load_from_checkpoint makes the module again.
        self.save_hyperparameters()
        self.net = CNN(*sizes) if sizes else None

    def configure_model(self) -> None:
        """Make the model on every rank, when the data's sizes are known."""
        if self.net is None:
            self.hparams.sizes = self.trainer.datamodule.sizes
            torch.manual_seed(self.hparams.seed)
            self.net = CNN(*self.hparams.sizes)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        digits = self.trainer.datamodule
        total = len(digits.train)
        ranks = self.trainer.world_size
        rank = self.trainer.global_rank

        # The images that the sampler repeats are the last rows of a batch.
        real = data.real_rows(total, digits.batch, rank, batch_idx, len(labels))
        own = int(real.sum())
        logits = self.net(images[:own])
        loss = F.cross_entropy(logits, labels[:own], reduction="sum")

        how = {"on_step": False, "on_epoch": True, "reduce_fx": "sum", "sync_dist": True}
        self.log("loss", loss / total, **how)
        return loss * ranks / digits.batch.images_in_step(batch_idx, total)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        hits = (self.net(images).argmax(1) == labels).sum()
        accuracy = hits / len(self.trainer.datamodule.test)
        self.log("test_accuracy", accuracy, reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)


# %% [markdown]
# ## Step 2 · The data module
# `prepare_data` runs once a node, `setup` on every rank. The Trainer would replace
# `shuffle=True` with a `DistributedSampler` where there are several ranks. A sampler of your
# own it keeps: so one device reads the same order, and `batch_size` is the global one.


# %%
class DigitsData(L.LightningDataModule):
    def __init__(self, source: str | None, batch_size: int | None, seed: int):
        super().__init__()
        self.source = source
        self.batch_size = batch_size
        self.seed = seed

    def prepare_data(self) -> None:
        data.fetch(self.source)

    def setup(self, stage: str) -> None:
        self.train, self.test = data.load(data.fetch(self.source))
        image_shape = tuple(self.train[0][0].shape)
        self.sizes = (image_shape, data.num_classes(self.train, self.test))

        self.batch = flags.split_batch(self.batch_size, self.trainer.world_size)
        self.batch_size = self.batch.global_size
        self.images_per_rank = self.batch.per_micro_batch

    def train_dataloader(self) -> DataLoader:
        ranks = self.trainer.world_size
        rank = self.trainer.global_rank
        sampler = DistributedSampler(self.train, ranks, rank, seed=self.seed)
        return DataLoader(self.train, self.images_per_rank, sampler=sampler)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=256)


# %% [markdown]
# ## Step 3 · The Trainer, by hand
# The smallest one that could work: lesson 01's loop, which calls what you wrote.

# %% tags=["active-ipynb"]
# class SmallTrainer:
#     world_size = 1
#     global_rank = 0
#
#     def fit(self, module, datamodule, epochs):
#         module.trainer = self
#         datamodule.trainer = self
#         self.datamodule = datamodule
#         module.log = lambda *arguments, **keywords: None
#
#         datamodule.prepare_data()
#         datamodule.setup("fit")
#         module.configure_model()
#         optimizer = module.configure_optimizers()
#         loader = datamodule.train_dataloader()
#         for epoch in range(epochs):
#             loader.sampler.set_epoch(epoch)
#             for index, batch in enumerate(loader):
#                 module.training_step(batch, index).backward()
#                 optimizer.step()
#                 optimizer.zero_grad()

# %% tags=["active-ipynb"]
# OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
#
#
# def fit(module, digits, max_epochs=2, **more):
#     """Train with the real Trainer, which here prints and writes nothing."""
#     settings = dict.fromkeys(OFF, False) | more
#     trainer = L.Trainer(max_epochs=max_epochs, **settings)
#     trainer.fit(module, datamodule=digits)
#     return trainer
#
#
# by_hand = LitCNN(0.05, seed=0)
# SmallTrainer().fit(by_hand, DigitsData(None, 64, seed=0), epochs=2)
# real = LitCNN(0.05, seed=0)
# fit(real, DigitsData(None, 64, seed=0))
# apart = proof.difference(by_hand.net, real.net)
# print(f"two epochs by hand and by the Trainer: {apart} apart")

# %% [markdown]
# The real one calls more: a callback can act at each of these moments.

# %% tags=["active-ipynb"]
# import textwrap
#
# order = []
# spy = L.Callback()
# for name in dir(L.Callback):
#     if name.startswith("on_"):
#         setattr(spy, name, lambda *_, name=name: order.append(name))
#
# short = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1}
# fit(LitCNN(0.05, seed=0), DigitsData(None, 64, seed=0), callbacks=[spy], **short)
# print(textwrap.fill(" → ".join(order), 95))

# %% [markdown]
# One step on two virtual GPUs, which are idle most of the time: so small a net computes for
# less time than its kernels take to launch (lesson 01).

# %% tags=["active-ipynb"]
# from multigpu import plots, vgpu
#
#
# def one_step():
#     """The timeline of this rank's last step."""
#     ends = []
#     steps = []
#     clock = L.Callback()
#     clock.on_train_batch_end = lambda *_: ends.append(vgpu.elapsed())
#     clock.on_train_end = lambda *_: steps.append(vgpu.timeline(since=ends[-2]))
#     short = {"max_steps": 3, "limit_val_batches": 0}
#     where = {"accelerator": "vgpu", "strategy": "ddp"}
#     digits = DigitsData(None, 256, seed=0)
#     fit(LitCNN(0.05, seed=0), digits, callbacks=[clock], **short, **where)
#     return steps[0]
#
#
# title = "Forward is yours; the Trainer does the rest, as lesson 05 did"
# vgpu.Timeline.of_ranks(launch.call(one_step, 2)).plot(title=title)

# %% [markdown]
# ## Step 4 · The surprise: nothing was changed, and it is another run
# A module and a loader as people usually write them. In addition, each rank takes other
# weights: predictions (2), (3) and (4).

# %% tags=["active-ipynb"]
# class Usual(LitCNN):
#     def configure_model(self):
#         self.hparams.seed = self.global_rank
#         super().configure_model()
#
#     def training_step(self, batch, batch_idx):
#         loss = F.cross_entropy(self.net(batch[0]), batch[1])
#         self.log("own", loss)
#         self.log("mean", loss, sync_dist=True)
#         return loss
#
#
# class UsualData(DigitsData):
#     def train_dataloader(self):
#         return DataLoader(self.train, batch_size=64, shuffle=True)

# %% tags=["active-ipynb"]
# def on_a_rank():
#     module = Usual(0.05, seed=0)
#     digits = UsualData(None, 64, seed=0)
#     trainer = fit(module, digits, strategy="ddp", log_every_n_steps=1)
#     logged = [f"{name} {trainer.callback_metrics[name]:.2f}" for name in ("own", "mean")]
#     text = f"{trainer.global_step} steps, the last one's loss: {', '.join(logged)}"
#     return text, module.net
#
#
# (rank_0, net_0), (rank_1, net_1) = launch.call(on_a_rank, 2)
# print(f"one device: 46 steps\nrank 0: {rank_0}\nrank 1: {rank_1}")
# between_ranks = proof.difference(net_0, net_1)
# from_one_device = proof.difference(net_0, real.net)
# print(f"weights: {between_ranks} apart, and {from_one_device:.1f} from one device's")

# %% [markdown]
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    if launch.find_world().rank == 0:
        files.writable_folder(args.out)
    if args.prove:
        devices.compute_exactly()

    last = args.out / "last.ckpt"
    resumed_from = args.resume or None
    if args.resume == "" and last.exists():
        resumed_from = last
    # These warnings say that the folder holds an earlier run's checkpoint: --resume needs it.
    warnings.filterwarnings("ignore", "Checkpoint directory|the checkpoints' folder")

    digits = DigitsData(args.data, args.batch_size, args.seed)
    model = LitCNN(args.lr, args.seed)
    table = Table(args, resumed_from)  # a callback: prints a row after each epoch
    checkpoints = L.pytorch.callbacks.ModelCheckpoint(
        args.out, "last", enable_version_counter=False
    )
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=args.strategy,
        precision=args.precision,
        max_epochs=args.epochs,
        default_root_dir=args.out,
        callbacks=[table, checkpoints],
        enable_progress_bar=sys.stdout.isatty() and "JPY_PARENT_PID" not in os.environ,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=digits, ckpt_path=resumed_from)
    if not trainer.is_global_zero:
        return

    world = trainer.strategy.world
    verdict = None
    if args.prove:
        torch.manual_seed(args.seed)
        fresh = CNN(*digits.sizes).to(model.device)
        verdict = proof.compare_with_serial(
            f"the Trainer on {pluralize(world.size, 'rank')} equals one process",
            model.net,
            fresh,
            digits.train,
            args,
            batch_size=digits.batch.global_size,
            epochs=len(table.rows),
        )
    metrics.report(
        args.out,
        world,
        model.device,
        table.rows,
        verdict,
        batch_size=digits.batch.global_size,
    )


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# With `--devices 2` the Trainer starts the script again for the second rank; torchrun and srun
# work as before. A script that is started again prints again: here only rank 0 prints, by
# `trainer.print`. The variables that each rank finds:

# %% tags=["active-ipynb"]
# !python ../lessons/09-lightning/variables.py 2>/dev/null | sort

# %% tags=["active-ipynb"]
# script = "../scripts/PTL_multiGPU.py --prove"
# torchrun = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
# resume = "--epochs 12 --resume results/09/last.ckpt --out results/09-resumed"
# !rm -rf results/09; OMP_NUM_THREADS=1 python {script} --devices 2 --out results/09
# !OMP_NUM_THREADS=1 {torchrun} {script} {resume}

# %% [markdown]
# What `self.log` has written for TensorBoard (`tensorboard --logdir results/09`), read by
# TensorBoard's own reader:

# %% tags=["active-ipynb"]
# # Without this line TensorBoard imports TensorFlow, only to open a file.
# sys.modules["tensorboard.compat.notf"] = sys
# from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
#
# log = EventAccumulator("results/09/lightning_logs/version_0").Reload()
# curves = {}
# for name in ("loss", "test_accuracy"):
#     curves[name] = [event.value for event in log.Scalars(name)]
# title = "What self.log kept: a number an epoch, over both ranks"
# plots.by_epoch(range(1, 11), curves, title)

# %% [markdown]
# One import changed, and the real Lightning runs the same classes:

# %% tags=["active-ipynb"]
# !python ../lessons/09-lightning/in_lightning.py results/09/last.ckpt
# print(metrics.route_row("09 Lightning-style Trainer", "results/09"))

# %% [markdown] tags=["footer"]
# [← 08 TensorFlow on several nodes](TF_CNN_MultiNode.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/09-lightning/README.md) ·
# [10 Exact strategies →](PTL_Strategies.ipynb)
