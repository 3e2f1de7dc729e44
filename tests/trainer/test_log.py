"""What may be logged, in which hook, and where it appears: each test is for a past bug."""

from collections import UserDict
from dataclasses import dataclass

import lightnings
import numpy as np
import pytest
import torch
from regression_net import QUIET, Net, batches, trained
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu.errors import UserError
from multigpu.trainer.loops.results import Results


@dataclass
class Rows:
    x: torch.Tensor


class Mean(Net):
    """The epoch's mean of the batches' means, which must be the rows' mean."""

    def __init__(self, **keywords):
        super().__init__()
        self.keywords = keywords

    def validation_step(self, batch, batch_idx):
        x = (
            batch
            if isinstance(batch, list)
            else batch.x
            if isinstance(batch, Rows)
            else batch["x"]
        )
        self.log("mean", sum(x) / len(x), **self.keywords)


FORMS = {
    "a mapping that is no dict": lambda rows: UserDict({"name": "x", "x": torch.stack(rows)}),
    "a dataclass": lambda rows: Rows(torch.stack(rows)),
    "a dict": lambda rows: {"number": 7, "x": torch.stack(rows)},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_mean_counts_the_rows_of(form):
    loader = DataLoader(torch.arange(5.0), 4, collate_fn=FORMS[form])
    assert L.Trainer(accelerator="cpu", **QUIET).validate(Mean(), loader, verbose=False) == [
        {"mean": 2.0}
    ]


def test_a_batch_without_a_tensor_asks_for_batch_size():
    trainer, model = L.Trainer(accelerator="cpu", **QUIET), Mean()
    loader = DataLoader([1.0, 2.0, 3.0, 4.0, 5.0], 4, collate_fn=list)
    with pytest.raises(UserError, match="give batch_size="):
        trainer.validate(model, loader, verbose=False)
    model.keywords = {"reduce_fx": "max"}  # which counts no rows
    assert trainer.validate(model, loader, verbose=False) == [{"mean": 5.0}]
    model.validation_step = lambda batch, batch_idx: model.log(
        "mean", sum(batch) / len(batch), batch_size=len(batch)
    )
    assert trainer.validate(model, loader, verbose=False) == [{"mean": 3.0}]


SILENT = [
    "setup",
    "configure_optimizers",
    "on_fit_start",
    "on_sanity_check_start",
    "on_validation_end",
    "on_train_end",
    "on_fit_end",
    "lr_scheduler_step",
    "on_save_checkpoint",
    "predict_step",
    "on_predict_epoch_end",
]
NAMELESS = ["teardown", "on_validation_model_zero_grad", "on_after_batch_transfer"]


def run_all(model: Net, folder: object) -> None:
    trainer = trained(
        model, batches(), batches(), enable_checkpointing=True, default_root_dir=folder
    )
    trainer.predict(model, batches())


def logging_in(hook: str) -> Net:
    """A module that logs in this hook, and goes on as it would without."""

    class Silent(Net):
        def predict_step(self, batch, batch_idx):
            return None

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def logs(self, *args):
        self.log("here", 1.0)
        return getattr(Silent, hook)(self, *args)

    return type("Logs", (Silent,), {hook: logs})()


@pytest.mark.parametrize("hook", SILENT + NAMELESS)
def test_where_nothing_collects_log_says_so(hook, tmp_path):
    where = f"in {hook}" if hook in SILENT else "outside of the steps and their hooks"
    if hook == "on_sanity_check_start":  # only callbacks have it
        callback = type(
            "Sanity",
            (L.Callback,),
            {hook: lambda self, trainer, module: module.log("here", 1.0)},
        )()
        with pytest.raises(UserError, match=where):
            trained(Net(), batches(), batches(), callbacks=[callback])
        return
    with pytest.raises(UserError, match=rf"self.log\('here'\) {where}: "):
        run_all(logging_in(hook), tmp_path)


COLLECTING = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "configure_gradient_clipping",
    "optimizer_zero_grad",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
]


@pytest.mark.parametrize("hook", COLLECTING)
def test_where_something_collects(hook):
    assert trained(logging_in(hook), batches(), batches()).callback_metrics["here"] == 1.0


def test_numbers_of_numpy_are_logged():
    class Numbers(Net):
        def training_step(self, batch, batch_idx):
            self.log_dict(
                {"float32": np.float32(1.5), "int64": np.int64(3), "float64": np.float64(0.5)}
            )
            return super().training_step(batch, batch_idx)

    metrics = trained(Numbers()).callback_metrics
    assert (metrics["float32"], metrics["int64"], metrics["float64"]) == (1.5, 3.0, 0.5)
    with pytest.raises(UserError, match="expected one number"):
        Numbers.training_step = lambda self, batch, batch_idx: self.log("x", "1.5")
        trained(Numbers())


def test_a_metric_that_was_updated_has_no_value_by_step(tmp_path):
    metrics = pytest.importorskip("torchmetrics")

    class Counts(Net):
        def __init__(self):
            super().__init__()
            self.rows, self.mean = metrics.SumMetric(), metrics.MeanMetric()

        def training_step(self, batch, batch_idx):
            self.rows.update(len(batch[0]))
            self.mean(batch_idx)
            self.log("rows", self.rows, on_step=True, on_epoch=True, prog_bar=True)
            self.log("mean", self.mean, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    found = trained(
        Counts(), logger=L.loggers.CSVLogger(tmp_path), log_every_n_steps=1
    ).callback_metrics
    assert found["rows_epoch"] == 40 and "rows_step" not in found
    assert found["mean_step"] == 9 and found["mean_epoch"] == 4.5


def axes(lightning) -> list[tuple[int, list[str]]]:
    """Where each row of a run stands on the x axis, by a logger of the user's."""

    class Axes(lightning.pytorch.loggers.CSVLogger):
        def log_metrics(self, metrics, step=None):
            found.append((step, sorted(set(metrics) - {"epoch"})))

        def save(self): ...

    class Scored(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            self.log("mine", 1.0, on_step=False, on_epoch=True)
            return self.layer(batch[0]).mean()

        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("seen", 1.0, on_step=True, on_epoch=False)

        def on_train_epoch_end(self):
            self.log("step", 100.0 + self.current_epoch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found: list = []
    trainer = lightning.Trainer(
        **{**QUIET, "logger": Axes("."), "max_epochs": 2, "accelerator": "cpu"}
    )
    trainer.fit(Scored(), batches(8), [batches(8), batches(4)])
    return found


def test_where_rows_stand_is_as_in_lightning():
    expected = axes(lightnings.package())
    assert axes(L) == expected
    assert [step for step, names in expected if "seen/dataloader_idx_0" in names] == [
        0,
        1,
        2,
        3,
    ]  # over both epochs
    assert [step for step, names in expected if "mine" in names] == [
        100,
        101,
    ]  # where the logged "step" says


def test_infinities_of_two_ranks_make_no_number():
    """One rank's loss may have overflowed above, the other's below: a mean of that is nan, and
    no error.
    """

    def gather(mine):
        (key,) = mine
        settings, total, *weight = mine[key]
        return [mine, {key: (settings, -total, *weight)}]

    results = Results(gather, ranks=2, training=True)
    settings = (False, None, True, True, "mean", True, True, 1, False)
    results.log("training_step", None, "loss", float("inf"), *settings)
    assert results.step_metrics(exchange=True).logger["loss_step"].isnan()
    assert results.epoch_metrics().logger["loss_epoch"].isnan()


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("values", [(float("nan"), 1.0), (1.0, float("nan"))])
def test_what_is_no_number_is_told_wherever_it_stood(reduce, values):
    class Extremes(Net):
        def validation_step(self, batch, batch_idx):
            self.log("found", values[batch_idx], reduce_fx=reduce)

    (found,) = L.Trainer(accelerator="cpu", **QUIET).validate(
        Extremes(), batches(8), verbose=False
    )
    assert np.isnan(found["found"])
