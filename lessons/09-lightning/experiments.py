"""The longer experiments of lesson 09: the same code with this Trainer and with Lightning.

Most get the library (`L`) that defines Trainer and LightningModule, run in two ranks, and
return what a row of the table prints. `both` runs all of these with both libraries.
"""

import importlib.util
import logging
import math
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import multigpu.trainer
from multigpu import launch, proof
from multigpu.errors import UserError
from multigpu.models import CNN

SCRIPT = Path(__file__).parents[2] / "scripts" / "PTL_multiGPU.py"
THIS_TRAINER = "import multigpu.trainer as L"
LIGHTNING = "import lightning as L"
# The Trainer's arguments: on the CPU, without files and output.
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
SETTINGS = QUIET | {"devices": 2, "strategy": "ddp"}


# ---- the libraries --------------------------------------------------------------------------


def check_installed() -> None:
    """Raises UserError if lightning is not installed."""
    if importlib.util.find_spec("lightning") is None:
        raise UserError(
            "lightning is not installed, which this experiment compares with: "
            "pip install 'lightning>=2.6,<2.7'."
        )


def lightning() -> types.ModuleType:
    """The package lightning, without its messages."""
    # Lightning warns about loaders' workers and about loggers: neither changes a number.
    warnings.simplefilter("ignore")
    import lightning

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return lightning


def lesson(L: types.ModuleType) -> types.ModuleType:
    """The lesson's script as a module that uses the library `L`: one import is changed."""
    text = SCRIPT.read_text()
    assert text.count(THIS_TRAINER) == 1
    if L is not multigpu.trainer:
        text = text.replace(THIS_TRAINER, LIGHTNING)
    module = types.ModuleType("PTL_multiGPU")
    module.__file__ = str(SCRIPT)
    sys.modules[module.__name__] = module
    exec(compile(text, SCRIPT, "exec"), module.__dict__)
    return module


# ---- hooks ----------------------------------------------------------------------------------


def order_of_hooks(module: multigpu.trainer.LightningModule, loader: DataLoader) -> list[str]:
    """The hooks that one training step calls, and `training_step`, in their order."""
    L = multigpu.trainer
    order: list[str] = []
    step = module.training_step

    def training_step(batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        order.append("training_step")
        return step(batch, batch_idx)

    module.training_step = training_step
    spy = L.Callback()
    for name in dir(L.Callback):
        if name.startswith(("on_train", "on_before")) or "backward" in name:
            setattr(spy, name, lambda *_, name=name: order.append(name))
    trainer = L.Trainer(max_epochs=1, limit_train_batches=1, callbacks=[spy], **QUIET)
    trainer.fit(module, loader)
    return order


# ---- training -------------------------------------------------------------------------------


def train_lesson(L: types.ModuleType) -> tuple[float, torch.nn.Module]:
    """The loss of the lesson's module after two epochs, and its net."""
    script = lesson(L)
    module = script.LitCNN(0.05, seed=0)
    trainer = L.Trainer(max_epochs=2, **SETTINGS)
    trainer.fit(module, datamodule=script.DigitsData(None, 64, seed=0))
    net = CNN()  # of the course, which another process can import
    net.load_state_dict(module.cnn.state_dict())
    return float(trainer.callback_metrics["loss"]), net


def tiny(L: types.ModuleType, **methods: Callable) -> object:
    """A LightningModule with two linear layers, and with these methods."""

    class Tiny(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = torch.nn.Linear(1, 4)
            self.last = torch.nn.Linear(4, 1)
            self.seen = []

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            (rows,) = batch
            self.seen += rows.flatten().tolist()
            return self.last(self.first(rows / 8)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    for name, method in methods.items():
        setattr(Tiny, name, method)
    return Tiny()


def numbered_rows(count: int, **loader: object) -> DataLoader:
    """A DataLoader of the rows 0, 1, 2, … in batches of 2."""
    rows = torch.arange(float(count)).reshape(-1, 1)
    return DataLoader(TensorDataset(rows), batch_size=2, **loader)


def steps(L: types.ModuleType) -> int:
    """The steps of one epoch over 8 rows, which are 4 batches."""
    trainer = L.Trainer(max_epochs=1, **SETTINGS)
    trainer.fit(tiny(L), numbered_rows(8, shuffle=True))
    return trainer.global_step


def order(L: types.ModuleType) -> str:
    """Whether this rank reads its rows in order, from a loader without `shuffle`."""
    module = tiny(L)
    L.Trainer(max_epochs=1, **SETTINGS).fit(module, numbered_rows(20))
    return "in order" if module.seen == sorted(module.seen) else "shuffled"


def unfrozen(L: types.ModuleType) -> torch.Tensor | str:
    """The first layer's weights, if it is frozen at first and trained from epoch 1 on.

    "refused" if the Trainer raises an error.
    """

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch > 0)

    module = tiny(L, on_train_epoch_start=on_train_epoch_start)
    module.first.requires_grad_(False)
    try:
        L.Trainer(max_epochs=2, **SETTINGS).fit(module, numbered_rows(8))
    except UserError as error:
        assert "'first.weight'" in str(error), error
        return "refused"
    return module.first.weight.detach()


def weight_in_configure_optimizers(L: types.ModuleType) -> float:
    """A weight that is the rank's number at first, as `configure_optimizers` finds it."""
    values = []

    def setup(self, stage: str) -> None:
        torch.nn.init.constant_(self.first.weight, float(self.global_rank))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        values.append(self.first.weight[0, 0].item())
        return torch.optim.SGD(self.parameters(), lr=0.5)

    module = tiny(L, setup=setup, configure_optimizers=configure_optimizers)
    L.Trainer(max_epochs=1, **SETTINGS).fit(module, numbered_rows(8))
    return values[0]


# ---- logging --------------------------------------------------------------------------------


def epoch_value(L: types.ModuleType, sync_dist: bool) -> float:
    """The epoch's value of a name for which each rank logs its own number."""

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        how = {"on_step": False, "on_epoch": True, "sync_dist": sync_dist}
        self.log("number", float(self.global_rank), **how)

    trainer = L.Trainer(max_epochs=1, **SETTINGS)
    trainer.fit(tiny(L, on_train_batch_end=on_train_batch_end), numbered_rows(8))
    return float(trainer.callback_metrics["number"])


def epochs_until_stop(L: types.ModuleType, sync_dist: bool) -> int:
    """Epochs, of at most 9, until EarlyStopping with a patience of 2 ends the training.

    What rank 0 logs falls by 2 in each epoch, what rank 1 logs rises by 1: the mean falls.
    """
    ended = []

    def on_train_epoch_end(self) -> None:
        falling = -2.0 * self.current_epoch
        rising = 1.0 * self.current_epoch
        value = rising if self.global_rank else falling
        self.log("loss", value, sync_dist=sync_dist)
        ended.append(value)

    stop = L.pytorch.callbacks.EarlyStopping("loss", patience=2)
    trainer = L.Trainer(max_epochs=9, callbacks=[stop], **SETTINGS)
    trainer.fit(tiny(L, on_train_epoch_end=on_train_epoch_end), numbered_rows(8))
    return len(ended)


# ---- evaluation -----------------------------------------------------------------------------

# The first of seven rows is an outlier. Their mean is 16 / 7.
ERRORS = (10.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def counted(L: types.ModuleType, loop: str) -> tuple[float, float]:
    """(rows counted, mean error) on the seven rows of ERRORS.

    loop   "test" or "validate": the method of the Trainer
    """

    def step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        (errors,) = batch
        self.log("rows", float(len(errors)), reduce_fx="sum", sync_dist=True)
        self.log("error", errors.mean(), sync_dist=True)

    run = getattr(L.Trainer(**SETTINGS), loop)
    module = tiny(L, test_step=step, validation_step=step)
    loader = DataLoader(TensorDataset(torch.tensor(ERRORS)), batch_size=2)
    (metrics,) = run(module, loader, verbose=False)
    return metrics["rows"], metrics["error"]


def predicted(L: types.ModuleType) -> int:
    """How many of the 4 batches of seven rows `Trainer.predict` returns on this rank."""

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return batch[0]

    trainer = L.Trainer(**SETTINGS)
    return len(trainer.predict(tiny(L, predict_step=predict_step), numbered_rows(7)))


# ---- cost -----------------------------------------------------------------------------------


class Batches:
    """A loader that has its batches already. A list would be several loaders."""

    def __init__(self, batches: list):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator:
        return iter(self.batches)


def step_times(small_trainer: type, steps: int = 300, rounds: int = 3) -> dict[str, float]:
    """Microseconds from one step of `tiny` to the next, on one device: the shortest median.

    small_trainer   the notebook's Trainer, whose loop is the one by hand
    Raises UserError if lightning is not installed.
    """
    check_installed()
    alone = {"devices": 1, "strategy": "auto", "max_epochs": 1}
    batches = Batches([[torch.ones(2, 1)]] * steps)
    began = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        began.append(time.perf_counter())
        (rows,) = batch
        return self.last(self.first(rows)).square().mean()

    libraries = {"this Trainer": multigpu.trainer, "Lightning": lightning()}
    times = dict.fromkeys(("by hand", *libraries), math.inf)
    for _ in range(rounds):
        runs = {"by hand": (small_trainer(max_epochs=1), multigpu.trainer)}
        for name, L in libraries.items():
            runs[name] = (L.Trainer(**SETTINGS | alone), L)
        for name, (trainer, L) in runs.items():
            began.clear()
            trainer.fit(tiny(L, training_step=training_step), batches)
            seconds = statistics.median(after - before for before, after in pairwise(began))
            times[name] = min(times[name], seconds * 1e6)
    return times


# ---- both libraries, side by side -----------------------------------------------------------


def experiments(L: types.ModuleType) -> dict[str, object]:
    """What each experiment finds on this rank, with the library `L`."""
    loss, net = train_lesson(L)
    rows, error = counted(L, "test")
    return {
        "loss": loss,
        "net": net,
        "steps": steps(L),
        "rows": rows,
        "error": error,
        "validated rows": counted(L, "validate")[0],
        "predicted": predicted(L),
        "epoch value": epoch_value(L, sync_dist=False),
        "epoch value, sync_dist": epoch_value(L, sync_dist=True),
        "epochs": epochs_until_stop(L, sync_dist=False),
        "epochs, sync_dist": epochs_until_stop(L, sync_dist=True),
        "order": order(L),
        "unfrozen": unfrozen(L),
        "first weight": weight_in_configure_optimizers(L),
    }


def both() -> list[dict[str, object]]:
    """What this rank finds with this Trainer and with Lightning."""
    return [experiments(L) for L in (multigpu.trainer, lightning())]


def compare() -> tuple[list[dict], list[dict]]:
    """Run `both` in two ranks. Returns (this Trainer's findings, Lightning's), by rank.

    Raises UserError if lightning is not installed.
    """
    check_installed()
    ranks = launch.call(both, 2)
    return [rank[0] for rank in ranks], [rank[1] for rank in ranks]


def cells(ranks: list[dict]) -> dict[str, str]:
    """The rows of the table for one library: name → what its two ranks found."""
    first, second = ranks
    frozen = first["unfrozen"]
    if not isinstance(frozen, str):
        apart = (frozen - second["unfrozen"]).abs().max().item()
        frozen = f"{apart:.2f} apart"

    def of_ranks(name: str) -> str:
        return f"{first[name]:.1f} and {second[name]:.1f}"

    return {
        "loss of the lesson's module, two epochs": f"{first['loss']:.4f}",
        "steps of one epoch, 4 on one device": f"{first['steps']}",
        "test images counted, of 7": f"{first['rows']:.0f}",
        "their mean error, 16/7 = 2.286": f"{first['error']:.3f}",
        "batches from predict on a rank, of 4": f"{first['predicted']}",
        "rank number, logged by epoch": of_ranks("epoch value"),
        "rank number, logged with sync_dist=True": of_ranks("epoch value, sync_dist"),
        "epochs until EarlyStopping, of 9": f"{first['epochs']}",
        "epochs until EarlyStopping, with sync_dist=True": f"{first['epochs, sync_dist']}",
        "a training loader without shuffle": first["order"],
        "a layer unfrozen in epoch 1, on two ranks": frozen,
        "a weight in configure_optimizers, made 0 and 1": of_ranks("first weight"),
    }


def show(this: list[dict], lightnings: list[dict]) -> None:
    """Print the table of both libraries."""
    print(f"{'two ranks':<48}{'this Trainer':>16}{'Lightning':>16}")
    of_lightning = cells(lightnings)
    for name, value in cells(this).items():
        print(f"{name:<48}{value:>16}{of_lightning[name]:>16}")
    apart = proof.difference(this[0]["net"], lightnings[0]["net"])
    print(f"weights of the lesson's module equal within 1e-6: {apart <= 1e-6}")
