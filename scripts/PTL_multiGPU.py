# %% [markdown]
# # 09 · The Lightning-style wrapper
# **The question.** Lesson 05 works, but half of it is about GPUs and ranks, and the next model would need that half
# again. Can somebody else keep it? And does the same come out?
#
# **Predict first.** (1) What is left of lesson 05's code? (2) Your loader has batches of 64, and you write
# `Trainer(devices=2)`: how many images does a step see? (3) `self.log("loss", loss)` on two ranks: whose loss is it?
# (4) Each rank makes its weights with another seed: what happens?

# %%
import argparse
import os
import sys
import warnings

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

import multigpu.trainer as L  # with `import lightning as L`, the two classes below do the same
from multigpu import data, devices, files, flags, launch, metrics, proof
from multigpu.models import CNN
from multigpu.trainer.callbacks.table import Table

# %% [markdown]
# What lesson 05 has and this one has not, counted in the two scripts: prediction (1).

# %% tags=["active-ipynb"]
# !python ../lessons/09-lightning/what_moved.py

# %% [markdown]
# ## Step 0 · The flags, which hand on to the Trainer where to compute


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PTL_multiGPU",
        "Train a CNN with a Trainer: it places, shares, synchronises and saves.",
    )
    parser.add_argument(
        "--accelerator", choices=("auto", "cpu", "gpu", "vgpu"), default="auto"
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
        help="on how many a launcher starts the script",
    )
    parser.add_argument(
        "--strategy", choices=("auto", "ddp"), default="auto", help="lesson 10 has the others"
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
        help="go on from FILE, or OUT/last.ckpt",
    )
    args = parser.parse_args(arguments)
    if args.prove and args.precision != "32":
        parser.error(
            "--prove compares runs in 32 bit, --precision asks for another: leave one of them out"
        )
    return args


# %% [markdown]
# ## Step 1 · The module: what only you know
# The model, the loss, the optimizer. No device, no loop. One thing of lesson 05 stays: DDP averages over *ranks*, we
# want the mean over *images*, and in the last batch the sampler repeats some.


# %%
class LitCNN(L.LightningModule):
    def __init__(self, lr: float, seed: int, sizes: tuple | None = None):
        super().__init__()
        self.save_hyperparameters()  # into each checkpoint: load_from_checkpoint makes the module by them
        self.net = CNN(*sizes) if sizes else None

    def configure_model(self) -> None:  # on every rank, once the data is there
        if self.net is None:
            self.hparams.sizes = self.trainer.datamodule.sizes
            torch.manual_seed(self.hparams.seed)
            self.net = CNN(*self.hparams.sizes)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        ranks, digits = self.trainer.world_size, self.trainer.datamodule
        in_batch = min(
            digits.batch_size, len(digits.train) - batch_idx * digits.batch_size
        )  # over all ranks
        own = len(
            range(self.trainer.global_rank, in_batch, ranks)
        )  # behind these come the repeated ones
        loss = F.cross_entropy(self.net(batch[0][:own]), batch[1][:own], reduction="sum")
        self.log(
            "loss",
            loss / len(digits.train),
            on_step=False,
            on_epoch=True,
            reduce_fx="sum",
            sync_dist=True,
        )
        return loss * ranks / in_batch

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        hits = (self.net(batch[0]).argmax(1) == batch[1]).sum()
        self.log(
            "test_accuracy",
            hits / len(self.trainer.datamodule.test),
            reduce_fx="sum",
            sync_dist=True,
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)


# %% [markdown]
# ## Step 2 · The data module
# `prepare_data` runs once a node, `setup` on every rank. In the place of `shuffle=True` the Trainer would put a
# `DistributedSampler`; ours it leaves alone. So one device has the same order, and the stated batch is the global one.


# %%
class DigitsData(L.LightningDataModule):
    def __init__(self, source: str | None, batch_size: int | None, seed: int):
        super().__init__()
        self.source, self.batch_size, self.seed = source, batch_size, seed

    def prepare_data(self) -> None:
        data.fetch(self.source)

    def setup(self, stage: str) -> None:
        self.train, self.test = data.load(data.fetch(self.source))
        self.sizes = (tuple(self.train[0][0].shape), data.classes(self.train, self.test))
        self.batch_size, self.share = flags.split(self.batch_size, self.trainer.world_size)

    def train_dataloader(self) -> DataLoader:
        place = self.trainer.world_size, self.trainer.global_rank
        return DataLoader(
            self.train,
            self.share,
            sampler=DistributedSampler(self.train, *place, seed=self.seed),
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=256)


# %% [markdown]
# ## Step 3 · The Trainer, by hand
# The smallest one that could work: lesson 01's loop, and it calls what you wrote.

# %% tags=["active-ipynb"]
# class SmallTrainer:
#     world_size, global_rank = 1, 0
#     def fit(self, module, datamodule, epochs):
#         module.trainer = datamodule.trainer = self
#         self.datamodule, module.log = datamodule, lambda *_, **__: None
#         datamodule.prepare_data()
#         datamodule.setup("fit")
#         module.configure_model()
#         optimizer, loader = module.configure_optimizers(), datamodule.train_dataloader()
#         for epoch in range(epochs):
#             loader.sampler.set_epoch(epoch)
#             for index, batch in enumerate(loader):
#                 module.training_step(batch, index).backward()
#                 optimizer.step()
#                 optimizer.zero_grad()
# def fit(module, digits, **more):  # the real one, without its files and its talk
#     quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
#     trainer = L.Trainer(**quiet | {"max_epochs": 2} | more)
#     trainer.fit(module, datamodule=digits)
#     return trainer
# mine, real = LitCNN(0.05, seed=0), LitCNN(0.05, seed=0)
# SmallTrainer().fit(mine, DigitsData(None, 64, seed=0), epochs=2)
# fit(real, DigitsData(None, 64, seed=0))
# print(f"two epochs by hand and by the Trainer: {proof.difference(mine.net, real.net)} apart")

# %% tags=["active-ipynb"]
# import textwrap  # what the real one calls, and when: a callback can stand at each of these moments
# order, Spy = [], type("Spy", (L.Callback,), {})
# for name in filter(lambda name: name.startswith("on_"), dir(L.Callback)):
#     setattr(Spy, name, lambda *_, name=name: order.append(name))
# fit(real, DigitsData(None, 64, 0), callbacks=[Spy()], max_epochs=1, limit_train_batches=1, limit_val_batches=1)
# print(textwrap.fill(" → ".join(order), 110))

# %% [markdown]
# One step on two virtual GPUs, mostly idle: so small a net's sums take less time than their launches (lesson 01).

# %% tags=["active-ipynb"]
# from multigpu import plots, vgpu
# def one_step():
#     ends, step, clock = [], [], L.Callback()
#     clock.on_train_batch_end = lambda *_: ends.append(vgpu.elapsed())
#     clock.on_train_end = lambda *_: step.append(vgpu.timeline(since=ends[-2]))
#     more = {"accelerator": "vgpu", "strategy": "ddp", "max_steps": 3, "limit_val_batches": 0, "callbacks": [clock]}
#     fit(LitCNN(0.05, 0), DigitsData(None, 256, 0), **more)
#     return step[0]
# vgpu.Timeline.of_ranks(launch.call(one_step, 2)).plot(title="Forward is yours; the Trainer does the rest, as lesson 05 did")

# %% [markdown]
# ## Step 4 · The surprise: nothing was changed, and it is another run
# A module and a loader as everybody writes them. Each rank takes other weights, besides: predictions (2), (3) and (4).

# %% tags=["active-ipynb"]
# class Usual(LitCNN):
#     def configure_model(self):
#         self.hparams.seed = self.global_rank
#         super().configure_model()
#     def training_step(self, batch, batch_idx):
#         loss = F.cross_entropy(self.net(batch[0]), batch[1])
#         self.log("own", loss)
#         self.log("mean", loss, sync_dist=True)
#         return loss
# class UsualData(DigitsData):
#     def train_dataloader(self):
#         return DataLoader(self.train, batch_size=64, shuffle=True)
# def on_a_rank():
#     module = Usual(0.05, 0)
#     trainer = fit(module, UsualData(None, 64, 0), strategy="ddp", log_every_n_steps=1)
#     told = [f"{name} {trainer.callback_metrics[name]:.2f}" for name in ("own", "mean")]
#     return f"{trainer.global_step} steps, the last one's loss: {', '.join(told)}", module.net
#
# (first, net), (second, other) = launch.call(on_a_rank, 2)
# print(f"one device: 46 steps\nrank 0: {first}\nrank 1: {second}")
# print(f"weights: {proof.difference(net, other)} apart, and {proof.difference(net, real.net):.1f} from one device's")

# %% [markdown]
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    if launch.find().rank == 0:
        files.writable_folder(args.out)
    if args.prove:
        devices.compute_exactly()
    own = args.out / "last.ckpt"
    loaded = args.resume or (own if args.resume == "" and own.exists() else None)
    warnings.filterwarnings(
        "ignore", "Checkpoint directory|the checkpoints' folder"
    )  # --resume is meant
    digits, model = (
        DigitsData(args.data, args.batch_size, args.seed),
        LitCNN(args.lr, args.seed),
    )
    table = Table(args, loaded)  # a callback: a row an epoch
    trainer = L.Trainer(
        accelerator=args.accelerator, devices=args.devices, num_nodes=args.nodes, strategy=args.strategy,
        precision=args.precision, max_epochs=args.epochs, default_root_dir=args.out,
        callbacks=[table, L.pytorch.callbacks.ModelCheckpoint(args.out, "last", enable_version_counter=False)],
        enable_progress_bar=sys.stdout.isatty() and "JPY_PARENT_PID" not in os.environ, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, datamodule=digits, ckpt_path=loaded)
    if trainer.is_global_zero:
        args.batch_size, args.epochs, verdict, world = (
            digits.batch_size,
            len(table.rows),
            None,
            trainer.strategy.world,
        )
        if args.prove:
            torch.manual_seed(args.seed)
            fresh, what = (
                CNN(*digits.sizes).to(model.device),
                f"the Trainer with world size {world.size}",
            )
            verdict = proof.against_serial(
                f"{what} equals one process", model.net, fresh, digits.train, args
            )
        metrics.report(
            args.out, world, model.device, table.rows, verdict, batch_size=args.batch_size
        )


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# With `--devices 2` the Trainer starts the script again for the second rank; torchrun and srun work as ever. A script
# that is started again prints again: here only rank 0 speaks, by `trainer.print`. What each rank finds:

# %% tags=["active-ipynb"]
# !python ../lessons/09-lightning/variables.py 2>/dev/null | sort

# %% tags=["active-ipynb"]
# !rm -rf results/09; OMP_NUM_THREADS=1 python ../scripts/PTL_multiGPU.py --devices 2 --prove --out results/09
# torchrun = "OMP_NUM_THREADS=1 torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
# !{torchrun} ../scripts/PTL_multiGPU.py --prove --epochs 12 --resume results/09/last.ckpt --out results/09-resumed

# %% tags=["active-ipynb"]
# # what self.log has written for TensorBoard (tensorboard --logdir results/09), read by TensorBoard's own reader
# from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
# sys.modules["tensorboard.compat.notf"] = sys  # else TensorBoard imports TensorFlow, only to open a file
# told = EventAccumulator("results/09/lightning_logs/version_0").Reload()
# curves = {name: [event.value for event in told.Scalars(name)] for name in ("loss", "test_accuracy")}
# plots.by_epoch(range(1, 11), curves, "What self.log kept: a number an epoch, over both ranks")

# %% tags=["active-ipynb"]
# !python ../lessons/09-lightning/in_lightning.py results/09/last.ckpt  # one import changed: the real Lightning
# print(metrics.line("09 Lightning-style Trainer", "results/09"))
