"""What the Trainer prints besides the progress bar: the model, the start and end of a run."""

import pytest
import torch
from plain_net import Net, rows, trainer
from torch.utils.data import DataLoader

from multigpu.trainer import callbacks

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_summary_counts_the_parameters(tmp_path, capsys):
    net = Net()
    net.frozen = torch.nn.Linear(3, 1).requires_grad_(False)
    run = trainer(tmp_path, enable_model_summary=True)
    run.fit(net, DataLoader(rows(), 4))
    line = "Net: 14 parameters, 10 of them trained; single_device on 1 rank, cpu, 32-true\n"
    assert capsys.readouterr().out == line


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
