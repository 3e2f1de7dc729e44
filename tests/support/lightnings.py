"""Run a callback of ours with Lightning's Trainer, on a small model whose metrics are given.

Tests that need several ranks, a terminal or a clock use `fake`, a small replacement for the
Trainer.
"""

import functools
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from quiet import QUIET


@functools.cache
def package():
    """The package lightning, without its warnings and messages. The import takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return lightning


def model(scores, train_loss=True, optimizer=None):
    """A LightningModule whose n-th validation logs val_loss = scores[n]."""
    remaining = list(scores)

    class Scored(package().LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch[0]).mean()
            if train_loss:
                self.log("train/loss", torch.tensor(0.25 + batch_idx))
            return loss

        def validation_step(self, batch, batch_idx): ...

        def on_validation_epoch_end(self):
            self.log("val_loss", torch.tensor(remaining.pop(0)))

        def configure_optimizers(self):
            return optimizer(self) if optimizer else torch.optim.SGD(self.parameters(), 0.1)

    return Scored()


def fit(
    root,
    callback,
    scores,
    validate=True,
    optimizer=None,
    logger=False,
    ckpt_path=None,
    **kwargs,
):
    """Lightning's Trainer, after it has run with this callback: 4 batches per epoch.

    The epochs are as many as `scores`, the val_loss of each validation.
    """
    rows = torch.utils.data.TensorDataset(torch.ones(8, 2))
    data = torch.utils.data.DataLoader(rows, batch_size=2)

    class Trainer(package().Trainer):
        @property
        def _logged_step(self):
            """Our Trainer's name of the loggers' step."""
            return self.fit_loop.epoch_loop._batches_that_stepped

    # Lightning's Trainer reads this key of checkpoints older than version 1.5.
    if not hasattr(callback, "_legacy_state_key"):
        callback._legacy_state_key = None
    # Lightning's Trainer rejects its own ModelCheckpoint with enable_checkpointing=False, and
    # adds one of its own to ours with True.
    is_lightnings = isinstance(callback, package().pytorch.callbacks.ModelCheckpoint)
    arguments = QUIET | {
        "default_root_dir": root,
        "accelerator": "cpu",
        "logger": logger,
        "callbacks": [callback],
        "max_epochs": len(scores),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": is_lightnings,
    }
    trainer = Trainer(**arguments | kwargs)
    module = model(scores, optimizer=optimizer)
    trainer.fit(module, data, data if validate else None, ckpt_path=ckpt_path)
    return trainer


def fake(**changes):
    """The attributes of a Trainer that callbacks read, some of them changed.

    `saved` lists the paths of the checkpoints that it was asked to save.
    """
    one_rank = SimpleNamespace(
        broadcast=lambda value, src=0: value,
        reduce_boolean_decision=lambda decision, all=True: decision,
    )
    saved = []
    attributes = {
        "strategy": one_rank,
        "state": SimpleNamespace(fn="fit", num_batches={"train": 4, "val": [1]}),
        "saved": saved,
        "save_checkpoint": lambda path, weights_only=False: saved.append(path),
        "print": print,
        "is_global_zero": True,
        "sanity_checking": False,
        "fast_dev_run": False,
        "should_stop": False,
        "check_val_every_n_epoch": 1,
        "val_check_interval": 1.0,
        "enable_validation": True,
        "num_val_batches": [1],
        "num_training_batches": 4,
        "max_epochs": 2,
        "current_epoch": 0,
        "global_step": 0,
        "ckpt_path": None,
        "world_size": 1,
        "loggers": [],
        "callback_metrics": {},
        "progress_bar_metrics": {},
    }
    return SimpleNamespace(**attributes | changes)
