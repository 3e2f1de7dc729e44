"""Warnings about settings that work, but probably not as the user wants."""

import warnings

import plain_net
import torch
from numbered_rows import Rows, changed, trainer
from torch.utils.data import DataLoader

import multigpu.trainer as L


def warned(function):
    """The texts of the warnings that `function` gives."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in recorded]


def says(function, *facts):
    """Whether one warning of `function` names all these facts."""
    return any(all(fact in text for fact in facts) for text in warned(function))


def test_log_without_a_trainer_says_that_the_value_is_lost():
    net = L.LightningModule()
    assert says(lambda: net.log("a", 1.0), "'a'", "LightningModule", "lost")
    net.trainer = trainer(".")
    assert says(lambda: net.log("a", 1.0), "'a'", "LightningModule", "lost")


def plateau(self, **keys):
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return [optimizer], [{"scheduler": scheduler, "monitor": "giraffe", **keys}]


def test_a_metric_that_a_scheduler_waits_for(tmp_path):
    net = changed(configure_optimizers=lambda self: plateau(self, strict=False))
    run = trainer(tmp_path)
    assert says(lambda: run.fit(net, DataLoader(Rows(2))), "'giraffe'", "not logged", "strict")


def test_a_fit_without_a_limit_says_how_long_it_is(tmp_path):
    class Stops(L.Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.should_stop = True

    run = plain_net.trainer(tmp_path, max_epochs=None, callbacks=[Stops()])
    assert run.max_epochs is None
    assert says(
        lambda: run.fit(plain_net.Net(), DataLoader(plain_net.rows())), "max_epochs", "1000"
    )
    assert run.max_epochs == 1000
