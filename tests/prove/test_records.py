"""What a process records of its steps."""

from pathlib import Path

import pytest
import warm

from multigpu.prove import processes
from multigpu.prove.record import Step
from multigpu.prove.settings import Settings

CLOSURE = """
import torch

layer = torch.nn.Linear(2, 1, bias=False)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)


def closure():
    optimizer.zero_grad()
    loss = layer(torch.tensor([[3.0, 4.0]])).sum()
    loss.backward()
    return loss


optimizer.step(closure)
"""


# An optimizer that changes its own learning rate in its step.
FALLING = """
import torch


class Falling(torch.optim.Optimizer):
    def step(self):
        for group in self.param_groups:
            with torch.no_grad():
                group["params"][0] -= group["lr"] * group["params"][0].grad
            group["lr"] *= 0.5


layer = torch.nn.Linear(2, 1, bias=False)
optimizer = Falling(layer.parameters(), {"lr": 0.1})
for _ in range(2):
    optimizer.zero_grad()
    layer(torch.tensor([[3.0, 4.0]])).sum().backward()
    optimizer.step()
"""


# A module that changes the data, as torchvision's RandomCrop, and one in the model.
RANDOM = """
import torch
from torch import nn

layer = nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
x, drop = torch.ones(8, 2), nn.Dropout(0.5)
layer({}).sum().backward()
optimizer.step()
"""


# Modules that draw without torch's functions of dropout.
PATHS = """
import torch
from torch import nn


class DropPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop_prob = 0.5

    def forward(self, x):
        return x * torch.rand(len(x), 1).ge(self.drop_prob) if self.drop_prob else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 3, num_layers=2, dropout=0.5)
        self.path = DropPath()

    def forward(self, x):
        return self.path({})


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(8, 2, requires_grad=True)).sum().backward()
optimizer.step()
"""


@pytest.fixture
def recorded(in_forks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a program in one process; returns its steps."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, **wishes: float) -> list[Step]:
        (tmp_path / "program.py").write_text(text)
        folder = str(tmp_path / f"record-{len(wishes)}")
        settings = Settings(folder, **{"steps": 1, **wishes})
        one = processes.start("one", [str(warm.python()), "program.py"], settings, None)
        processes.wait([one], 60)
        return one.records()[0].steps

    return run


def test_gradients_are_those_that_a_closure_computes(recorded):
    assert recorded(CLOSURE)[0].gradients[0, :2].tolist() == [3.0, 4.0]


def test_a_rate_is_multiplied_during_the_step_alone(recorded):
    for wishes, factor in (({}, 1.0), ({"rate": 0.01}, 0.01)):
        (step,) = recorded(FALLING.replace('group["lr"] *=', "_ ="), **wishes)
        moved = (step.after - step.weights)[0, :2]
        assert moved == pytest.approx([-0.3 * factor, -0.4 * factor], rel=1e-3)
        assert step.options[0]["lr"] == 0.1


def test_a_rate_that_the_step_changes_stays_changed(recorded):
    for wishes, later in (({}, 0.05), ({"rate": 0.01}, 0.0005)):
        rates = [step.options[0]["lr"] for step in recorded(FALLING, steps=2, **wishes)]
        assert rates == pytest.approx([0.1, later])


@pytest.mark.parametrize(
    ("call", "names"), [("layer(drop(x))", []), ("drop(layer(x))", ["Dropout"])]
)
def test_a_module_that_changes_the_data_is_not_the_model(recorded, call, names):
    assert recorded(RANDOM.replace("layer({})", call))[0].random == names


@pytest.mark.parametrize(
    ("through", "name"), [("x", "DropPath path"), ("self.lstm(x)[0]", "")]
)
def test_no_dropout_switches_paths_and_recurrent_layers_off(recorded, through, name):
    drawn = recorded(PATHS.format(through))[0].random
    assert drawn and (name in drawn if name else "LSTM lstm" in drawn)
    assert recorded(PATHS.format(through), no_dropout=True)[0].random == []
