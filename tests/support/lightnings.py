"""How is a callback of ours driven by Lightning's own Trainer? By a small model whose metrics are given.

What needs several ranks, a terminal or a clock is driven by `fake`, a small stand-in for the Trainer.
"""

import functools
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch

from multigpu.trainer import callbacks as ours


@functools.cache
def package():
    """The package lightning, which takes seconds to import, without its talk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return lightning


def model(scores, train_loss=True, optimizer=None):
    """A LightningModule whose n-th validation logs val_loss = scores[n]."""
    left = list(scores)

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
            self.log("val_loss", torch.tensor(left.pop(0)))

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
    """Lightning's Trainer, 4 batches an epoch, with this callback."""
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2
    )

    class Trainer(package().Trainer):
        _logged_step = property(lambda self: self.fit_loop.epoch_loop._batches_that_stepped)

    if not hasattr(
        callback, "_legacy_state_key"
    ):  # what checkpoints older than version 1.5 have
        callback._legacy_state_key = None
    is_checkpoint = type(callback).__name__ == "ModelCheckpoint" and not isinstance(
        callback, ours.ModelCheckpoint
    )
    given = {
        "max_epochs": len(scores),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        **kwargs,
    }
    trainer = Trainer(
        default_root_dir=root,
        accelerator="cpu",
        logger=logger,
        callbacks=[callback],
        enable_checkpointing=is_checkpoint,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )
    net = model(scores, optimizer=optimizer)
    trainer.fit(net, data, data if validate else None, ckpt_path=ckpt_path)
    return trainer


def fake(**changes):
    """The few things of a Trainer that callbacks ask for."""
    one = SimpleNamespace(
        broadcast=lambda value, src=0: value, reduce_boolean_decision=lambda d, all=True: d
    )
    saved = []
    values = {
        "strategy": one,
        "state": SimpleNamespace(fn="fit"),
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
    return SimpleNamespace(**values | changes)
