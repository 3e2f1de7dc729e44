"""Callbacks that people import: each does what Lightning's does, side by side."""

import lightnings
import plain_net
import pytest
import torch
from torch.utils.data import DataLoader
from trainer_user import trainer
from user_methods import user

import multigpu.trainer as ours
from multigpu.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")


def both():
    return ours, lightnings.package()


def test_a_lambda_callback_calls_its_functions(tmp_path):
    found = []
    for L in both():
        seen = []
        callback = L.pytorch.callbacks.LambdaCallback(
            on_train_start=lambda *_, seen=seen: seen.append("start"),
            on_train_batch_end=lambda *arguments, seen=seen: seen.append(arguments[-1]),
        )
        trainer(L, tmp_path, max_epochs=1, callbacks=[callback]).fit(user(L)())
        found.append(seen)
    assert found[0] == found[1] == ["start", 0, 1, 2]
    with pytest.raises(UserError, match="on_train_begin"):
        ours.callbacks.LambdaCallback(on_train_begin=print)


def test_the_batches_per_step_change_with_the_epoch(tmp_path):
    steps = []
    for L in both():
        callback = L.pytorch.callbacks.GradientAccumulationScheduler({1: 2, 3: 3})
        reached = []
        note = L.pytorch.callbacks.LambdaCallback(
            on_train_epoch_end=lambda t, m, reached=reached: reached.append(t.global_step)
        )
        trainer(L, tmp_path, max_epochs=4, callbacks=[callback, note]).fit(user(L)())
        steps.append(reached)
    assert steps[0] == steps[1] == [3, 5, 7, 8]


@pytest.mark.parametrize("scheduling", [{}, {-1: 2}, {0: 0}, {"0": 1}], ids=str)
def test_a_scheduling_that_makes_no_sense_is_refused(scheduling):
    with pytest.raises(UserError):
        ours.callbacks.GradientAccumulationScheduler(scheduling)


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_prediction_writer_gets_outputs_and_rows(tmp_path, interval, workers):
    found = []
    for L in both():
        seen = []

        def on_batch(self, trainer, module, prediction, rows, batch, index, loader, seen=seen):
            seen.append((len(prediction), rows, index, loader))

        def on_epoch(self, trainer, module, predictions, rows, seen=seen):
            seen.append(([len(each) for each in predictions], rows))

        base = L.pytorch.callbacks.BasePredictionWriter
        writer = type(
            "W", (base,), {"write_on_batch_end": on_batch, "write_on_epoch_end": on_epoch}
        )(interval)
        module = user(L, predict_step=lambda self, batch, batch_idx: batch)()
        loader = DataLoader(torch.arange(10), 4, num_workers=workers)
        run = trainer(L, tmp_path, callbacks=[writer])
        run.predict(module, loader, return_predictions=False)
        found.append(seen)
    assert found[0] == found[1] and found[0]


def test_a_backbone_is_frozen_and_then_trained(tmp_path):
    """The learning rates of all groups, in each epoch."""

    def __init__(self):
        super(type(self), self).__init__()
        self.backbone = torch.nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.backbone(x))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)

    found = []
    for L in both():
        rates = []
        note = L.pytorch.callbacks.LambdaCallback(
            on_train_epoch_end=lambda t, m, rates=rates: rates.append(
                [group["lr"] for group in t.optimizers[0].param_groups]
            )
        )
        module = user(
            L, __init__=__init__, forward=forward, configure_optimizers=configure_optimizers
        )()
        tuning = L.pytorch.callbacks.BackboneFinetuning(1, lambda epoch: 3.0)
        trainer(L, tmp_path, max_epochs=5, callbacks=[tuning, note]).fit(module)
        found.append(rates)
    assert found[0] == [pytest.approx(rates) for rates in found[1]]
    assert [len(rates) for rates in found[0]] == [1, 2, 2, 2, 2]


def test_a_model_summary_says_how_deep_the_table_goes(tmp_path, capsys):
    class Deep(plain_net.Net):
        def __init__(self):
            super().__init__()
            self.part = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1)))

    for depth, shown in ((0, False), (1, False), (3, True)):
        summary = ours.callbacks.ModelSummary(max_depth=depth)
        run = plain_net.trainer(tmp_path, callbacks=[summary], enable_model_summary=True)
        run.fit(Deep(), DataLoader(plain_net.rows(), 4))
        printed = capsys.readouterr().out
        assert ("part.0.0" in printed) == shown
        assert ("Total params" in printed) == (depth > 0)


def test_torchs_profiler_names_the_trainers_actions(tmp_path, capsys):
    run = plain_net.trainer(tmp_path, profiler="pytorch")
    run.fit(plain_net.Net(), DataLoader(plain_net.rows(), 4))
    printed = capsys.readouterr().out
    assert "training_step" in printed and "aten::" in printed
    assert list(tmp_path.glob("fit-0.pt.trace.json"))
