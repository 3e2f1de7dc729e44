"""Lesson 12: a run that is killed and started again equals a run without a stop."""

import json
import sys
import time
from pathlib import Path

import faults
import pytest
import torch
import warm
from commands import ROOT, SILENT_DDP, free_ports, planted, run, run_script
from small_data import write_digits

from multigpu import prove

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_Elastic as lesson

SCRIPT = ROOT / "scripts" / "PT_CNN_Elastic.py"
LOCAL = ("--standalone", "--local-addr=127.0.0.1")


def elastically(ranks: int, path: Path, *flags: object, restarts: int = 1, **environment):
    """Under torchrun, which starts the ranks again at most `restarts` times."""
    command = (warm.torchrun(), *LOCAL, f"--nproc-per-node={ranks}")
    return run(*command, f"--max-restarts={restarts}", path, *flags, **environment)


def curve(out: Path) -> list[list]:
    return json.loads((out / "metrics.json").read_text())["curve"]


# ---- the order, and each rank's part of it --------------------------------------------------


@pytest.mark.parametrize("batch_size", [64, 10, 1437])
def test_each_image_counts_once_whatever_ranks_share_the_epoch(batch_size):
    """Their number changes after each batch, and does not divide it."""
    order = lesson.order_of_epoch(1437, seed=3, epoch=2)
    assert sorted(order.tolist()) == list(range(1437))
    seen = []
    for step, batch in enumerate(order.split(batch_size)):
        ranks = 1 + step % 5
        shards = [lesson.own_shard(batch, rank, ranks) for rank in range(ranks)]
        assert len({len(shard) for shard in shards}) == 1, "all ranks make the same step"
        for rank, shard in enumerate(shards):
            weight = torch.arange(len(shard)) * ranks + rank < len(batch)
            seen += shard[weight].tolist()
    assert sorted(seen) == list(range(1437))


def test_each_epoch_has_another_order():
    orders = [tuple(lesson.order_of_epoch(50, 0, epoch).tolist()) for epoch in range(3)]
    assert len(set(orders)) == 3


# ---- killed, stopped, started again ---------------------------------------------------------

FLAGS = ("--batch-size", 8, "--save-every", 3)  # 5 steps an epoch on 35 images


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "step"), [(1, 7), (0, 2)])
def test_a_killed_rank_changes_no_bit(tmp_path, few_digits, rank, step):
    """Also if there is no checkpoint yet. --prove trains again without a stop."""
    flags = ("--data", few_digits(), *FLAGS, "--epochs", 3, "--out", tmp_path / "out")
    done = elastically(2, SCRIPT, *flags, "--kill", rank, step, "--prove")
    assert done.returncode == 0, done.stdout
    assert "2 ranks, 2 starts, equal a run without a stop" in done.stdout
    assert "max difference 0.0e+00, limit 0e+00: holds" in done.stdout
    assert "another rank has ended" in done.stdout and "Traceback" not in done.stdout
    starts = [start for _, _, start in curve(tmp_path / "out")]
    saved = step - step % 3 if step > 3 else 0
    assert starts == [1] * saved + [2] * (15 - saved)
    lesson.CNN().load_state_dict(torch.load(tmp_path / "out" / "model.pt"))


@pytest.mark.slow
def test_the_same_command_goes_on_after_its_kill(tmp_path, few_digits):
    """--kill acts in the first start alone, also if the user, not torchrun, starts the second.

    The second start comes to step 7, too: the newest checkpoint is that of step 6.
    """
    flags = ("--data", few_digits(), *FLAGS, "--epochs", 3, "--out", tmp_path / "out")
    command = (2, SCRIPT, *flags, "--kill", 1, 7, "--prove")
    assert elastically(*command, restarts=0).returncode == 1
    done = elastically(*command, restarts=0)
    assert done.returncode == 0, done.stdout
    assert "start 2: epoch 2, 8 images done" in done.stdout
    assert "2 ranks, 2 starts, equal a run without a stop" in done.stdout


def cut_newest(out: Path) -> None:
    """Cut the newest checkpoint by one byte: that of an epoch's end, if the run has ended."""
    path = max((out / "checkpoints").glob("step-*.pt"))
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_in_the_middle_of_an_epoch(tmp_path, few_digits):
    """2 ranks, then 3, then 1: 35 images in batches of 8 are divided by neither."""
    out = tmp_path / "out"
    flags = ("--data", few_digits(), *FLAGS, "--out", out, "--epochs")
    for ranks, epochs in ((2, 1), (3, 2)):
        done = elastically(ranks, SCRIPT, *flags, epochs)
        assert done.returncode == 0, done.stdout
        cut_newest(out)
    done = run_script(SCRIPT, *flags, 3, "--prove")
    assert done.returncode == 0, done.stdout
    assert "start 3: epoch 2, 32 images done" in done.stdout
    assert "1 and 2 and 3 ranks, 3 starts, equal 1 rank without a stop" in done.stdout
    assert [size for _, size, _ in curve(out)] == [2] * 3 + [3] * 6 + [1] * 6


@pytest.mark.slow
def test_a_stop_after_an_epochs_last_step_leaves_only_the_evaluation(tmp_path, few_digits):
    fault = (
        "from multigpu.elastic import signals\n"
        "shard, steps = lesson.own_shard, []\n"
        "def own_shard(*arguments):\n"
        "    steps.append(1)\n"
        "    if len(steps) == 5:\n"
        "        signals.note(lesson.signal.SIGUSR1)\n"
        "    return shard(*arguments)\n"
        "lesson.own_shard = own_shard\n"
    )
    flags = ("--data", few_digits(), *FLAGS, "--out", tmp_path / "out", "--epochs", 1)
    stopped = run_script(planted(tmp_path, "PT_CNN_Elastic", fault), *flags)
    assert "SIGUSR1 after step 5: saved" in stopped.stdout, stopped.stdout
    done = run_script(SCRIPT, *flags, "--prove")
    assert done.returncode == 0, done.stdout
    assert "start 2: epoch 1, 35 images done" in done.stdout
    assert "epoch 1: loss" in done.stdout and "holds" in done.stdout


# ---- planted faults -------------------------------------------------------------------------

IF_RESUMED = {
    "the optimizer's state is not saved": (
        "init = lesson.Run.__init__\n"
        "def less(run, *arguments):\n"
        "    init(run, *arguments)\n"
        "    del run.parts['optimizer']\n"
        "lesson.Run.__init__ = less\n"
    ),
    "only the rest is permuted": (
        "old = lesson.train_epoch\n"
        "def train_epoch(run, train):\n"
        "    done = run.position.images\n"
        "    def order(images, seed, epoch):\n"
        "        generator = torch.Generator().manual_seed(seed + epoch)\n"
        "        rest = torch.randperm(images - done, generator=generator) + done\n"
        "        return torch.cat([torch.arange(done), rest])\n"
        "    lesson.order_of_epoch = order\n"
        "    return old(run, train)\n"
        "lesson.train_epoch = train_epoch\n"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IF_RESUMED)
def test_with_a_fault_a_killed_run_has_other_bits(tmp_path, few_digits, name):
    path = planted(tmp_path, "PT_CNN_Elastic", IF_RESUMED[name])
    flags = ("--data", few_digits(), *FLAGS, "--out", tmp_path / "out", "--epochs", 2)
    done = elastically(2, path, *flags, "--kill", 1, 7, "--prove")
    assert done.returncode == 1
    assert "equal a run without a stop" in done.stdout
    assert "limit 0e+00: fails" in done.stdout, done.stdout


@pytest.mark.slow
def test_without_the_average_the_ranks_are_not_equal(tmp_path, few_digits):
    """Rank 0 alone would have the same weights in both runs."""
    path = planted(tmp_path, "PT_CNN_Elastic", SILENT_DDP)
    flags = ("--data", few_digits(), *FLAGS, "--out", tmp_path / "out", "--epochs", 1)
    done = elastically(2, path, *flags, "--prove", restarts=0)
    assert done.returncode == 1
    assert "2 ranks, 1 start, equal a run without a stop" in done.stdout
    assert "limit 0e+00: fails" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "verdict"), [("rank < len(batch)", "holds"), ("rank < len(train)", "fails")]
)
def test_two_ranks_equal_one_unless_a_repeated_image_counts(
    in_forks, tmp_path, few_digits, wrong, verdict
):
    text = SCRIPT.read_text()
    assert "rank < len(batch)" in text
    path = tmp_path / "proved.py"
    path.write_text(text.replace("rank < len(batch)", wrong))
    command = ["torchrun", *LOCAL, "--nproc-per-node=2", str(path), "--batch-size", "8"]
    command += ["--data", str(few_digits())]
    found = prove.run(command, steps=6, timeout=100)
    assert found.verdict == verdict, str(found)


@pytest.mark.slow
def test_a_signal_before_the_first_step_stops_after_it(tmp_path):
    """SIGUSR1 to one rank ends all of them with 0, and torchrun, too."""
    fault = faults.Fault(0, 1, 2, "worker", "SIGUSR1", "ready", 1, 0.0, 1, False)
    found = faults.run_fault(fault, tmp_path)
    assert found["killed"] and found["launches"] == 2 and found["sizes"] == [2]
    log = faults.logs(tmp_path, 1)
    assert log.count("SIGUSR1 after step 1: saved") == 1
    assert "Traceback" not in log


# (target, signal, moment) of two of the faults that make test-faults tries.
SEEDS = {
    5: ("agent", "SIGKILL", "save"),
    10: ("worker", "SIGUSR1", "evaluation"),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_at_a_random_moment(tmp_path, seed):
    """The same bits as a run without a stop; each image once in each epoch."""
    fault = faults.choose(seed)
    assert (fault.target, fault.signal, fault.moment) == SEEDS[seed]
    found = faults.run_fault(fault, tmp_path)
    new_launch = fault.target == "agent" or fault.signal == "SIGUSR1"
    assert found["killed"] and found["launches"] == 1 + new_launch and found["sizes"] == [2]


@pytest.mark.slow
def test_a_rank_waits_for_a_rank_that_never_comes_as_long_as_for_a_collective(tmp_path):
    """Its torchrun, which does not see that another one has died, then starts it again."""
    began = time.monotonic()
    (port,) = free_ports(1)
    world = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": port}
    done = run_script(
        SCRIPT, "--timeout", 2, "--out", tmp_path, MASTER_ADDR="127.0.0.1", **world
    )
    assert done.returncode == 2 and "found no rank 0" in done.stdout, done.stdout
    assert time.monotonic() - began < 60


# ---- bad input ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with the data digits.npz and a finished run of two epochs, out."""
    folder = tmp_path_factory.mktemp("finished")
    write_digits(folder / "digits.npz", 35, 7)
    done = run_script(SCRIPT, *of(folder), "--epochs", 2)
    assert done.returncode == 0, done.stdout
    return folder


def of(folder: Path) -> tuple:
    return ("--data", folder / "digits.npz", *FLAGS, "--out", folder / "out")


@pytest.mark.slow
def test_a_finished_run_trains_nothing_and_reports_again(finished):
    before = curve(finished / "out")
    done = run_script(SCRIPT, *of(finished), "--epochs", 2)
    assert done.returncode == 0, done.stdout
    assert curve(finished / "out") == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seed", 1), "--seed 0, this run has 1"),
        (("--batch-size", 9), "--batch-size 8, this run has 9"),
        (("--lr", 0.1), "--lr 0.05, this run has 0.1"),
    ],
)
def test_another_run_does_not_resume_from_this_one(finished, flags, words):
    done = run_script(SCRIPT, *of(finished), "--epochs", 3, *flags)
    assert done.returncode == 2 and done.stdout.count("error: ") == 1, done.stdout
    assert words in done.stdout and "--out" in done.stdout


@pytest.mark.slow
def test_other_data_is_refused(finished, few_digits):
    done = run_script(SCRIPT, *of(finished), "--epochs", 3, "--data", few_digits(36))
    assert done.returncode == 2, done.stdout
    assert "--data (its sum)" in done.stdout
