# %% [markdown]
# # 09 · The Lightning-style wrapper
# **The question.** Part of lesson 05's program is about GPUs and ranks, and the next model
# would need that part again. Can a library own that code, and does the model learn the same?
#
# The library here is this course's own: `multigpu.trainer`, with the names and arguments of
# [Lightning](https://lightning.ai/docs/pytorch/stable/). You need lesson 05, and no GPU: the
# [ranks](../lessons/README.md#rank), the processes of the run, compute on the CPU.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# import textwrap
#
# import torch.distributed as dist
#
# from multigpu import lesson, plots
#
# lesson.setup("09-lightning", ranks=True)
# from experiments import compare, show, step_times
# from what_moved import CALLBACK, bars, statements, statements_in
#
# train, _ = data.load(data.fetch(None))
# QUIET = {
#     "accelerator": "cpu",
#     "logger": False,
#     "enable_checkpointing": False,
#     "enable_progress_bar": False,
#     "enable_model_summary": False,
# }

# %% [markdown]
# ## A Trainer in 30 lines
# You write a *module*: the model, with two more methods. `training_step` computes the loss of
# a batch, and `configure_optimizers` makes the optimizer. It knows no device, no rank and no
# loop.

# %% tags=["active-ipynb"]
# class Usual(L.LightningModule):
#     """The course's CNN, as people usually write it."""
#
#     def __init__(self, seed=0):
#         super().__init__()
#         torch.manual_seed(seed)
#         self.net = CNN()
#
#     def training_step(self, batch, batch_idx):
#         images, labels = batch
#         return F.cross_entropy(self.net(images), labels)
#
#     def configure_optimizers(self):
#         return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
#
#
# def usual_loader():
#     """1,437 images in batches of 64: 23 batches. The order is the same in each run."""
#     order = torch.Generator().manual_seed(0)
#     return DataLoader(train, batch_size=64, shuffle=True, generator=order)

# %% [markdown]
# A *Trainer* owns the loop, and calls these methods. If there are several ranks, it also does
# what lesson 05 did. `shard` copies rank 0's weights to all ranks by a broadcast, and makes a
# [sampler](../lessons/README.md#sampler) that gives each rank its shard of the images.
# `average` averages the gradients by an [all-reduce](../lessons/README.md#all-reduce).

# %% tags=["active-ipynb"]
# class SmallTrainer:
#     def __init__(self, max_epochs):
#         self.max_epochs = max_epochs
#         self.global_step = 0
#         self.ranks = dist.get_world_size() if dist.is_initialized() else 1
#
#     def fit(self, module, loader):
#         if self.ranks > 1:
#             loader = self.shard(module, loader)
#         optimizer = module.configure_optimizers()
#         for epoch in range(self.max_epochs):
#             if self.ranks > 1:
#                 loader.sampler.set_epoch(epoch)
#             for batch_idx, batch in enumerate(loader):
#                 optimizer.zero_grad()
#                 loss = module.training_step(batch, batch_idx)
#                 loss.backward()
#                 if self.ranks > 1:
#                     self.average(module)
#                 optimizer.step()
#                 self.global_step += 1
#
#     def shard(self, module, loader):
#         for weight in module.parameters():
#             dist.broadcast(weight.data, src=0)
#         sampler = DistributedSampler(loader.dataset)
#         return DataLoader(loader.dataset, loader.batch_size, sampler=sampler)
#
#     def average(self, module):
#         for weight in module.parameters():
#             dist.all_reduce(weight.grad)
#             weight.grad /= self.ranks
#
#
# small = SmallTrainer(max_epochs=2)
# by_hand = Usual()
# small.fit(by_hand, usual_loader())
#
# trainer = L.Trainer(max_epochs=2, **QUIET)
# one_device = Usual()
# trainer.fit(one_device, usual_loader())
#
# apart = proof.difference(by_hand.net, one_device.net)
# print(f"one device: {small.global_step} steps by hand, {trainer.global_step} by the Trainer")
# print(f"weights of both: {apart:.1e} apart")

# %% [markdown]
# ## Two ranks
# Now `Trainer(devices=2)`, with the same data set and the same batch of 64. On one device the
# two epochs were 46 steps. The module now also calls `self.log(name, number)`, which records a
# number: here the loss of the step. After `fit`, `trainer.callback_metrics` has it. Write your
# answers, then run the cell: the next ones compare them with what happens.

# %% tags=["active-ipynb", "guess"]
# guess_steps = 46  # two ranks: how many steps are the two epochs?
# guess_logged = "mean"  # self.log("loss", loss) on rank 0: the "mean" of both, or its "own"?

# %% [markdown]
# Two ranks train with both Trainers. Each rank makes its module with another seed.

# %% tags=["active-ipynb"]
# lesson.need(guess_steps)
# lesson.need(guess_logged, choices=("mean", "own"))
#
#
# class Logging(Usual):
#     def training_step(self, batch, batch_idx):
#         loss = super().training_step(batch, batch_idx)
#         self.log("loss", loss)
#         self.log("synced", loss, sync_dist=True)
#         return loss
#
#
# def on_a_rank():
#     dist.init_process_group("gloo")
#     small = SmallTrainer(max_epochs=2)
#     by_hand = Usual(seed=dist.get_rank())
#     small.fit(by_hand, usual_loader())
#
#     trainer = L.Trainer(max_epochs=2, devices=2, strategy="ddp", **QUIET)
#     module = Logging(seed=dist.get_rank())
#     trainer.fit(module, usual_loader())
#     logged = {name: trainer.callback_metrics[name].item() for name in ("loss", "synced")}
#     return {
#         "steps by hand": small.global_step,
#         "steps": trainer.global_step,
#         "logged": logged,
#         "net by hand": by_hand.net,
#         "net": module.net,
#     }
#
#
# rank_0, rank_1 = launch.call(on_a_rank, 2)
# by_hand_steps, steps = rank_0["steps by hand"], rank_0["steps"]
# print(f"two ranks: {by_hand_steps} steps by hand, {steps} by the Trainer")
# lesson.compare("steps", guess_steps, steps, digits=0)

# %% [markdown]
# **With two devices it is a different training**: 24 steps instead of 46. Each rank loads 64
# images, so a step sees 128, and an epoch has about half of the steps.
#
# And the weights, and what each rank has logged?

# %% tags=["active-ipynb"]
# of_both = proof.difference(rank_0["net by hand"], rank_0["net"])
# of_ranks = proof.difference(rank_0["net"], rank_1["net"])
# of_devices = proof.difference(rank_0["net"], one_device.net)
# print(f"weights: by hand and by the Trainer within 1e-6: {of_both <= 1e-6}")
# print(f"weights: two ranks and one device {of_devices:.1f} apart")
# print(f"weights: rank 0 and rank 1 {of_ranks:.1e} apart")
# for rank, logged in enumerate((rank_0["logged"], rank_1["logged"])):
#     print(f"rank {rank} logs {logged['loss']:.2f}, with sync_dist {logged['synced']:.2f}")
# logged = rank_0["logged"]
# own = "mean" if logged["loss"] == logged["synced"] else "own"
# lesson.compare("what rank 0 logs", guess_logged, own)

# %% [markdown]
# The weights are not those of one device, for two reasons: a step has 128 images, and the
# sampler deals them out in another order. The ranks' different seeds are no reason, because
# all ranks begin with rank 0's weights: `SmallTrainer` broadcasts them, in the real Trainer
# DDP does.
#
# A rank logs its own loss, unless you ask for the mean by `sync_dist=True`. That is true of
# numbers that are logged for each step, as here. A number can also be logged once per epoch:
# then this Trainer takes the mean without being asked, and Lightning does not (see "The real
# Lightning").
#
# ## What else a Trainer calls
# The real Trainer also calls *hooks*: methods with fixed names, at fixed moments of the run. A
# module can define them. A *callback* is an object with hooks that you pass to the Trainer, so
# that code which is not about the model (a table, a checkpoint) stays out of the module. The
# next callback has the hooks of training, and records their order, with `training_step` among
# them. `SmallTrainer` calls `zero_grad` before `training_step`.

# %% tags=["active-ipynb", "guess"]
# guess_zero = "before"  # the real Trainer: is zero_grad "before" or "after" training_step?

# %% tags=["active-ipynb"]
# lesson.need(guess_zero, choices=("before", "after"))
# order = []
#
#
# class Recorded(Usual):
#     def training_step(self, batch, batch_idx):
#         order.append("training_step")
#         return super().training_step(batch, batch_idx)
#
#
# spy = L.Callback()
# for name in dir(L.Callback):
#     if name.startswith("on_train") or name.startswith("on_before") or "backward" in name:
#         setattr(spy, name, lambda *_, name=name: order.append(name))
#
# trainer = L.Trainer(max_epochs=1, limit_train_batches=1, callbacks=[spy], **QUIET)
# trainer.fit(Recorded(), usual_loader())
# print(textwrap.fill(" → ".join(order), 95))
# later = order.index("on_before_zero_grad") > order.index("training_step")
# lesson.compare("zero_grad", guess_zero, "after" if later else "before")

# %% [markdown]
# Both are right: the gradients must be zero before backward adds to them, and `training_step`
# is only the forward pass. `optimizer.step()` follows `on_before_optimizer_step`.
#
# The picture is of the script below, in two ranks. What is yours was recorded as it was
# called; the Trainer's own work stands where its hook was called. Mind the *sanity check*:
# before the first `training_step`, `validation_step` gets up to two batches on each rank, so
# that a mistake in it is found at once. (`num_sanity_val_steps=0` leaves it out.)
#
# ![The calls of one trainer.fit on two ranks](../lessons/09-lightning/one-fit.png)
#
# ## From the small module to the script's
# `Usual` is enough for many programs. The script below must also give the same weights on one
# device and on two, and DDP averages over *ranks*. Is this the mean over *images*? Take a last
# batch of three images on two ranks: the sampler repeats the first image, so that each rank
# gets two.

# %% tags=["active-ipynb"]
# losses = torch.tensor([1.0, 2.0, 6.0])  # of the three images
# on_ranks = [losses[[0, 2]], losses[[1, 0]]]  # each rank's; rank 1 has the repeated image
# print("the mean over the images:", losses.mean().item())
#
# usual = [own.mean() for own in on_ranks]
# print("the usual loss, averaged over the ranks:", sum(usual).item() / 2)
#
# real = [on_ranks[0], on_ranks[1][:1]]  # without the repeated image
# exact = [own.sum() * 2 / 3 for own in real]  # × ranks, ÷ images of all ranks
# print("sum × ranks ÷ images, averaged over the ranks:", sum(exact).item() / 2)

# %% [markdown]
# So one part of lesson 05 stays in your module: each rank takes the *sum* over its own images,
# without the repeated ones, times the number of ranks, divided by the images of all ranks. DDP
# then divides by the number of ranks. Compared with `Usual`, the script's module has:
#
# - this loss, in `training_step`;
# - `save_hyperparameters`, which writes the arguments of `__init__` into each checkpoint;
# - `configure_model`, which makes the model when the sizes of the data are known;
# - `validation_step`, which counts the hits on the test images;
# - `self.log` with `reduce_fx="sum"`: an epoch's number is the sum over all batches and ranks.
#
# ## The program
# `scripts/PTL_multiGPU.py` has the imports and flags from the top, and the cells from here to
# "What has moved". The section "Run it" runs this file, not the cells. To change something,
# edit the file.
#
# ### The module


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
        # The sum, because the ranks can have different numbers of images in the last batch.
        loss = F.cross_entropy(logits, labels[:own], reduction="sum")

        how = {"on_step": False, "on_epoch": True, "reduce_fx": "sum", "sync_dist": True}
        self.log("loss", loss / total, **how)
        # DDP will divide by `ranks`: this undoes it.
        return loss * ranks / digits.batch.images_in_step(batch_idx, total)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        hits = (self.net(images).argmax(1) == labels).sum()
        accuracy = hits / len(self.trainer.datamodule.test)
        self.log("test_accuracy", accuracy, reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)


# %% [markdown]
# ### The data module
# A *data module* has the methods about data: `prepare_data` runs on one rank of each node,
# `setup` on every rank. Here `batch_size` is the global batch, and each rank loads its part of
# it. If there are several ranks, the Trainer replaces `shuffle=True` by a
# `DistributedSampler`, which has another order. It shards any other sampler of your own, but
# leaves a `DistributedSampler` as it is. So this data module makes one, and one device reads
# the images in the same order as two.


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
# ### The Trainer
# Its arguments choose the parts that do the work:
#
# - `accelerator`, `devices` and `num_nodes`: where to compute.
# - `strategy`: the *strategy* is the part that wraps the model and connects the ranks. `auto`
#   is `ddp` if there are several devices. Lesson 10 has the others.
# - `precision`: the [*precision plugin*](../lessons/README.md#precision-plugin) is the part
#   that computes in 16, 32 or 64 bit (lesson 11).
# - `callbacks`: `Table` prints a row after each epoch, `ModelCheckpoint` writes `last.ckpt`.
# - The *logger* writes what `self.log` records into files: by default for TensorBoard, into
#   the folder `lightning_logs`.


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## What has moved
# The next cell counts the statements of lesson 05's script and of this one. The library's
# statements are not counted. A second count adds those of the callback `Table`: it is in the
# library, but prints the table that lesson 05's script prints itself.

# %% tags=["active-ipynb", "guess"]
# guess_left = 50  # % of lesson 05's statements that this lesson's script needs

# %% tags=["active-ipynb"]
# lesson.need(guess_left)
# before, after = (len(statements(stem)) for stem in ("PT_CNN_MultiGPU", "PTL_multiGPU"))
# with_table = after + len(statements_in(CALLBACK))
# print(f"statements: lesson 05 {before}, lesson 09 {after}, with Table {with_table}")
# percentage = 100 * after / before
# lesson.compare("of lesson 05's statements", guess_left, percentage, unit="%", digits=0)
# bars()

# %% [markdown]
# A third of the statements are gone: 45. Of lesson 05's statements, 46 are about the subjects
# of the bars; of this script's, 14. (A statement can be about two subjects.) The count has
# limits: lesson 05's script has the model, the data and `--accumulate`; this one imports the
# first two and lacks the third, and it has the library's flags and proof. Your module still
# computes the mean over an uneven batch. The three statements about the table of epochs make
# the callback, and pass its rows to the proof and the report.
#
# With the callback's own statements, this program is nearly as long as lesson 05's: the code
# about devices and ranks is gone, but a table as a callback takes more code than in a loop.
#
# ## Run it
# With `--devices 2` the Trainer starts the script again for the second rank. torchrun and srun
# work as in lesson 05: then the Trainer starts nothing.

# %% tags=["active-ipynb"]
# !rm -rf results/09
# !OMP_NUM_THREADS=1 python ../scripts/PTL_multiGPU.py --devices 2 --prove --out results/09

# %% [markdown]
# TensorBoard's own reader reads what the logger has written. (`tensorboard --logdir
# results/09` shows it in a browser.)

# %% tags=["active-ipynb"]
# # Without this line TensorBoard imports TensorFlow, only to open a file.
# sys.modules["tensorboard.compat.notf"] = sys
# from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
#
# log = EventAccumulator("results/09/lightning_logs/version_0").Reload()
# curves = {}
# for name in ("loss", "test_accuracy"):
#     curves[name] = [event.value for event in log.Scalars(name)]
# last = f"loss {curves['loss'][-1]:.2f}, accuracy {curves['test_accuracy'][-1]:.2f}"
# plots.by_epoch(range(1, 11), curves, f"One number per epoch, at the end {last}")

# %% [markdown]
# ## The real Lightning
# One import is changed, `import lightning as L`, and the real Lightning runs the same classes.
# Where does it differ from this Trainer? The next cells try it on two ranks:
#
# - Seven test images have these errors: 10, 1, 1, 1, 1, 1, 1. `trainer.test` reports the mean.
# - Each rank logs its rank number, 0 or 1, once per epoch.
# - `EarlyStopping`, a callback, stops the training if a logged number no longer improves. What
#   rank 0 logs falls by 2 in each epoch, what rank 1 logs rises by 1. So the mean falls.
#
# The second cell below runs for about half a minute before it prints anything.

# %% tags=["active-ipynb", "guess"]
# guess_counted = 7  # how many of the seven test images does Lightning count?
# guess_stop = "no"  # without sync_dist: does Lightning's EarlyStopping stop? "yes", "no"

# %% tags=["active-ipynb"]
# lesson.need(guess_counted)
# lesson.need(guess_stop, choices=("yes", "no"))
# this, lightning = compare()
# show(this, lightning, "test images", "mean error", "rank number", "epochs until")
# lesson.compare("images counted by Lightning", guess_counted, lightning[0]["rows"], digits=0)
# stops = "yes" if lightning[0]["epochs"] < 9 else "no"
# lesson.compare("Lightning's EarlyStopping stops", guess_stop, stops)

# %% [markdown]
# Lightning shards the test images by `DistributedSampler`, which repeats the first one so that
# the shards are equal: the outlier counts twice. This Trainer shards whole batches. And
# without `sync_dist=True`, Lightning's numbers by epoch are a rank's own. If one rank wants to
# stop, all stop: rank 1's rising number ended the training.
#
# The same runs have tried three more things on two ranks: `predict` with four batches, a
# training loader without `shuffle`, and a layer that is frozen at first and trained from
# epoch 1 on. What does Lightning do?

# %% tags=["active-ipynb", "guess"]
# guess_predicted = 4  # how many of the four batches does `predict` return on each rank?
# guess_order = "kept"  # the order of the loader without `shuffle`: "kept" or "shuffled"?
# guess_layer = "equal"  # the ranks' weights of that layer in the end: "apart" or "equal"?

# %% tags=["active-ipynb"]
# lesson.need(guess_predicted)
# lesson.need(guess_order, choices=("kept", "shuffled"))
# lesson.need(guess_layer, choices=("apart", "equal"))
# show(this, lightning, "predict", "loader", "layer")
# found = lightning[0]
# lesson.compare("batches from predict", guess_predicted, found["predicted"], digits=0)
# kept = "shuffled" if found["order"] == "shuffled" else "kept"
# lesson.compare("the order", guess_order, kept)
# equal = torch.equal(found["unfrozen"], lightning[1]["unfrozen"])
# lesson.compare("the layer's weights", guess_layer, "equal" if equal else "apart")

# %% [markdown]
# DDP does not know a layer that is unfrozen later, so nobody averages its gradients: in
# Lightning each rank trains it alone, and this Trainer raises an error. The page of this
# lesson lists the differences that we found.
#
# And the lesson's own module, which asks for the mean and has its own sampler?

# %% tags=["active-ipynb"]
# show(this, lightning, "loss of")
# apart = proof.difference(this[0]["net"], lightning[0]["net"])
# print(f"weights of the lesson's module equal within 1e-6: {apart <= 1e-6}")

# %% [markdown]
# ## What does it cost?
# The next cell trains a model with 13 weights, whose step takes as little time as possible,
# on one device: with `SmallTrainer`, with this Trainer and with Lightning.

# %% tags=["active-ipynb", "guess"]
# guess_cost = 100  # µs that Lightning adds to each step of the loop by hand

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_cost)
# times = step_times(SmallTrainer)
# for name, microseconds in times.items():
#     print(f"{name:<13}{microseconds:>5.0f} µs per step")
#
# added = times["Lightning"] - times["by hand"]
# lesson.compare("Lightning adds", guess_cost, added, unit="µs", digits=0)

# %% [markdown]
# A wrapper's cost is the same for each step, so it counts only where steps are short. These
# are times of this run on this machine; the page has those of a longer measurement.
#
# ## The answer
# **Can a library own the code about GPUs and ranks?** Most of it: the devices, the start of
# the ranks, the sampler, the loop, checkpoints. In both libraries two things stay yours: what
# the batch of your loader means with several ranks, and the mean over an uneven batch. In
# Lightning more is yours, as the tables show: `sync_dist=True` for numbers by epoch, a sampler
# that does not repeat test images, joining what the ranks predict, and unfreezing no layer
# during the training. **Does the model learn the same?** With the first two done right it
# does: the proof holds on two ranks.

# %% tags=["active-ipynb"]
# # For the table of all routes:
# print(metrics.route_row("09 Lightning-style Trainer", "results/09"))

# %% [markdown] tags=["footer"]
# [← 08 TensorFlow on several nodes](TF_CNN_MultiNode.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/09-lightning/README.md) ·
# [10 Seven strategies →](PTL_Strategies.ipynb)
