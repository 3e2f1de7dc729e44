"""What self.log keeps: values, means over rows, names, and where they appear."""

import lightnings
import numpy as np
import pytest
import small_net
import torch
import torch.nn.functional as F
from regression_net import QUIET, Net, batches, trained
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu.errors import UserError
from multigpu.virtual import control

pytestmark = pytest.mark.filterwarnings("ignore")


class Mean(Net):
    """The epoch's mean of the batches' means, which must be the rows' mean."""

    def __init__(self, **keywords):
        super().__init__()
        self.keywords = keywords

    def validation_step(self, batch, batch_idx):
        self.log("mean", sum(batch) / len(batch), **self.keywords)


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


@pytest.mark.parametrize(("strategy", "devices"), [("dp", 4), ("pipeline", 2)])
def test_what_pieces_log_counts_by_their_rows(strategy, devices, request):
    request.addfinalizer(control.stop)

    class Staged(small_net.Net):
        def pipeline_stages(self):
            return [self.layer[0], self.layer[1]]

        def training_step(self, batch, batch_idx):
            logits = self(batch[0])
            loss = F.cross_entropy(logits, batch[1].to(logits.device))
            self.log("l", loss, on_step=True, on_epoch=True)
            return loss * 0.0  # so that validation sees the first weights

    def reported(**keywords) -> tuple:
        torch.manual_seed(0)
        module = Staged()
        module.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
        trainer = L.Trainer(**{"max_epochs": 1, **small_net.QUIET, **keywords})
        trainer.fit(
            module, DataLoader(small_net.rows(10), 10), DataLoader(small_net.rows(10), 10)
        )
        return tuple(
            float(trainer.callback_metrics[name]) for name in ("l_step", "l_epoch", "v")
        )

    if strategy == "pipeline":
        Staged.validation_step = lambda self, batch, i: self.log(
            "v", F.cross_entropy(self(batch[0]).cpu(), batch[1].cpu())
        )
    one = reported(accelerator="cpu")
    assert reported(accelerator="vgpu", devices=devices, strategy=strategy) == pytest.approx(
        one, abs=1e-5
    )


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
        Counts(), logger=L.loggers.CSVLogger(tmp_path), log_every_n_steps=1, max_epochs=2
    ).callback_metrics
    assert found["rows_epoch"] == 40 and "rows_step" not in found
    assert found["mean_step"] == 9 and found["mean_epoch"] == 4.5


@pytest.mark.parametrize("values", [(float("nan"), 1.0), (1.0, float("nan"))])
def test_what_is_no_number_is_told_wherever_it_stood(values):
    class Extremes(Net):
        def validation_step(self, batch, batch_idx):
            self.log("found", values[batch_idx], reduce_fx="max")

    (found,) = L.Trainer(accelerator="cpu", **QUIET).validate(
        Extremes(), batches(8), verbose=False
    )
    assert np.isnan(found["found"])


def test_what_is_logged_is_the_number_of_that_moment():
    class Counting(small_net.Net):
        def on_train_start(self):
            self.count = torch.zeros(())

        def training_step(self, batch, batch_idx):
            self.count += 1
            self.log("count", self.count, reduce_fx="sum", on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    assert small_net.fitted(Counting()).callback_metrics["count"] == 1 + 2 + 3 + 4


def test_a_name_that_is_logged_in_two_ways_is_refused():
    class Twice(small_net.Net):
        def training_step(self, batch, batch_idx):
            self.log("v", 1.0, on_epoch=True)
            self.log("v", 2.0, on_epoch=False)

    with pytest.raises(UserError, match=r"self.log\('v'\).* other arguments .*training_step"):
        small_net.fitted(Twice())


def test_validation_by_step_is_among_the_logged_metrics():
    class Steps(small_net.Net):
        def validation_step(self, batch, batch_idx):
            self.log("v", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)

    trainer = small_net.cpu()
    trainer.validate(Steps(), small_net.loaders()[1], verbose=False)
    assert (
        trainer.logged_metrics == {"v_step": 1.0, "v_epoch": 0.5}
        and trainer.progress_bar_metrics["v_step"] == 1.0
    )


def test_metrics_are_there_in_the_sanity_check_and_gone_after_it():
    seen = {}

    class Looks(Net):
        def on_validation_epoch_end(self):
            seen.setdefault("sanity", float(self.trainer.callback_metrics["val_loss"]))

        def on_train_start(self):
            trainer = self.trainer
            seen["after"] = {
                **trainer.callback_metrics,
                **trainer.logged_metrics,
                **trainer.progress_bar_metrics,
            }

    trained(Looks(), batches(), batches())
    assert seen["sanity"] > 0 and seen["after"] == {}


def test_log_every_n_steps_0_is_never():
    kept = []
    logger = type(
        "Kept",
        (L.loggers.Logger,),
        {"log_metrics": lambda self, metrics, step: kept.append(step)},
    )()
    model = small_net.make_net()
    model.training_step = lambda batch, batch_idx: (
        model.log("x", 1.0),
        small_net.Net.training_step(model, batch, batch_idx),
    )[1]
    small_net.fitted(model, logger=logger, log_every_n_steps=0, max_epochs=1)
    assert set(kept) == {3}, "the epoch's values alone"


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
