"""Mistakes in a module or its data: the error in the run names mistake and remedy."""

import pytest
import torch
from numbered_rows import Net, Rows, Stream, changed, fit, trainer
from refusals import names
from small_net import cpu, make_net, rows
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")


# ---- self.log -------------------------------------------------------------------------------


class Pair:
    """A metric whose value is two numbers."""

    _forward_cache = 1.0

    def compute(self):
        return torch.tensor(1.0), torch.tensor(2.0)

    def reset(self): ...


PAIR = Pair()


# case → (training_step, what the error names)
LOGS = {
    "a vector": (
        lambda net, batch, i: net.log("a", torch.ones(2)),
        ("self.log('a')", "shape (2,)", "one number"),
    ),
    "reduce_fx": (
        lambda net, batch, i: net.log("a", 1, reduce_fx="median"),
        ("reduce_fx='median'", "mean, sum, max, min"),
    ),
    "a refused argument": (
        lambda net, batch, i: net.log("a", 1, sync_dist=True, sync_dist_group=object()),
        ("sync_dist_group in self.log", "all_reduce"),
    ),
    "a metric of several numbers": (
        lambda net, batch, i: net.log("a", PAIR, on_step=False, on_epoch=True),
        ("self.log('a')", "tuple", "one number"),
    ),
    "nothing": (
        lambda net, batch, i: net.log("a", 1, on_step=False, on_epoch=False),
        ("self.log('a'", "on_step=False, on_epoch=False"),
    ),
}


@pytest.mark.parametrize("case", LOGS)
def test_what_cannot_be_logged(tmp_path, case):
    step, facts = LOGS[case]
    names(lambda: fit(tmp_path, Net(train=step)), *facts)


def test_a_step_cannot_be_logged_at_an_epochs_end(tmp_path):
    net = changed(on_train_epoch_end=lambda self: self.log("a", 1, on_step=True))
    names(
        lambda: fit(tmp_path, net), "on_step=True", "on_train_epoch_end", "leave on_step out"
    )


# ---- training_step --------------------------------------------------------------------------


# case → (training_step, what the error names)
STEPS = {
    "several numbers": (
        lambda self, batch, i: self.layer(batch),
        ("shape (2, 1)", "one number", "mean"),
    ),
    "no graph": (lambda self, batch, i: torch.tensor(1.0), ("loss", "without a graph")),
    "a batch too few": (
        lambda self, batch, i: self.layer(batch).mean(),
        ("on_train_batch_start that returns -1", "limit_train_batches"),
    ),
    "no loss": (
        lambda self, batch, i: {"los": 1},
        ("without 'loss'", "step 0 (batch 0 of epoch 0)", "return the loss"),
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_what_a_step_may_not_return(tmp_path, case):
    step, facts = STEPS[case]
    begin = (lambda self, batch, i: -1) if case == "a batch too few" else lambda *_: None
    net = changed(training_step=step, on_train_batch_start=begin)
    names(lambda: fit(tmp_path, net), *facts)


def test_one_step_takes_too_few_arguments_for_several_loaders(tmp_path):
    net = changed(validation_step=lambda self, batch, batch_idx: None)
    loaders = [DataLoader(Rows(2)), DataLoader(Rows(2))]
    names(
        lambda: trainer(tmp_path).validate(net, loaders),
        "2 dataloaders",
        "validation_step",
        "dataloader_idx",
    )


# ---- what is missing ------------------------------------------------------------------------


class Bare(L.LightningModule):
    def training_step(self, batch, batch_idx): ...


# case → (a call, what the error names)
MISSING = {
    "no training_step": (
        lambda run: run.fit(L.LightningModule()),
        ("LightningModule has no training_step", "trainer.fit"),
    ),
    "no validation_step": (
        lambda run: run.validate(Bare()),
        ("Bare has no validation_step", "trainer.validate"),
    ),
    "neither predict_step nor forward": (
        lambda run: run.predict(Bare(), [1]),
        ("Bare", "predict_step", "forward"),
    ),
    "no model": (lambda run: run.predict(), ("trainer.predict", "no model")),
    "no data": (
        lambda run: run.fit(Net()),
        ("trainer.fit", "train_dataloaders", "datamodule", "method train_dataloader"),
    ),
    "no data to validate": (
        lambda run: run.validate(Net()),
        ("trainer.validate", "no data", "val_dataloader"),
    ),
    "a loader that is none": (lambda run: run.fit(Net(), 2), ("dataloader", "int")),
    "best": (
        lambda run: run.validate(Net(), [1], ckpt_path="best"),
        ("ckpt_path", "'best'", "ModelCheckpoint", "file"),
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_named(tmp_path, case):
    call, facts = MISSING[case]
    names(lambda: call(trainer(tmp_path)), *facts)


def test_nothing_to_validate_with_is_said():
    with pytest.warns(UserWarning, match=r"validation_step.* no validation dataloaders"):
        cpu().fit(make_net(), DataLoader(rows(8), 2))


# ---- arguments that do not suit the module or the data --------------------------------------


STREAM = {"loader": DataLoader(Stream(4))}


MANUAL = {"net": {"automatic_optimization": False}}


# case → (fit's arguments, what the error names)
FITS = {
    "val_check_interval": (
        {"val_check_interval": 9, "val": DataLoader(Rows(2))},
        ("val_check_interval=9", "4 batches", "check_val_every_n_epoch=None"),
    ),
    "validate in a stream": (
        {"val_check_interval": 0.5, "val": DataLoader(Rows(2)), **STREAM},
        ("val_check_interval=0.5", "no length", "whole number"),
    ),
    "precision": ({"precision": "17"}, ("precision is '17'", "32, 64, 16, bf16, 32-true")),
    "clip by hand": (
        {"gradient_clip_val": 1.0, **MANUAL},
        ("gradient_clip_val", "self.clip_gradients"),
    ),
}


@pytest.mark.parametrize("case", FITS)
def test_what_only_shows_in_fit(tmp_path, case):
    keywords, facts = FITS[case]
    net = changed()
    keywords = dict(keywords)
    for name, value in keywords.pop("net", {}).items():
        setattr(net, name, value)
    names(lambda: fit(tmp_path, net, **keywords), *facts)


def test_a_scheduler_that_monitors_what_nobody_logs(tmp_path):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            "monitor": "val",
        }

    net = changed(configure_optimizers=configure_optimizers)
    names(lambda: fit(tmp_path, net), "scheduler", "'val'", "not logged", "none")


class Stepless:
    """A scheduler that is none."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return {}


def with_scheduler(make, **methods):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {"optimizer": optimizer, "lr_scheduler": make(optimizer)}

    return changed(configure_optimizers=configure_optimizers, **methods)


def test_a_scheduler_of_another_library(tmp_path):
    """It has no method step: the module steps it."""
    fit(tmp_path, with_scheduler(Stepless, lr_scheduler_step=lambda self, *_: None))
    names(lambda: fit(tmp_path, with_scheduler(lambda _: {})), "lr_scheduler", "'scheduler'")


def test_a_compiled_module_is_refused_with_a_way_out():
    with pytest.raises(UserError, match=r"compile its layers.*torch\.compile"):
        cpu().fit(torch.compile(make_net()), DataLoader(rows(8), 2))
