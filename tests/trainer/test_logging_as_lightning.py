"""What self.log of the module, of a callback and of an inner module gives, as in Lightning."""

import lightnings
import pytest
import torch
from refusals import names
from small_net import Net, cpu, make_net, rows
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer_user import csv_rows, data, trainer
from user_methods import user

import multigpu.trainer as ours
from multigpu import launch

pytestmark = pytest.mark.filterwarnings("ignore")


def loader(self):
    """25 batches."""
    return DataLoader(data(50, 1), batch_size=2)


def numbers(row):
    return {name: float(text) for name, text in row.items() if text}


def both(root, callback=None, arguments=(), **methods):
    """The CSV rows and callback_metrics of a fit, which are Lightning's.

    callback   a function of the library that makes a callback
    """
    found = []
    for L in (ours, lightnings.package()):
        L.seed_everything(1, verbose=False)
        logger = L.pytorch.loggers.CSVLogger(root / L.__name__, version=0)
        run = trainer(
            L,
            root,
            logger=logger,
            callbacks=[callback(L)] if callback else [],
            **{"log_every_n_steps": 10, **dict(arguments)},
        )
        run.fit(user(L, **methods)())
        metrics = {name: float(value) for name, value in run.callback_metrics.items()}
        found.append(([numbers(row) for row in csv_rows(logger)], metrics))
    (rows_here, metrics_here), (rows_there, metrics_there) = found
    assert metrics_here == pytest.approx(metrics_there, abs=1e-6)
    assert rows_here == [pytest.approx(row, abs=1e-6) for row in rows_there]
    return found[0]


def test_the_loggers_get_the_last_value_of_a_name_that_is_logged_seldom(tmp_path):
    def training_step(self, batch, batch_idx):
        if batch_idx % 5 == 0:
            self.log("fifth", float(batch_idx))
        if self.current_epoch == 0 and batch_idx < 3:
            self.log("early", float(batch_idx), on_step=True, on_epoch=True)
        return F.cross_entropy(self(batch[0]), batch[1])

    written, _ = both(tmp_path, training_step=training_step, train_dataloader=loader)
    assert [row["fifth"] for row in written if "fifth" in row] == [5.0, 15.0, 0.0, 10.0, 20.0]
    assert [row["early_step"] for row in written if "early_step" in row] == [2.0, 2.0]


def test_a_validation_batch_reports_what_earlier_batches_logged(tmp_path):
    """The x axis counts the batches, also those that log nothing."""

    def validation_step(self, batch, batch_idx):
        if batch_idx % 2:
            self.log("odd", float(batch_idx), on_step=True)

    written, _ = both(tmp_path, validation_step=validation_step, val_dataloader=loader)
    values = [(row["step"], row["odd_step"]) for row in written if "odd_step" in row]
    assert values[:3] == [(1.0, 1.0), (2.0, 1.0), (3.0, 3.0)] and len(values) == 48


def logs_seldom(root) -> list:
    """The CSV rows of rank 0: `seldom` is logged in batch 1 of 4, on both ranks."""

    class Seldom(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                self.log("synced", 1.0 + self.global_rank, sync_dist=True)
                self.log("own", 1.0 + self.global_rank)
            return super().training_step(batch, batch_idx)

    logger = ours.loggers.CSVLogger(root, version=0)
    run = cpu(strategy="ddp", logger=logger, log_every_n_steps=4)
    run.fit(Seldom(), DataLoader(rows(16), 2))
    return [numbers(row) for row in csv_rows(logger)] if run.is_global_zero else []


@pytest.mark.slow
def test_a_seldom_logged_value_of_two_ranks_is_reduced(tmp_path):
    written, _ = launch.call(logs_seldom, 2, str(tmp_path))
    assert [(row["synced"], row["own"]) for row in written if "synced" in row] == [(1.5, 1.0)]


def logging_callback(L):
    class Logs(L.Callback):
        def on_train_start(self, trainer, pl_module):
            self.log("start", 4.0)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.log("begun", float(batch_idx))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.log_dict({"a": float(batch_idx), "b": 2.0}, on_step=True, on_epoch=True)

        def on_train_epoch_end(self, trainer, pl_module):
            self.log("epochs", float(trainer.current_epoch), prog_bar=True)

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.log("val_a", float(batch_idx))

        def on_validation_epoch_end(self, trainer, pl_module):
            self.log("val_end", 3.0)

    return Logs()


def test_a_callback_logs_as_in_lightning(tmp_path):
    written, metrics = both(tmp_path, logging_callback, train_dataloader=loader)
    assert metrics["a_epoch"] == 12.0 and metrics["val_end"] == 3.0 and "start" in metrics
    by_step = [row["a_step"] for row in written if "a_step" in row]
    assert by_step == [9.0, 19.0, 4.0, 14.0, 24.0]


class Outer(Net):
    """Its layer is a LightningModule, inside a plain module."""

    def __init__(self, inner):
        super().__init__()
        self.body = torch.nn.Sequential(inner)

    def forward(self, x):
        return self.body(x)


class Inner(ours.LightningModule):
    def __init__(self, logs):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.logs = logs
        self.epochs = []

    def forward(self, x):
        self.epochs.append((self.trainer.max_epochs, self.current_epoch, self.global_step))
        if self.logs:
            self.log("inner", 1.0)
        return self.layer(x)


def test_an_inner_module_has_the_trainer():
    inner = Inner(logs=False)
    cpu(max_epochs=2).fit(Outer(inner), DataLoader(rows(4), 2))
    assert inner.epochs == [(2, 0, 0), (2, 0, 1), (2, 1, 2), (2, 1, 3)]


def test_an_inner_module_that_logs_names_the_outer_one():
    """Lightning raises an error, too."""
    run = cpu()
    names(
        lambda: run.fit(Outer(Inner(logs=True)), DataLoader(rows(4), 2)),
        "'inner'",
        "Inner",
        "Outer",
    )


def test_a_logger_is_called_by_lightnings_keywords(tmp_path):
    class Keywords(ours.loggers.Logger):
        def __init__(self):
            self.calls = []

        def log_metrics(self, *, metrics, step):
            self.calls.append((sorted(metrics), step))

    logger = Keywords()
    monitor = ours.callbacks.LearningRateMonitor("step")
    run = trainer(ours, tmp_path, logger=logger, log_every_n_steps=2, callbacks=[monitor])
    run.fit(user(ours)())
    assert (["lr-SGD"], 1) in logger.calls
    assert (["epoch", "val_loss"], 2) in logger.calls


def test_a_callback_outside_of_a_run_cannot_log():
    callback = ours.Callback()
    cpu(callbacks=[callback]).fit(make_net(), DataLoader(rows(4), 2))
    names(lambda: callback.log("x", 1.0), "self.log('x')", "hook")
