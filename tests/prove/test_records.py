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


@pytest.fixture
def recorded(in_forks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a program in one process; returns its steps."""
    monkeypatch.chdir(tmp_path)

    def run(text: str) -> list[Step]:
        (tmp_path / "program.py").write_text(text)
        settings = Settings(str(tmp_path / "record"), steps=1)
        one = processes.start("one", [str(warm.python()), "program.py"], settings, None)
        processes.wait([one], 60)
        return one.records()[0].steps

    return run


def test_gradients_are_those_that_a_closure_computes(recorded):
    assert recorded(CLOSURE)[0].gradients[0, :2].tolist() == [3.0, 4.0]
