"""What the Trainer prints besides the progress bar: the model, the start and end of a run."""

import pytest
import torch
from plain_net import Net, rows, trainer
from torch.utils.data import DataLoader

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


def test_without_summary_and_progress_bar_nothing_is_printed(tmp_path, capsys):
    assert output(capsys, trainer(tmp_path)) == ""
