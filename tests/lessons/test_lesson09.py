"""Lesson 09: the Trainer learns what one rank learns; this Trainer and Lightning compared."""

import json
import re

import pytest
import torch
from commands import ROOT, planted, run_script, torchrun

from multigpu import prove

SCRIPT = ROOT / "scripts" / "PTL_multiGPU.py"
PAGE = ROOT / "lessons" / "09-lightning"
FLAGS = ("--epochs", 2, "--batch-size", 8)
FAULTS = {
    "each rank's mean": """
def usual(self, batch, batch_idx):
    loss = lesson.F.cross_entropy(self.cnn(batch[0]), batch[1])
    self.log("loss", loss, on_step=False, on_epoch=True)
    return loss

lesson.LitCNN.training_step = usual
""",
    "the Trainer's own sampler": """
def train_dataloader(self):
    return lesson.DataLoader(self.train, self.batch_size // 2, shuffle=True)

lesson.DigitsData.train_dataloader = train_dataloader
""",
}


def proved(script, data) -> prove.Proof:
    """35 images in batches of 8: the last batch has 3, and the sampler repeats an image."""
    words = [script, "--data", data, *FLAGS, "--devices", 2]
    return prove.run([str(word) for word in words], steps=6, timeout=100)


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(in_forks, few_digits):
    found = proved(SCRIPT, few_digits())
    assert found.verdict == "holds", str(found)


@pytest.mark.slow
def test_with_each_ranks_mean_the_proof_does_not_hold(in_forks, tmp_path, few_digits):
    fault = FAULTS["each rank's mean"]
    found = proved(planted(tmp_path, "PTL_multiGPU", fault), few_digits())
    assert found.verdict != "holds", str(found)


def weights(folder) -> list[torch.Tensor]:
    return list(torch.load(folder / "model.pt").values())


def largest(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def test_a_run_that_is_resumed_is_the_run_that_never_stopped(tmp_path, few_digits):
    """With two ranks at first, then under torchrun: only rank 0 prints."""
    flags = ("--data", few_digits(), "--batch-size", 8)
    whole = run_script(SCRIPT, *flags, "--epochs", 3, "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stdout
    part = (*flags, "--out", tmp_path / "part")
    first = run_script(SCRIPT, *part, "--epochs", 1, "--devices", 2)
    assert first.returncode == 0, first.stdout
    resume = ("--resume", tmp_path / "part" / "last.ckpt")
    rest = torchrun(2, SCRIPT, *part, "--epochs", 3, *resume)
    assert rest.returncode == 0 and "checkpoints" not in rest.stdout, rest.stdout
    lines = re.findall(r"^epoch (\d)", rest.stdout, re.MULTILINE)
    assert lines == ["2", "3"], rest.stdout
    numbers = json.loads((tmp_path / "part" / "metrics.json").read_text())
    assert len(numbers["epochs"]) == 3 and numbers["epochs"][-1]["loss"] == numbers["loss"]
    assert largest(weights(tmp_path / "part"), weights(tmp_path / "whole")) < 1e-5


def test_the_samplers_order_is_why_the_data_module_makes_one(tmp_path, few_digits):
    """With shuffle=True one rank reads in another order than the sampler of several."""
    path = planted(tmp_path, "PTL_multiGPU", FAULTS["the Trainer's own sampler"])
    flags = ("--data", few_digits(32), *FLAGS)
    for script, out in ((SCRIPT, "own"), (path, "shuffle")):
        done = run_script(script, *flags, "--devices", 2, "--out", tmp_path / out)
        assert done.returncode == 0, done.stdout
    assert largest(weights(tmp_path / "own"), weights(tmp_path / "shuffle")) < 1e-6
    path.write_text(path.read_text().replace("// 2", "// 1"))
    done = run_script(path, *flags, "--out", tmp_path / "one")
    assert done.returncode == 0, done.stdout
    assert largest(weights(tmp_path / "own"), weights(tmp_path / "one")) > 1e-4


# ---- the small program ----------------------------------------------------------------------


def own_example(folder, library: str, sync_dist: bool = True) -> tuple[str, str]:
    """(epochs, steps) of own.py with a library, with sync_dist or without."""
    text = (PAGE / "own.py").read_text()
    assert "import multigpu.trainer as L" in text and ", sync_dist=True)" in text
    own = text.replace("multigpu.trainer", library)
    if not sync_dist:
        own = own.replace(", sync_dist=True)", ")")
    folder.mkdir()
    (folder / "own.py").write_text(own)
    done = run_script(folder / "own.py", cwd=folder)
    assert done.returncode == 0 and (folder / "mine.ckpt").exists(), done.stdout
    assert done.stdout.count("\nNet(") == 1, "the checkpoint makes the module, on rank 0"
    (found,) = re.findall(r"^(\d+) epochs, (\d+) steps$", done.stdout, re.MULTILINE)
    return found


@pytest.mark.slow
def test_the_small_program_trains_as_in_lightning(tmp_path):
    pytest.importorskip("lightning")
    this = own_example(tmp_path / "this", "multigpu.trainer")
    assert this == own_example(tmp_path / "lightning", "lightning") == ("9", "36")


@pytest.mark.slow
def test_without_sync_dist_it_stops_earlier_in_lightning(tmp_path):
    """Each rank's EarlyStopping sees its own loss_epoch, and one that stops, stops all."""
    pytest.importorskip("lightning")
    this = own_example(tmp_path / "this", "multigpu.trainer", sync_dist=False)
    lightning = own_example(tmp_path / "lightning", "lightning", sync_dist=False)
    assert (this[0], lightning[0]) == ("9", "6")
