"""Mistakes in a module or its data: the error in the run names what is wrong."""

import pytest
import torch
from numbered_rows import Net, Rows, Stream, changed, fit, trainer
from refusals import names
from small_net import cpu, make_net, rows
from torch.utils.data import DataLoader

import multigpu.trainer as L

pytestmark = pytest.mark.filterwarnings("ignore")


class Pair:
    """A metric whose value is two numbers."""

    _forward_cache = 1.0

    def compute(self):
        return torch.tensor(1.0), torch.tensor(2.0)

    def reset(self): ...


class Sharpness(torch.optim.SGD):
    """Calls its closure twice, as sharpness-aware minimization does."""

    def step(self, closure):
        closure()
        return super().step(closure)


def logging(name="a", value=1.0, **keywords):
    return Net(train=lambda net, *_: net.log(name, value, **keywords))


def stepping(step):
    return changed(training_step=lambda self, batch, batch_idx: step(self, batch))


def with_optimizer(make):
    """A module whose optimizer comes with the scheduler that `make` makes."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {"optimizer": optimizer, "monitor": "val", "lr_scheduler": make(optimizer)}

    return changed(configure_optimizers=configure_optimizers)


# case → (the module, what the error names)
MODULES = {
    "a vector": (lambda: logging(value=torch.ones(2)), "shape (2,)"),
    "reduce_fx": (lambda: logging(reduce_fx="median"), "reduce_fx='median'"),
    "a refused argument": (lambda: logging(sync_dist_group=object()), "sync_dist_group"),
    "two numbers": (lambda: logging(value=Pair(), on_step=False, on_epoch=True), "tuple"),
    "a step at an epoch's end": (
        lambda: changed(on_train_epoch_end=lambda self: self.log("a", 1, on_step=True)),
        "on_train_epoch_end",
    ),
    "losses": (lambda: stepping(lambda self, batch: self.layer(batch)), "shape (2, 1)"),
    "no loss": (lambda: stepping(lambda *_: {"los": 1}), "['los'] in batch 0 of epoch 0"),
    "-1": (lambda: changed(on_train_batch_start=lambda *_: -1), "returns -1"),
    "no metric": (
        lambda: with_optimizer(torch.optim.lr_scheduler.ReduceLROnPlateau),
        "not logged",
    ),
    "a closure": (
        lambda: changed(
            configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters())
        ),
        "LBFGS.step",
    ),
    "a closure without a default": (
        lambda: changed(configure_optimizers=lambda self: Sharpness(self.parameters())),
        "Sharpness.step",
    ),
    "no scheduler": (lambda: with_optimizer(lambda _: {}), "'scheduler'"),
}


@pytest.mark.parametrize("case", MODULES)
def test_what_a_module_may_not_do(tmp_path, case):
    make, fact = MODULES[case]
    names(lambda: fit(tmp_path, make()), fact)


class Bare(L.LightningModule):
    def training_step(self, batch, batch_idx): ...


# case → (a call, what the error names)
MISSING = {
    "training_step": (lambda run: run.fit(L.LightningModule()), "no training_step"),
    "validation_step": (lambda run: run.validate(Bare()), "no validation_step"),
    "a model": (lambda run: run.predict(), "no model"),
    "data": (lambda run: run.fit(Net()), "no training data"),
    "data to validate": (lambda run: run.validate(Net()), "val_dataloader"),
    "a loader": (lambda run: run.fit(Net(), 2), "int"),
    "best": (lambda run: run.validate(Net(), [1], ckpt_path="best"), "'best'"),
    "a module": (lambda run: run.fit(torch.compile(make_net())), "compile its layers"),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_named(tmp_path, case):
    call, fact = MISSING[case]
    names(lambda: call(trainer(tmp_path)), fact)


# case → (fit's arguments, what the error names)
FITS = {
    "interval": ({"val_check_interval": 9, "val": DataLoader(Rows(2))}, "4 batches"),
    "a share of a stream": (
        {
            "val_check_interval": 0.5,
            "val": DataLoader(Rows(2)),
            "loader": DataLoader(Stream(4)),
        },
        "no length",
    ),
    "clip by": (
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "max"},
        "expected 'norm' or 'value'",
    ),
    "precision": ({"precision": "17"}, "precision is '17'"),
}


@pytest.mark.parametrize("case", FITS)
def test_what_only_shows_in_fit(tmp_path, case):
    keywords, fact = FITS[case]
    names(lambda: fit(tmp_path, changed(), **keywords), fact)


def test_clipping_is_the_modules_in_manual_optimization(tmp_path):
    net = changed(automatic_optimization=False)
    names(lambda: fit(tmp_path, net, gradient_clip_val=1.0), "self.clip_gradients")


def test_nothing_to_validate_with_is_said():
    with pytest.warns(UserWarning, match="no validation dataloader: nothing"):
        cpu().fit(make_net(), DataLoader(rows(8), 2))


class Stepless:
    """A scheduler without `step`: the module steps it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return {}


def test_a_scheduler_of_another_library(tmp_path):
    net = with_optimizer(Stepless)
    net.lr_scheduler_step = lambda *_: None
    fit(tmp_path, net)
