"""A checkpoint holds everything that the next step depends on; a bad one changes nothing."""

import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoints import make
from commands import SUPPORT, run_script

from multigpu import files
from multigpu.checkpoint import Checkpoint
from multigpu.errors import UserError


@pytest.fixture(autouse=True)
def one_rank(no_process_group):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step(checkpoint: Checkpoint) -> list[torch.Tensor]:
    """A step that depends on all random generators."""
    model, optimizer = checkpoint.parts.values()
    optimizer.zero_grad()
    model(torch.randn(5, 3) + np.random.rand() + random.random()).sum().backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_the_next_steps_are_the_same_to_the_bit(tmp_path):
    first = make(tmp_path / "a.pt")
    step(first)
    first.save({"epoch": 3, "history": [0.5]})
    expected = [step(first), step(first)]
    second = make(tmp_path / "a.pt")
    assert second.load("") == {"epoch": 3, "history": [0.5]}
    found = [step(second), step(second)]
    assert all(
        torch.equal(a, b)
        for one, other in zip(expected, found, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_no_file_yet(tmp_path):
    assert make(tmp_path / "a.pt").load("") is None
    assert make(tmp_path / "a.pt").load(None) is None
    with pytest.raises(UserError, match="there is no checkpoint"):
        make(tmp_path / "a.pt").load(tmp_path / "a.pt")


@pytest.mark.parametrize("keep", [0, 10, 500, -1])
def test_truncated(tmp_path, keep):
    make(tmp_path / "a.pt").save({})
    content = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(content[:keep])
    fresh = make(tmp_path / "a.pt")
    before = step(fresh)
    with pytest.raises(UserError, match="truncated or not a checkpoint"):
        fresh.load("")
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, fresh.parts["model"].parameters(), strict=True)
    ), "unchanged"


def test_another_model_and_other_settings(tmp_path):
    make(tmp_path / "a.pt").save({})
    with pytest.raises(
        UserError, match=r"another model: 0\.weight is \(4, 3\) .* and \(5, 3\)"
    ):
        make(tmp_path / "a.pt", width=5).load("")
    with pytest.raises(UserError, match="--seed 0, this run has 1"):
        make(tmp_path / "a.pt", settings={"--seed": 1}).load("")


def test_an_optimizer_of_other_parameters(tmp_path):
    made = make(tmp_path / "a.pt")
    made.parts["optimizer"] = torch.optim.Adam(made.parts["model"][0].parameters())
    made.save({})
    with pytest.raises(UserError, match=r"another model: .* \[2\] parameters .* \[4\]"):
        make(tmp_path / "a.pt").load("")


def test_a_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match=r"is a folder: .*last\.pt"):
        make(tmp_path / "a.pt").load(tmp_path)


def test_weights_that_are_no_numbers_are_not_saved(tmp_path):
    made = make(tmp_path / "a.pt")
    made.save({"epoch": 1})
    torch.nn.init.constant_(made.parts["model"][0].bias, float("nan"))
    with pytest.raises(UserError, match=r"not finite .* lower --lr"):
        made.save({"epoch": 2})
    assert make(tmp_path / "a.pt").load("") == {"epoch": 1}


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (files.write_json, (str(tmp_path / "evil"), 1))

    torch.save({"format": 1, "parts": Evil()}, tmp_path / "a.pt")
    with pytest.raises(UserError):
        make(tmp_path / "a.pt").load("")
    assert not (tmp_path / "evil").exists()


KILLED_WHILE_SAVING = """
import os, signal
from pathlib import Path
import torch
import torch.distributed as dist
from checkpoints import make

def half(content, target, **keywords):
    if not isinstance(target, Path):
        return save(content, target, **keywords)
    target.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
checkpoint = make(Path(sys.argv[1]))
checkpoint.save({"epoch": 1})
save = torch.save
torch.save = half
checkpoint.save({"epoch": 2})
"""


def test_a_kill_in_the_middle_of_a_save_leaves_the_old_file(tmp_path):
    """When it is killed, half of the new file is on the disk, under another name."""
    saver = tmp_path / "saver.py"
    saver.write_text(
        f"import sys\nsys.path.insert(0, {str(SUPPORT)!r})\n{KILLED_WHILE_SAVING}"
    )
    done = run_script(saver, tmp_path / "a.pt")
    assert done.returncode == -signal.SIGKILL, done.stdout
    assert any(path.read_bytes() == b"half" for path in tmp_path.glob(".a.pt.*")), (
        "the process was killed in the middle of the save"
    )
    assert make(tmp_path / "a.pt").load("") == {"epoch": 1}


def test_the_gradient_scaler_is_restored_too(tmp_path):
    def with_scaler(scale: float) -> Checkpoint:
        made = make(tmp_path / "a.pt")
        made.parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=scale)
        # Its state exists from its first use on.
        made.parts["scaler"].scale(torch.ones(1))
        return made

    with_scaler(1024.0).save({})
    later = with_scaler(2.0)
    later.load("")
    assert later.parts["scaler"].get_scale() == 1024.0


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    checkpoint = make(tmp_path / "a.pt")
    checkpoint.save({"epoch": 1})

    def full(content, target, save=torch.save, **keywords):
        if not isinstance(target, Path):
            return save(content, target, **keywords)
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"no space left .* checkpoint before it is untouched"):
        checkpoint.save({"epoch": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    assert make(tmp_path / "a.pt").load("") == {"epoch": 1}
