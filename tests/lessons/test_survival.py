"""A killed run resumes to the same result; a rank that dies ends the run with its cause."""

import json
import re
import time

import instrumented
import pytest
import torch
from commands import INSTRUMENTED, planted, run_script, torchrun

BATCH = ("--batch-size", 8)  # 5 steps an epoch on 35 images


def same(one, other) -> bool:
    """To the bit, through dictionaries and lists."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_resume_after_a_kill_is_the_uninterrupted_run_to_the_bit(tmp_path, few_digits):
    """Rank 1 is killed in epoch 2. Dropout shows that its random numbers are the same, too."""
    flags = ("--data", few_digits(), "--epochs", 3, *BATCH)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = torchrun(2, INSTRUMENTED, *flags, "--out", whole, PLANT="dropout")
    assert done.returncode == 0, done.stdout

    plant = {"PLANT": "kill=1:8,dropout", "DEATH": tmp_path / "death"}
    killed = torchrun(2, INSTRUMENTED, *flags, "--out", cut, **plant)
    assert killed.returncode != 0 and "SIGKILL" in killed.stdout, killed.stdout
    assert [path.name for path in cut.iterdir()] == ["last.pt"]

    more = ("--out", cut, "--resume", cut / "last.pt")
    resumed = torchrun(2, INSTRUMENTED, *flags, *more, PLANT="dropout")
    assert resumed.returncode == 0, resumed.stdout
    assert "epoch 1:" not in resumed.stdout and "epoch 2:" in resumed.stdout
    for name in ("last.pt", "model.pt"):
        assert same(*(torch.load(folder / name, weights_only=True) for folder in (whole, cut)))
    assert (cut / "metrics.json").read_text() == (whole / "metrics.json").read_text()


def test_a_run_resumes_with_another_number_of_ranks_and_micro_batches(tmp_path, few_digits):
    """A batch of 12 images: 2 ranks × 1 micro-batch, then 3 ranks × 2 micro-batches."""
    flags = ("--data", few_digits(), "--batch-size", 12, "--out", tmp_path)
    losses = []
    for ranks, more in (
        (1, ("--epochs", 2)),
        (2, ("--epochs", 1)),
        (3, ("--epochs", 2, "--accumulate", 2, "--resume", tmp_path / "last.pt")),
    ):
        done = torchrun(ranks, INSTRUMENTED, *flags, *more)
        assert done.returncode == 0, done.stdout
        losses.append(json.loads((tmp_path / "metrics.json").read_text())["loss"])
    assert losses[2] == pytest.approx(losses[0], abs=1e-6)


SEEDS = """
def train_epoch(*arguments):
    os.write(1, b"seed %d\\n" % torch.initial_seed())
    return 1.0

lesson.train_epoch = train_epoch
"""


def test_each_rank_and_each_epoch_draws_random_numbers_of_its_own(tmp_path, few_digits):
    """The weights are made from one seed; dropout must drop other numbers on each rank."""
    script = planted(tmp_path, "PT_CNN_MultiGPU", SEEDS)
    done = torchrun(2, script, "--data", few_digits(), "--epochs", 2, *BATCH, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    seeds = [line for line in done.stdout.splitlines() if line.startswith("seed")]
    assert len(seeds) == len(set(seeds)) == 4, done.stdout


HALF = """
import signal
save = torch.save

def half(content, target):
    if os.path.exists("results/PT_CNN_MultiGPU/last.pt"):
        target.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    save(content, target)

torch.save = half
"""


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before_it(tmp_path, few_digits):
    script = planted(tmp_path, "PT_CNN_MultiGPU", HALF)
    done = run_script(script, "--data", few_digits(), "--epochs", 3, *BATCH, cwd=tmp_path)
    assert done.returncode == -9, done.stdout
    last = torch.load(tmp_path / "results/PT_CNN_MultiGPU/last.pt", weights_only=True)
    assert len(last["history"]) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_run_with_its_traceback(tmp_path, few_digits, rank):
    death = tmp_path / "death"
    flags = ("--data", few_digits(), "--batch-size", 9, "--out", tmp_path / "out")
    done = torchrun(3, INSTRUMENTED, *flags, PLANT=f"raise={rank}:2", DEATH=death)
    assert time.time() - float(death.read_text()) < 15
    assert done.returncode != 0
    # A rank that the death ends can be torchrun's root cause: its clock counts seconds.
    reports = re.split(r"\btime +:", done.stdout.partition("FAILED")[2])
    named = [report for report in reports if f"rank      : {rank} " in report]
    assert 'raise RuntimeError("planted fault")' in "".join(named), done.stdout


def test_evaluation_is_without_dropout(tmp_path, few_digits):
    """The reported accuracy is that of the model without dropout, to the last of 70 images."""
    path = few_digits(35, 70)
    flags = ("--data", path, "--epochs", 1, *BATCH, "--out", tmp_path)
    done = torchrun(2, INSTRUMENTED, *flags, PLANT="dropout")
    assert done.returncode == 0, done.stdout
    _, test = instrumented.lesson.read_digits(path)
    model = instrumented.Dropout().eval()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    hits = (model(test.tensors[0]).argmax(1) == test.tensors[1]).double().mean().item()
    reported = json.loads((tmp_path / "metrics.json").read_text())
    assert reported["accuracy"] == pytest.approx(hits)


def test_16_bit_is_not_32_bit(tmp_path, few_digits):
    """With --amp the loss is another number, within 5%."""
    losses = []
    flags = ("--data", few_digits(), "--epochs", 2, *BATCH, "--out", tmp_path)
    for more in ((), ("--amp",)):
        done = run_script(INSTRUMENTED, *flags, *more)
        assert done.returncode == 0, done.stdout
        losses.append(json.loads((tmp_path / "metrics.json").read_text())["loss"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
