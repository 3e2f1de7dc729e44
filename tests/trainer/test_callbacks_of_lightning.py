"""Callbacks that people import: each does what Lightning's does, side by side."""

import lightnings
import plain_net
import pytest
import torch
from torch.utils.data import DataLoader
from trainer_user import trainer
from user_methods import user

import multigpu.trainer as ours

pytestmark = pytest.mark.filterwarnings("ignore")


def both():
    return ours, lightnings.package()


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
