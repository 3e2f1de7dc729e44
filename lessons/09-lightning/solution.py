# %% [markdown]
# # Exercises: the Lightning-style wrapper
#
# 40 minutes, 20 points. You need lesson 09's notebook, and no GPU. Run the first two code
# cells, then answer the questions in any order.
#
# - Write in the cells that begin with `# answer:`. All that an answer needs stands in its own
#   cell or in the cell `# given`: imports and functions, too.
# - The cell below an answer checks it. The check runs your code in processes of its own, one
#   for each rank, and is their network. If your ranks would wait for each other for ever on a
#   cluster, a sentence says so.
# - When your work is graded, hidden checks try other numbers of ranks and rows.

# %%
# given
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def new_net():
    """4 features → 3 classes. The weights are the same in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Module(nn.Module):
    """What a LightningModule is for the SmallTrainer below."""

    def __init__(self):
        super().__init__()
        self.net = new_net()
        self.logged = {}

    def training_step(self, batch, batch_idx):
        rows, labels = batch
        return F.cross_entropy(self.net(rows), labels)

    def log(self, name, value):
        """Keep what this rank logs. It is not synchronized."""
        self.logged[name] = value

    def validate(self, epoch):
        """This rank's metrics after an epoch."""
        return {}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class SmallTrainer:
    """The lesson's Trainer in 30 lines, with callbacks. Each rank has its own batches."""

    def __init__(self, max_epochs, callbacks=()):
        self.max_epochs = max_epochs
        self.callbacks = callbacks
        self.callback_metrics = {}
        self.should_stop = False
        self.epochs = 0
        self.global_step = 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1

    def fit(self, module, batches):
        optimizer = module.configure_optimizers()
        while self.epochs < self.max_epochs and not self.should_stop:
            for batch_idx, batch in enumerate(batches):
                optimizer.zero_grad()
                loss = module.training_step(batch, batch_idx)
                loss.backward()
                self.average(module)
                optimizer.step()
                self.global_step += 1
            self.callback_metrics = module.validate(self.epochs)
            self.epochs += 1
            for callback in self.callbacks:
                callback.on_validation_end(self, module)

    def average(self, module):
        """The mean of the gradients over the ranks, as DDP computes it."""
        if self.ranks > 1:
            for weight in module.parameters():
                dist.all_reduce(weight.grad)
                weight.grad /= self.ranks


def weights_of(module):
    return [weight.detach() for weight in module.parameters()]


def fit_exact(batch):
    """Question 2, on this rank: (weights after one step with this rank's batch, logged)."""
    module = Exact()
    SmallTrainer(max_epochs=1).fit(module, [batch])
    return weights_of(module), module.logged


class WithLosses(Module):
    """Its test loss on this rank's images is a given number after each epoch."""

    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    def validate(self, epoch):
        return {"test_loss": torch.tensor(self.losses[epoch])}


def epochs_until_stop(losses, patience):
    """Question 3, on this rank: the number of epochs that were trained."""
    stop = StopEarly(patience)
    trainer = SmallTrainer(max_epochs=len(losses), callbacks=[stop])
    trainer.fit(WithLosses(losses), [(torch.ones(2, 4), torch.tensor([0, 1]))])
    return trainer.epochs


def fit_accumulating(batches, accumulate, epochs):
    """Question 4: (global_step, weights) after the epochs, without ranks."""
    module = Module()
    trainer = AccumulatingTrainer(epochs, accumulate)
    trainer.fit(module, batches)
    return trainer.global_step, weights_of(module)


# %% jupyter={"source_hidden": true}
# setup
import importlib.util
import logging
import warnings

from torch.utils.data import DataLoader

import multigpu.trainer
from multigpu.exercise import Exercise

exercise = Exercise("09-lightning")
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fit_by_the_trainer(batches, accumulate, epochs, L=multigpu.trainer):
    """(global_step, weights) of L.Trainer(accumulate_grad_batches=accumulate)."""

    class Usual(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = new_net()

        def training_step(self, batch, batch_idx):
            rows, labels = batch
            return F.cross_entropy(self.net(rows), labels)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    module = Usual()
    trainer = L.Trainer(max_epochs=epochs, accumulate_grad_batches=accumulate, **QUIET)
    # Each item is a batch already.
    loader = DataLoader(batches, batch_size=None)
    trainer.fit(module, loader)
    return trainer.global_step, weights_of(module)


def real_lightning():
    """The package lightning without its messages; None if it is not installed."""
    if importlib.util.find_spec("lightning") is None:
        return None
    warnings.simplefilter("ignore")
    import lightning

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return lightning


def whole_step(batches):
    """(weights, loss) of a step on one device with the rows of all ranks."""
    batch = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    module = Module()
    loss = module.training_step(batch, 0).item()
    SmallTrainer(max_epochs=1).fit(module, [batch])
    return weights_of(module), loss


def random_batch(student, rows):
    """Rows with 4 features, and their labels."""
    features = torch.randn(rows, 4, generator=student.generator)
    return features, torch.randint(0, 3, (rows,), generator=student.generator)


# %% [markdown]
# ## 1. Predict the steps (2 points)
# `L.Trainer(max_epochs=3, accumulate_grad_batches=4)` adds up the gradients of 4 batches, then
# steps the optimizer. An epoch has 10 batches, and 4 does not divide 10. What is
# `trainer.global_step`, the number of optimizer steps, after the three epochs? Write your
# number, then run the check, which runs the Trainer.

# %%
# answer: guess_steps
guess_steps = None  # optimizer steps of the three epochs
### BEGIN SOLUTION
guess_steps = 9
### END SOLUTION

# %% jupyter={"source_hidden": true}
with exercise.check("guess_steps", "the Trainer's global_step", points=2) as student:
    rows = torch.ones(10, 2, 4)
    batches = [(each, torch.tensor([0, 1])) for each in rows]
    steps, _ = fit_by_the_trainer(batches, accumulate=4, epochs=3)
    student.guess(
        "guess_steps",
        steps,
        "the number of optimizer steps",
        "when does the Trainer step at the end of an epoch?",
        within=0,
    )

# %% [markdown]
# ## 2. A training step for uneven batches (7 points)
# The ranks can have different numbers of rows in a step, for example 5 and 3. The Trainer
# averages the *ranks'* gradients: each rank's mean counts the same, although its rows are
# fewer. The training is then not that of one device, and nobody notices, because the loss
# falls all the same. And what `self.log` gets is one rank's number, so the curve of rank 0 is
# not that of the batch.
#
# Write the module `Exact`. Its `training_step` returns a loss such that the *average of the
# ranks' gradients* is the gradient of the mean loss over the rows of **all** ranks. On every
# rank, it logs that mean loss over all rows as `"loss"`, a number. The step knows only its own
# batch: what the other ranks have, it must ask them. `given` has `new_net`, `Module` and the
# Trainer, whose `average` you cannot change. A rank may have no row at all.


# %%
# answer: training_step
class Exact(Module):
    def training_step(self, batch, batch_idx):
        rows, labels = batch
        ### BEGIN SOLUTION
        loss_sum = F.cross_entropy(self.net(rows), labels, reduction="sum")
        # The sums over all ranks: the loss, and the number of rows.
        sums = torch.tensor([loss_sum.item(), len(rows)])
        dist.all_reduce(sums)
        self.log("loss", (sums[0] / sums[1]).item())
        # The Trainer divides by the number of ranks: this undoes it.
        return loss_sum * dist.get_world_size() / sums[1]
        ### END SOLUTION


# %%
with exercise.check("training_step", "5 rows and 3", points=2) as student:
    rows = torch.arange(32.0).reshape(8, 4).sin()
    labels = torch.arange(8) % 3
    batches = [(rows[:5], labels[:5]), (rows[5:], labels[5:])]
    run = student.ranks("fit_exact", [[batch] for batch in batches])
    expected, _ = whole_step(batches)
    student.close_to(
        [weights for weights, _ in run.values],
        [expected] * 2,
        "after a step, both ranks have the weights of one device with all 8 rows",
    )
    gradients = sum(4 * weight.numel() for weight in expected)
    student.expect(
        max(run.sent(rank) for rank in range(2)) <= gradients + 32,
        "beside its gradients, a rank sends at most 32 bytes",
        "it sends more, as if it gave its rows to the others",
    )

# %%
with exercise.check("training_step", "what is logged", points=1) as student:
    rows = torch.arange(32.0).reshape(8, 4).cos()
    labels = torch.arange(8) % 3
    batches = [(rows[:5], labels[:5]), (rows[5:], labels[5:])]
    run = student.ranks("fit_exact", [[batch] for batch in batches])
    _, loss = whole_step(batches)
    student.close_to(
        [logged.get("loss") for _, logged in run.values],
        [loss] * 2,
        "both ranks log the mean loss over all 8 rows",
    )

# %%
with exercise.check("training_step", "other ranks", points=2, hidden=True) as student:
    size = student.random.randint(3, 4)
    counts = student.random.sample(range(1, 10), size)
    batches = [random_batch(student, count) for count in counts]
    run = student.ranks("fit_exact", [[batch] for batch in batches])
    expected, loss = whole_step(batches)
    student.close_to(
        [weights for weights, _ in run.values],
        [expected] * size,
        "with more ranks, all have the weights of one device with all rows",
    )
    student.close_to(
        [logged.get("loss") for _, logged in run.values],
        [loss] * size,
        "with more ranks, all log the mean loss over all rows",
    )

# %%
with exercise.check("training_step", "no row", points=2, hidden=True) as student:
    empty = student.random.randint(0, 1)
    batches = [random_batch(student, 0 if rank == empty else 6) for rank in range(2)]
    run = student.ranks("fit_exact", [[batch] for batch in batches])
    expected, loss = whole_step(batches)
    student.close_to(
        [weights for weights, _ in run.values],
        [expected] * 2,
        "with a rank that has no row, both ranks have the weights of one device",
    )
    student.close_to(
        [logged.get("loss") for _, logged in run.values],
        [loss] * 2,
        "with a rank that has no row, both ranks log the mean loss over all rows",
    )

# %% [markdown]
# ## 3. Find the bug: a run that stands still (5 points)
# The callback below works on one device. On two ranks, some runs stand still after a few
# epochs: no message, and the GPU of a rank that waits shows 100%. After the timeout of ten
# minutes, NCCL reports a collective on one rank only. Run the check to see it with two
# processes.
#
# `StopEarly` should stop the training of *all* ranks after the same epoch: the first at which
# the mean test loss over all test images has not fallen below its best for `patience` epochs.
# `trainer.callback_metrics["test_loss"]` is this rank's mean over its own test images, and all
# ranks have equally many. Find the bug, and mend it in the cell. What decides on the end must
# be the same on each rank.


# %%
# answer: early_stopping
class StopEarly:
    """Stop when the test loss has not fallen below its best for `patience` epochs."""

    def __init__(self, patience):
        self.patience = patience
        self.best = float("inf")
        self.waited = 0

    def on_validation_end(self, trainer, module):
        loss = trainer.callback_metrics["test_loss"].item()
        if loss < self.best:
            self.best = loss
            self.waited = 0
        else:
            self.waited += 1
        trainer.should_stop = self.waited >= self.patience


### BEGIN SOLUTION
class StopEarly:  # noqa: F811
    """Stop when the mean test loss of all ranks has not fallen for `patience` epochs."""

    def __init__(self, patience):
        self.patience = patience
        self.best = float("inf")
        self.waited = 0

    def on_validation_end(self, trainer, module):
        # The bug: each rank looked at its own loss. All ranks must decide alike, so all of
        # them call all_reduce in each epoch, and decide on the same mean.
        mean = trainer.callback_metrics["test_loss"].clone()
        dist.all_reduce(mean)
        loss = mean.item() / dist.get_world_size()
        if loss < self.best:
            self.best = loss
            self.waited = 0
        else:
            self.waited += 1
        trainer.should_stop = self.waited >= self.patience


### END SOLUTION

# %%
with exercise.check("early_stopping", "a loss rises on one rank", points=1) as student:
    rising = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    falling = [20.0, 18.0, 16.0, 14.0, 12.0, 10.0]
    run = student.ranks("epochs_until_stop", [[rising, 2], [falling, 2]])
    student.equal(
        run.values,
        [6, 6],
        "both ranks train all 6 epochs, because the mean of their losses falls",
    )
    run = student.ranks("epochs_until_stop", [[rising, 2], [rising, 2]])
    student.equal(run.values, [3, 3], "both stop after epoch 3, because both losses rise")

# %%
with exercise.check("early_stopping", "the mean rises", points=2) as student:
    rising = [4.0, 2.0, 9.0, 11.0, 13.0, 15.0]
    falling = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    run = student.ranks("epochs_until_stop", [[rising, 2], [falling, 2]])
    student.equal(
        run.values,
        [4, 4],
        "both ranks stop after epoch 4, because the mean was lowest after epoch 2",
    )

# %%
with exercise.check("early_stopping", "other losses", points=2, hidden=True) as student:
    size = student.random.randint(3, 4)
    means = torch.tensor([5.0, 6.0, 4.0, 5.0, 3.0, 4.0, 3.5, 3.6, 3.7, 3.8])
    # One rank's losses rise, another's fall, and the mean of all is `means`.
    slopes = torch.zeros(size)
    slopes[student.random.sample(range(size), 2)] = torch.tensor([-7.0, 7.0])
    losses = means + student.random.random() + slopes[:, None] * torch.arange(10)
    run = student.ranks("epochs_until_stop", [[each, 2] for each in losses.tolist()])
    student.equal(
        run.values,
        [7] * size,
        "all ranks stop two epochs after the lowest mean",
    )

# %% [markdown]
# ## 4. Gradient accumulation (6 points)
# Write `AccumulatingTrainer`: one device, and as `L.Trainer(accumulate_grad_batches=n)`, it
# steps the optimizer after each `accumulate` batches. What question 1 has shown about the end
# of an epoch holds for it, too. As in Lightning, each batch's loss is divided by `accumulate`,
# and by no other number. `global_step` counts the optimizer's steps. The check compares the
# steps and the weights with those of the real Trainer.


# %%
# answer: accumulation
class AccumulatingTrainer:
    """Train a module for epochs; step the optimizer after each `accumulate` batches."""

    def __init__(self, max_epochs, accumulate):
        self.max_epochs = max_epochs
        self.accumulate = accumulate
        self.global_step = 0

    def fit(self, module, batches):
        """batches is a list, the same in each epoch."""
        ### BEGIN SOLUTION
        optimizer = module.configure_optimizers()
        for _ in range(self.max_epochs):
            for batch_idx, batch in enumerate(batches):
                loss = module.training_step(batch, batch_idx)
                (loss / self.accumulate).backward()
                last = batch_idx + 1 == len(batches)
                if last or (batch_idx + 1) % self.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    self.global_step += 1
        ### END SOLUTION


# %%
with exercise.check("accumulation", "8 batches in groups of 4", points=1) as student:
    rows = torch.arange(64.0).reshape(8, 2, 4).sin()
    batches = [(each, torch.tensor([number % 3, 1])) for number, each in enumerate(rows)]
    steps, weights = student.call("fit_accumulating", batches, 4, 1)
    expected, trained = fit_by_the_trainer(batches, 4, 1)
    student.equal(steps, expected, "global_step is that of the real Trainer")
    student.close_to(weights, trained, "the weights are those of the real Trainer")

# %%
with exercise.check("accumulation", "10 batches in groups of 4", points=2) as student:
    rows = torch.arange(80.0).reshape(10, 2, 4).sin()
    batches = [(each, torch.tensor([number % 3, 1])) for number, each in enumerate(rows)]
    steps, weights = student.call("fit_accumulating", batches, 4, 1)
    expected, trained = fit_by_the_trainer(batches, 4, 1)
    student.equal(steps, expected, "with an incomplete group, global_step is the Trainer's")
    student.close_to(weights, trained, "with an incomplete group, so are the weights")

# %%
with exercise.check("accumulation", "other epochs", points=3, hidden=True) as student:
    for accumulate, count in ((3, 7), (5, 4), (1, 3)):
        batches = [random_batch(student, student.random.randint(1, 5)) for _ in range(count)]
        epochs = student.random.randint(2, 3)
        steps, weights = student.call("fit_accumulating", batches, accumulate, epochs)
        expected, trained = fit_by_the_trainer(batches, accumulate, epochs)
        what = f"groups of {accumulate} of {count} batches"
        student.equal(steps, expected, f"{what}: global_step is that of the real Trainer")
        student.close_to(weights, trained, f"{what}: the weights are those of the Trainer")

# %% [markdown]
# ## In the real Lightning (no points)
# The checks of question 4 compared your Trainer with this course's. Does the real Lightning
# step as often, and learn the same weights? Change the numbers, predict, and run the cell: it
# uses your `AccumulatingTrainer`, and needs `pip install 'lightning>=2.6,<2.7'`.

# %%
accumulate, epochs = 4, 3
ten_rows = torch.arange(80.0).view(10, 2, 4).sin()
ten_batches = [(rows, torch.tensor([0, 1])) for rows in ten_rows]
lightning = real_lightning()
if lightning is None:
    print("Lightning is not installed, so there is nothing to compare with.")
else:
    steps, weights = fit_accumulating(ten_batches, accumulate, epochs)
    theirs, trained = fit_by_the_trainer(ten_batches, accumulate, epochs, lightning)
    apart = max((a - b).abs().max().item() for a, b in zip(weights, trained, strict=True))
    print(f"steps: yours {steps}, Lightning's {theirs}")
    print(f"weights within 1e-6: {apart <= 1e-6}")

# %%
exercise.summary()
