"""What the Trainer prints besides the progress bar: the model, the start and end of a run."""

import re

import pytest
import torch
from plain_net import Net, rows, trainer
from torch.utils.data import DataLoader

from multigpu.trainer import callbacks
from multigpu.trainer.summary import summarize

pytestmark = pytest.mark.filterwarnings("ignore")


class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.body = torch.nn.Sequential(torch.nn.Linear(300, 10), torch.nn.ReLU())
        self.head = torch.nn.Linear(10, 2).requires_grad_(False).eval()


def cells(text):
    """The table's rows as lists, and the totals by name."""
    lines = text.splitlines()
    table = [[cell.strip() for cell in line.split("|")] for line in lines if "|" in line]
    totals = [re.fullmatch(r"([\d.,]+) +([^|]+)", line) for line in lines]
    return table, {match[2]: match[1] for match in totals if match}


def test_the_summary_has_a_row_per_module_and_the_totals():
    table, totals = cells(summarize(Parts()))
    assert table[0] == ["", "Name", "Type", "Params", "Mode"]
    assert table[1:] == [
        ["0", "body", "Sequential", "3,010", "train"],
        ["1", "head", "Linear", "22", "eval"],
        ["2", "other params", "n/a", "2", "n/a"],
    ]
    assert totals == {
        "Trainable params": "3,012",
        "Non-trainable params": "22",
        "Total params": "3,034",
        "Total estimated model params size (MB)": "0.012",
    }


@pytest.mark.parametrize(("depth", "expected"), [(1, 2), (2, 4), (-1, 4)])
def test_the_depth_selects_the_modules(depth, expected):
    table, _ = cells(summarize(Parts(), depth))
    assert len(table) == 1 + expected + 1


def test_a_lazy_layer_counts_as_nothing_yet():
    model = torch.nn.Sequential(torch.nn.LazyLinear(3))
    assert cells(summarize(model))[1]["Total params"] == "0"


def test_totals_are_lightnings():
    import lightnings
    from user_methods import user

    lightning = lightnings.package()
    summary = lightning.pytorch.utilities.model_summary.summarize(user(lightning)())
    _, totals = cells(summarize(user(lightning)()))
    assert totals["Total params"] == str(summary.total_parameters)
    assert totals["Trainable params"] == str(summary.trainable_parameters)


def output(capsys, run, *args, **keywords):
    capsys.readouterr()
    run.fit(Net(), DataLoader(rows(), 4), *args, **keywords)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"max_epochs": 2}, "`max_epochs=2` reached"),
        ({"max_steps": 3, "max_epochs": -1}, "`max_steps=3` reached"),
    ],
)
def test_the_end_of_a_run_names_its_reason(tmp_path, capsys, arguments, reason):
    run = trainer(tmp_path, enable_progress_bar=True, **arguments)
    assert f"`Trainer.fit` stopped: {reason}." in output(capsys, run)


def test_a_resumed_run_names_its_checkpoint(tmp_path, capsys):
    checkpoint = callbacks.ModelCheckpoint(tmp_path, save_last=True)
    trainer(tmp_path, callbacks=[checkpoint], enable_checkpointing=True).fit(
        Net(), DataLoader(rows(), 4)
    )
    path = checkpoint.last_model_path
    run = trainer(tmp_path, max_epochs=2, enable_progress_bar=True)
    text = output(capsys, run, ckpt_path=path)
    assert f"Restoring states from the checkpoint path at {path}" in text
    assert f"Restored all states from the checkpoint at {path}" in text
    run.validate(Net(), DataLoader(rows(), 4), ckpt_path=path, verbose=False)
    assert f"Loaded model weights from the checkpoint at {path}" in capsys.readouterr().out


def test_without_summary_and_progress_bar_nothing_is_printed(tmp_path, capsys):
    assert output(capsys, trainer(tmp_path)) == ""
