"""A killed run resumes to the same result; a rank that dies ends the run with its cause."""

import time

import instrumented
import psutil
import pytest
import torch
import warm
from commands import INSTRUMENTED, SCRIPT, run, run_script, torchrun

from multigpu import data

FLAGS = ("--epochs", 2, "--batch-size", 8, "--save-every", 2)  # 5 steps an epoch on 35 images


def start(how: str, ranks: int, *flags, **environment):
    if how == "torchrun":
        return torchrun(ranks, INSTRUMENTED, *flags, **environment)
    return run_script(INSTRUMENTED, "--spawn", ranks, *flags, **environment)


def same(one, other) -> bool:
    """To the bit, through dictionaries and lists."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(("step", "kind"), [(3, "plain"), (5, "dropout"), (8, "dropout")])
def test_resume_after_a_kill_is_the_uninterrupted_run_to_the_bit(tmp_path, npz, step, kind):
    """Killed within epoch 1, just before it is saved, and within epoch 2.

    Dropout shows that the random numbers continue where they were.
    """
    flags = ("--data", npz(), *FLAGS)
    whole_folder = tmp_path / "whole"
    cut_folder = tmp_path / "cut"
    assert start("spawn", 2, *flags, "--out", whole_folder, PLANT=kind).returncode == 0

    plant = {"PLANT": f"kill=1:{step},{kind}", "DEATH": tmp_path / "death"}
    killed = start("spawn", 2, *flags, "--out", cut_folder, **plant)
    assert killed.returncode == 128 + 9, killed.stdout
    early = torch.load(cut_folder / "last.pt", weights_only=True)["position"]
    steps_saved = early["epoch"] * 5 + early["step"]
    assert steps_saved in (step - 1, step - 2), "the kill came at another step"

    resumed = start("spawn", 2, *flags, "--out", cut_folder, "--resume", PLANT=kind)
    assert resumed.returncode == 0, resumed.stdout
    announced = f"resumed from {cut_folder / 'last.pt'}: {early['epoch']} epoch"
    assert announced in resumed.stdout
    whole = torch.load(whole_folder / "last.pt", weights_only=True)
    cut = torch.load(cut_folder / "last.pt", weights_only=True)
    assert same(whole["parts"], cut["parts"])
    for a, b in zip(whole["random"], cut["random"], strict=True):
        assert same(a["torch"], b["torch"])
    whole_losses = [row["loss"] for row in whole["position"]["history"]]
    cut_losses = [row["loss"] for row in cut["position"]["history"]]
    assert whole_losses == pytest.approx(cut_losses, abs=1e-12)


def test_a_checkpoint_that_is_done_already_and_one_that_is_not_there_yet(tmp_path, npz):
    flags = ("--data", npz(), "--batch-size", 8, "--out", tmp_path / "o", "--resume")
    assert "no checkpoint in" in start("spawn", 1, *flags, "--epochs", 2).stdout
    done = start("spawn", 1, *flags, "--epochs", 1)
    assert done.returncode == 0, done.stdout
    assert "2 epochs done, and --epochs 1 asks for no more" in done.stdout


def test_each_rank_draws_random_numbers_of_its_own(tmp_path, npz):
    """The weights are made from one seed; dropout must drop other numbers on each rank."""
    flags = ("--data", npz(), "--epochs", 1, "--batch-size", 8, "--out", tmp_path)
    done = start("spawn", 2, *flags, PLANT="dropout")
    assert done.returncode == 0, done.stdout
    first, second = torch.load(tmp_path / "last.pt", weights_only=True)["random"]
    assert not torch.equal(first["torch"], second["torch"])


def test_a_kill_between_two_saves_leaves_the_checkpoint_alone(tmp_path, npz):
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path / "o")
    start("spawn", 2, *flags, PLANT="kill=0:4", DEATH=tmp_path / "death")
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["last.pt"]


@pytest.mark.parametrize("how", ["torchrun", "spawn"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_run_with_its_traceback(tmp_path, npz, how, rank):
    death = tmp_path / "death"
    flags = ("--data", npz(), "--batch-size", 9, "--out", tmp_path)
    done = start(how, 3, *flags, PLANT=f"raise={rank}:2", DEATH=death)
    assert time.time() - float(death.read_text()) < 15
    assert done.returncode not in (0, 2)
    # the traceback of the rank that died
    assert 'raise RuntimeError("planted fault")' in done.stdout
    if how == "torchrun":
        # torchrun's own summary has the traceback, too
        assert "To enable traceback see" not in done.stdout
    if how == "spawn":
        assert f"rank {rank} died" in done.stdout
        # the other ranks' failures would hide the cause
        assert "Connection closed by peer" not in done.stdout


def test_torchrun_starts_the_ranks_again(tmp_path, npz):
    """torchrun's store stays: what the first start wrote must not disturb the second."""
    (tmp_path / "once.py").write_text(
        "import os, sys, runpy\n"
        "if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    from torch.optim.optimizer import register_optimizer_step_post_hook as hook\n"
        "    hook(lambda *_: 1 / 0)\n"
        "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    flags = ("--data", npz(), *FLAGS, "--prove", "--resume", "--out", tmp_path / "out")
    local = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    once = tmp_path / "once.py"
    done = run(warm.torchrun(), *local, "--max-restarts=1", once, SCRIPT, *flags)
    assert done.returncode == 0, done.stdout
    assert "ZeroDivisionError" in done.stdout
    assert "holds" in done.stdout


def test_a_checkpoint_within_an_epoch_that_is_not_asked_for(tmp_path, npz):
    flags = ("--data", npz(), "--batch-size", 8, "--save-every", 2, "--out", tmp_path / "o")
    start("spawn", 1, *flags, "--epochs", 2, PLANT="kill=0:8", DEATH=tmp_path / "death")
    done = start("spawn", 2, *flags, "--epochs", 1, "--resume")
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("1 epoch and 2 steps done") == 1
    assert "give --epochs 2 or more" in done.stdout


def test_a_rank_that_dies_while_another_sleeps_ends_the_run(tmp_path):
    """The other rank is in no collective that would fail: the launcher must end it."""
    (tmp_path / "sleepy.py").write_text(
        "import sys, time\n"
        "from multigpu import launch\n"
        "def work():\n"
        "    if launch.find().rank == 1:\n"
        "        raise ValueError('planted fault')\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(launch.spawn(work, 2))\n"
    )
    began = time.time()
    done = run_script(tmp_path / "sleepy.py", timeout=60)
    assert done.returncode == 1, done.stdout
    assert "planted fault" in done.stdout
    assert time.time() - began < 30


def test_the_script_leaves_no_process_behind(tmp_path, npz):
    """Identified by their environment: a spawned rank's command line is not specific."""
    death = tmp_path / "death"
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path / "out")
    start("spawn", 2, *flags, PLANT="kill=1:2", DEATH=death)
    assert death.exists()
    left = [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("DEATH") == str(death)
    ]
    assert not left


def test_a_run_resumes_with_another_number_of_ranks_and_micro_batches(tmp_path, npz):
    """A global batch of 12 images: 2 ranks × 1 micro-batch, then 3 ranks × 2 micro-batches."""
    flags = ("--data", npz(), "--epochs", 2, "--batch-size", 12, "--save-every", 2)
    flags += ("--out", tmp_path / "o")
    start("spawn", 2, *flags, PLANT="kill=1:3", DEATH=tmp_path / "death")
    done = start("spawn", 3, *flags, "--accumulate", 2, "--resume", "--prove")
    assert done.returncode == 0, done.stdout
    assert "holds" in done.stdout


def test_evaluation_is_without_dropout(tmp_path, npz):
    """The reported accuracy is that of the model without dropout, to the last of 70 images."""
    path = npz(35, 70)
    flags = ("--data", path, "--epochs", 1, "--batch-size", 8, "--out", tmp_path)
    done = start("spawn", 2, *flags, PLANT="dropout")
    assert done.returncode == 0, done.stdout
    content = torch.load(tmp_path / "last.pt", weights_only=True)
    _, test = data.load(path)
    model = instrumented.Dropout((1, 8, 8), 3).eval()
    model.load_state_dict(content["parts"]["model"])
    hits = (model(test.tensors[0]).argmax(1) == test.tensors[1]).double().mean().item()
    assert content["position"]["history"][0]["test_accuracy"] == pytest.approx(hits)


def test_16_bit_is_not_32_bit(tmp_path, npz):
    """With --amp the loss is another number, within 5%."""
    losses = []
    flags = ("--data", npz(), "--epochs", 2, "--batch-size", 8, "--out", tmp_path)
    for more in ((), ("--amp",)):
        done = start("spawn", 1, *flags, *more)
        assert done.returncode == 0, done.stdout
        content = torch.load(tmp_path / "last.pt", weights_only=True)
        losses.append(content["position"]["history"][-1]["loss"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
