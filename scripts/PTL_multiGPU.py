# %% [markdown]
# # 09 · The Lightning-style wrapper
# **The question.** Lesson 05 works, but half of it is about GPUs and ranks, and I would write that half again for each model.
# Can somebody else keep it? And is what comes out the same?
#
# **Predict first.** (1) How many of lesson 05's lines are left? (2) Your loader has batches of 64, and you write
# `Trainer(devices=2)`: how many images does a step of the optimizer see? (3) Two ranks make their weights with different
# seeds: what happens? (4) `self.log("loss", loss)` on two ranks: whose loss is it?

# %%
import argparse
import os
import sys
import time
import warnings

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

import multigpu.trainer as L  # `import lightning as L` runs the module and the data module, too
from multigpu import data, devices, files, flags, launch, metrics, proof
from multigpu.models import CNN

# %% [markdown]
# ## Step 0 · The flags
# Nodes, devices, strategy and precision are the Trainer's business; the flags only hand them on.


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser("PTL_multiGPU", "Train a CNN with a Trainer: it places, shares, synchronises and saves.")
    parser.add_argument("--accelerator", choices=("auto", "cpu", "gpu", "vgpu"), default="auto")
    parser.add_argument("--devices", default="auto", help="a node's devices: a number, -1 for all, or 1,3 for these")
    parser.add_argument("--nodes", type=flags.positive, default=1, help="as many as the launcher starts ranks on")
    parser.add_argument("--strategy", choices=("auto", "ddp"), default="auto", help="lesson 10 has more")
    parser.add_argument("--precision", choices=("32", "bf16", "16", "64"), default="32", help="lesson 11 explains them")
    parser.add_argument("--resume", nargs="?", const="", metavar="FILE", help="go on from FILE, or OUT/last.ckpt if any")
    args = parser.parse_args(arguments)
    if args.prove and args.precision != "32":
        parser.error(f"--prove compares runs in 32 bit, --precision {args.precision} is another: leave one of them out")
    return args


# %% [markdown]
# ## Step 1 · The module: what is yours
# The model, the loss, the optimizer. No device, no rank, no loop. One thing of lesson 05 stays, for nobody else can know it:
# DDP averages over *ranks*, we want the mean over *images*, and the sampler repeats some in the last batch.


# %%
class LitCNN(L.LightningModule):
    def __init__(self, lr: float, seed: int, sizes: tuple | None = None):
        super().__init__()
        self.save_hyperparameters()  # in each checkpoint, so that load_from_checkpoint needs no arguments
        self.net = CNN(*sizes) if sizes else None

    def configure_model(self) -> None:  # on every rank, once the data is there
        if self.net is None:
            self.hparams.sizes = self.trainer.datamodule.sizes
            torch.manual_seed(self.hparams.seed)
            self.net = CNN(*self.hparams.sizes)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        ranks, images = self.trainer.world_size, len(self.trainer.datamodule.train)
        share = self.trainer.datamodule.share
        before = batch_idx * share * ranks  # images in the batches before this one, over all ranks
        in_batch = min(share * ranks, images - before)
        own = len(range(self.trainer.global_rank, in_batch, ranks))  # what the sampler has repeated comes after these
        loss = F.cross_entropy(self.net(batch[0][:own]), batch[1][:own], reduction="sum")
        self.log("loss", loss.double() / images, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss * ranks / in_batch

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        hits = (self.net(batch[0]).argmax(1) == batch[1]).sum()
        self.log("test_accuracy", hits / len(self.trainer.datamodule.test), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)


# %% [markdown]
# ## Step 2 · The data module
# `prepare_data` runs once a node and may download, `setup` on every rank. The Trainer would put a `DistributedSampler` in the
# place of `shuffle=True` by itself. We give our own, which it leaves alone: then one device has the same order, too, and the
# batch that you state stays the **global** one.


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
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(self.train, ranks, rank, shuffle=True, seed=self.seed)
        return DataLoader(self.train, self.share, sampler=sampler, pin_memory=torch.cuda.is_available())

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=256)


# %% [markdown]
# ## Step 3 · A callback
# What belongs to the run and not to the model. It hooks into moments of the run, and a checkpoint keeps its state.


# %%
class Table(L.Callback):
    """Prints and keeps a row an epoch, as every lesson does."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.rows, self.began = args, [], 0.0

    def state_dict(self) -> dict:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict) -> None:
        self.rows = state["rows"]

    def on_fit_start(self, trainer: L.Trainer, module: LitCNN) -> None:
        world, digits = trainer.strategy.world, trainer.datamodule
        trainer.print(devices.describe(world, trainer.strategy.device))
        trainer.print(f"global batch {digits.batch_size} = {world.size} (ranks) × {digits.share} (images)\n")
        at = {"epoch": trainer.current_epoch, "step": 0, "history": self.rows}
        trainer.print(metrics.opening(at, self.args, self.args.loaded, world), flush=True)

    def on_train_epoch_start(self, trainer: L.Trainer, module: LitCNN) -> None:
        self.began = time.perf_counter()

    def on_validation_start(self, trainer: L.Trainer, module: LitCNN) -> None:
        self.seconds = time.perf_counter() - self.began

    def on_train_epoch_end(self, trainer: L.Trainer, module: LitCNN) -> None:
        told = {name: float(trainer.callback_metrics[name]) for name in ("loss", "test_accuracy")}
        metrics.finite(told["loss"], trainer.current_epoch, trainer.strategy.world)
        speed = len(trainer.datamodule.train) / self.seconds
        self.rows.append({"epoch": trainer.current_epoch + 1, **told, "images_per_s": speed})
        trainer.print(metrics.row(self.rows[-1]), flush=True)


# %% [markdown]
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    if os.environ.get("RANK", "0") == "0":
        files.writable_folder(args.out)
    own = args.out / "last.ckpt"
    args.loaded = args.resume or (own if args.resume == "" and own.exists() else None)
    warnings.filterwarnings("ignore", "Checkpoint directory")  # that there are files in it already is what --resume is for
    if args.prove:
        devices.compute_exactly()
    digits, model, table = DigitsData(args.data, args.batch_size, args.seed), LitCNN(args.lr, args.seed), Table(args)
    last = L.callbacks.ModelCheckpoint(args.out, "last", enable_version_counter=False)  # after each epoch, the same file
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=args.strategy,
        precision=args.precision,
        max_epochs=args.epochs,
        callbacks=[table, last],
        default_root_dir=args.out,
        enable_progress_bar=sys.stdout.isatty(),
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=digits, ckpt_path=args.loaded)

    if trainer.is_global_zero:
        args.batch_size, verdict = digits.batch_size, None
        if args.prove:
            torch.manual_seed(args.seed)
            fresh = CNN(*digits.sizes)
            what = f"the Trainer's {trainer.strategy.name} with world size {trainer.world_size} equals one process"
            verdict = proof.against_serial(what, model.net, fresh.to(model.device), digits.train, args)
        world = trainer.strategy.world
        metrics.report(args.out, world, trainer.strategy.device, table.rows, verdict, batch_size=args.batch_size)


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())
