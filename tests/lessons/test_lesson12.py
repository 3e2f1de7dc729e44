"""Lesson 12: a run that is killed and started again equals a run without a stop."""

import io
import json
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import faults
import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from commands import ROOT, SILENT_DDP, free_ports, planted, run, run_script, torchrun
from small_data import write_npz

from multigpu import elastic, launch
from multigpu.errors import UserError
from multigpu.launch import World

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_Elastic as lesson

SCRIPT = ROOT / "scripts" / "PT_CNN_Elastic.py"
PAGE = ROOT / "lessons" / "12-elastic"
LOCAL = ("--standalone", "--local-addr=127.0.0.1")


def elastically(ranks: int, path: Path, *flags: object, restarts: int = 1, **environment):
    """Under torchrun, which starts the ranks again at most `restarts` times."""
    command = (warm.torchrun(), *LOCAL, f"--nproc-per-node={ranks}")
    return run(*command, f"--max-restarts={restarts}", path, *flags, **environment)


def curve(out: Path) -> list[list]:
    return json.loads((out / "metrics.json").read_text())["curve"]


# ---- the order, and each rank's part of it --------------------------------------------------


@pytest.mark.parametrize("batch_size", [64, 10, 1437])
def test_each_image_is_seen_once_whatever_worlds_share_the_epoch(batch_size):
    """The world changes after each batch, and does not divide it."""
    order = lesson.order_of_epoch(1437, seed=3, epoch=2)
    assert sorted(order.tolist()) == list(range(1437))
    seen = []
    for step, batch in enumerate(order.split(batch_size)):
        size = 1 + step % 5
        shards = [lesson.own_shard(batch, World(rank, size)) for rank in range(size)]
        assert len({len(shard) for shard in shards}) == 1, "all ranks make the same step"
        for rank, shard in enumerate(shards):
            split = lesson.data.Batch(batch_size, size, 1, len(shard))
            real = lesson.data.real_rows(len(batch), split, rank, 0, len(shard))
            seen += shard[real].tolist()
    assert sorted(seen) == list(range(1437))


def test_each_epoch_has_another_order():
    orders = [tuple(lesson.order_of_epoch(50, 0, epoch).tolist()) for epoch in range(3)]
    assert len(set(orders)) == 3


@pytest.mark.parametrize(("text", "found"), [("1:30", (1, 30)), (None, None)])
def test_kill_is_a_rank_and_a_step(text, found):
    assert lesson.parse(["--kill", text] if text else []).kill == found


@pytest.mark.parametrize("text", ["1", "1:2:3", "one:2", ""])
def test_another_kill_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        lesson.parse(["--kill", text])
    assert "--kill" in capsys.readouterr().err


# ---- killed, stopped, started again ---------------------------------------------------------

FLAGS = ("--batch-size", 8, "--save-every", 3)  # 5 steps an epoch on 35 images


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "step"), [(1, 7), (0, 2)])
def test_a_killed_rank_changes_no_bit(tmp_path, npz, rank, step):
    """Also if there is no checkpoint yet. --prove trains again without a stop."""
    flags = ("--data", npz(), *FLAGS, "--epochs", 3, "--out", tmp_path / "out")
    done = elastically(2, SCRIPT, *flags, "--kill", f"{rank}:{step}", "--prove")
    assert done.returncode == 0, done.stdout
    assert "equal a run without a stop: max difference 0.0e+00" in done.stdout
    assert "another rank has ended" in done.stdout and "Traceback" not in done.stdout
    assert "2 ranks, 2 starts, equal" in done.stdout
    starts = [start for _, _, start in curve(tmp_path / "out")]
    saved = step - step % 3 if step > 3 else 0
    assert starts == [1] * saved + [2] * (15 - saved)


@pytest.mark.slow
def test_the_same_command_goes_on_after_its_kill(tmp_path, npz):
    """--kill acts in the first start alone, also if the user, not torchrun, starts the second.

    The second start comes to step 7, too: the newest checkpoint is that of step 6.
    """
    flags = ("--data", npz(), *FLAGS, "--epochs", 3, "--out", tmp_path / "out")
    command = (2, SCRIPT, *flags, "--kill", "1:7", "--prove")
    assert elastically(*command, restarts=0).returncode == 1
    done = elastically(*command, restarts=0)
    assert done.returncode == 0, done.stdout
    assert "start 2: 1 epoch and 8 images done" in done.stdout
    assert "2 ranks, 2 starts, equal a run without a stop" in done.stdout


def cut_newest(out: Path) -> None:
    """Cut the newest checkpoint by one byte: that of an epoch's end, if the run has ended."""
    path = max((out / "checkpoints").glob("step-*.pt"))
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_in_the_middle_of_an_epoch(tmp_path, npz):
    """2 ranks, then 3, then 1: 35 images in batches of 8 are divided by neither."""
    out = tmp_path / "out"
    flags = ("--data", npz(), *FLAGS, "--out", out, "--epochs")
    for ranks, epochs in ((2, 1), (3, 2)):
        done = elastically(ranks, SCRIPT, *flags, epochs)
        assert done.returncode == 0, done.stdout
        cut_newest(out)
    done = run_script(SCRIPT, *flags, 3, "--prove")
    assert done.returncode == 0, done.stdout
    assert "start 3: 1 epoch and 32 images done" in done.stdout
    assert "1 and 2 and 3 ranks, 3 starts, equal one process" in done.stdout
    assert [size for _, size, _ in curve(out)] == [2] * 3 + [3] * 6 + [1] * 6


@pytest.mark.slow
def test_other_images_after_the_world_has_changed_are_seen_by_the_proof(tmp_path, npz):
    """As with ElasticDistributedSampler: the rest of the epoch is a permutation of its own."""
    out = tmp_path / "out"
    flags = ("--data", npz(), *FLAGS, "--out", out, "--epochs")
    assert elastically(2, SCRIPT, *flags, 1).returncode == 0
    cut_newest(out)
    path = planted(tmp_path, "PT_CNN_Elastic", IF_RESUMED["only the rest is permuted"])
    done = run_script(path, *flags, 2, "--prove")
    assert done.returncode == 1
    assert "1 and 2 ranks, 2 starts, equal one process" in done.stdout
    assert "limit 1e-05: fails" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_row_of_an_epoch_without_images_left_has_no_speed(tmp_path, npz):
    """A signal comes in the first epoch's evaluation: the next start only evaluates."""
    fault = (
        "evaluate = lesson.evaluate\n"
        "def stopped(run, test):\n"
        "    lesson.received = lesson.signal.SIGUSR1\n"
        "    return evaluate(run, test)\n"
        "lesson.evaluate = stopped\n"
    )
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path / "out", "--epochs", 1)
    stopped = run_script(planted(tmp_path, "PT_CNN_Elastic", fault), *flags)
    assert "SIGUSR1 in epoch 1 after step 5: saved" in stopped.stdout, stopped.stdout
    done = run_script(SCRIPT, *flags)
    assert done.returncode == 0, done.stdout
    assert "start 2: 0 epochs and 35 images done" in done.stdout
    assert re.search(r"(?m)^ +1 +[\d.]+ +[\d.]+ +–$", done.stdout), done.stdout


def test_the_help_says_what_this_script_does(capsys):
    with pytest.raises(SystemExit):
        lesson.parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "rounded up" not in text and "train serially too" not in text
    assert "weight 0" in text and "without a stop" in text


# A fault that changes every run is seen if the world changes, and one process trains the same.
# In the same world, only a fault that makes the ranks differ is seen.
ALWAYS = {
    "the gradients are not averaged": SILENT_DDP,
    "padding counts": (
        "lesson.data.real_rows = lambda images, batch, rank, index, rows, device: "
        "torch.ones(rows, dtype=torch.bool)\n"
    ),
    "each rank takes the whole batch": (
        "lesson.own_shard = lambda batch, world: batch\n"
        "lesson.data.real_rows = lambda images, batch, rank, index, rows, device: "
        "torch.ones(rows, dtype=torch.bool)\n"
    ),
}
# A fault that changes resumed runs is seen in the same world.
IF_RESUMED = {
    "the optimizer's state is not saved": (
        "lesson.Run.parts = property(lambda run: {'model': run.model.module})\n"
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
@pytest.mark.parametrize("name", ALWAYS)
def test_with_a_fault_the_ranks_do_not_equal_one_process(tmp_path, npz, name):
    path = planted(tmp_path, "PT_CNN_Elastic", ALWAYS[name])
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path / "out", "--epochs")
    assert run_script(path, *flags, 1).returncode == 0
    done = torchrun(3, path, *flags, 2, "--prove")
    assert done.returncode == 1
    assert "1 and 3 ranks, 2 starts, equal one process" in done.stdout
    assert "limit 1e-05: fails" in done.stdout, done.stdout


@pytest.mark.slow
def test_without_the_average_the_same_ranks_are_not_equal(tmp_path, npz):
    """Rank 0 alone would have the same weights in both runs."""
    path = planted(tmp_path, "PT_CNN_Elastic", SILENT_DDP)
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path / "out", "--epochs", 1, "--prove")
    done = torchrun(2, path, *flags)
    assert done.returncode == 1
    assert "2 ranks, 1 start, equal a run without a stop" in done.stdout
    assert "limit 0e+00: fails" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", IF_RESUMED)
def test_with_a_fault_a_killed_run_has_other_bits(tmp_path, npz, name):
    path = planted(tmp_path, "PT_CNN_Elastic", IF_RESUMED[name])
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path / "out", "--epochs", 2)
    done = elastically(2, path, *flags, "--kill", "1:7", "--prove")
    assert done.returncode == 1
    assert "equal a run without a stop" in done.stdout
    assert "limit 0e+00: fails" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_stop_before_the_first_step_loses_nothing(tmp_path):
    """SIGUSR1 to one rank ends all of them with 0, and torchrun, too."""
    fault = faults.Fault(0, 1, 2, "worker", "SIGUSR1", "warm-up", 1, 0.0, 1, False)
    found = faults.run_fault(fault, tmp_path)
    assert found["killed"] and found["launches"] == 2 and found["sizes"] == [2]
    log = faults.logs(tmp_path, 1)
    assert log.count("SIGUSR1 in epoch") == 1
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


# ---- the notebook's experiments -------------------------------------------------------------


def test_the_elastic_sampler_loses_as_many_images_as_it_repeats(experiments):
    lost, repeated = experiments.elastic_sampler(1000, 500)
    assert lost == repeated and 200 < lost < 300
    assert experiments.elastic_sampler(1000, 0) == (0, 0)


def test_two_files_are_not_saved_as_a_whole(experiments):
    assert experiments.file_by_file() == (20, 10)


def test_torch_distributed_checkpoint_writes_its_metadata_last(tmp_path, monkeypatch):
    """A save that ends before has its final name, and its data, but it is not loaded."""
    path = tmp_path / "step-10"

    def end(*arguments: object) -> None:
        assert len(list(path.iterdir())) == 1, "the data"
        raise OSError("killed")

    with monkeypatch.context() as patched, pytest.raises(dcp.api.CheckpointException):
        patched.setattr(dcp.FileSystemWriter, "finish", end)
        dcp.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    (written,) = path.iterdir()
    assert written.suffix == ".distcp"
    with pytest.raises(dcp.api.CheckpointException, match="metadata"):
        dcp.load({"w": torch.zeros(3)}, checkpoint_id=path, no_dist=True)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    assert (path / ".metadata").exists()
    loaded = {"w": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    assert loaded["w"].tolist() == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_if_each_rank_keeps_its_batch_the_loss_falls_more_slowly(experiments, seed):
    found = experiments.after_four_ranks_became_eight(64, 0.05, seed=seed)
    stays, larger, faster = [losses[-1] for losses in found.values()]
    assert larger > 1.3 * stays
    assert faster < stays


def test_a_program_that_is_not_killed_is_an_error(experiments):
    with pytest.raises(RuntimeError, match="not killed"):
        experiments.run_killed(lambda: None)


def test_a_kill_leaves_a_temporary_file_that_the_next_start_removes(experiments):
    after_kill, after_start = experiments.killed_while_writing()
    assert len(after_kill) == 2 and after_kill[0].startswith(".step-00000020")
    assert after_start == after_kill[1:] and after_start[0].startswith("step-00000010")


def test_a_cell_that_runs_before_the_one_above_it_is_reported(experiments, tmp_path):
    with pytest.raises(UserError, match="no finished run"):
        experiments.finished_run(tmp_path, epochs=4)
    with pytest.raises(UserError, match=r"checkpoint of step 92.*--kill"):
        experiments.checkpoint_of_step(tmp_path, 92)
    (tmp_path / "metrics.json").write_text('{"epochs": [{}, {}, {}, {}]}')
    assert len(experiments.finished_run(tmp_path, epochs=4)["epochs"]) == 4
    with pytest.raises(UserError, match="4 epochs, not 10"):
        experiments.finished_run(tmp_path, epochs=10)


def test_worlds_are_named_in_their_order(experiments):
    assert experiments.worlds([[0.1, 1, 1]] * 3 + [[0.1, 2, 2]] * 2 + [[0.1, 1, 3]]) == [
        1,
        2,
        1,
    ]


@pytest.mark.slow
def test_a_rank_that_hangs_is_reported_after_the_timeout(experiments):
    sentence, other = launch.call(experiments.hang, 2, 1)
    assert "rank 0 ends, because another rank did not answer" in sentence and other == ""


class Interrupted(io.RawIOBase):
    """A file whose first write is interrupted by SIGUSR1."""

    def __init__(self):
        self.text = b""

    def writable(self) -> bool:
        return True

    def write(self, part: bytes) -> int:
        first = not self.text
        self.text += bytes(part)
        if first:
            signal.raise_signal(signal.SIGUSR1)
        return len(part)


@pytest.mark.parametrize("looks", [4, 1])
def test_a_signal_during_a_print_is_reported(experiments, monkeypatch, looks):
    """Also if the torchrun has died by it when the rank looks for it the first time."""
    listener = runpy.run_path(str(experiments.LISTENER))
    parents = iter([1] * looks)
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 2))
    file = Interrupted()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(file)))
    handlers = {name: signal.getsignal(name) for name in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        listener["main"]()
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)
    assert file.text == b"rank: ready\nrank: SIGUSR1\nrank: its torchrun has died\n"


@pytest.mark.slow
def test_what_torchrun_does_with_signals(experiments, monkeypatch):
    """torch 2.13: SIGUSR1 ends it, unless --signals-to-handle names it."""
    monkeypatch.setattr(sys, "executable", str(warm.python()))
    handled = "--signals-to-handle=SIGTERM,SIGUSR1"
    short = "--shutdown-timeout=5"  # seconds in which a busy rank can report the signal
    term, usr1, named = experiments.signals(
        ("SIGTERM", (short,)), ("SIGUSR1", ()), ("SIGUSR1", (handled, short))
    )
    # A rank that ends by itself reports why. After SIGTERM, torchrun ended it by SIGKILL.
    assert [case["signals"] for case in (term, usr1, named)] == [["SIGTERM"], [], ["SIGUSR1"]]
    assert [case["launcher died"] for case in (term, usr1, named)] == [False, True, False]
    assert [case["exit code"] for case in (term, usr1, named)] == [1, -signal.SIGUSR1, 1]


@pytest.mark.slow
def test_a_torchrun_that_does_not_start_is_reported(experiments, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(warm.python()))
    with pytest.raises(UserError, match="torchrun ended with 2"):
        experiments.signals(("SIGTERM", ("--no-such-flag",)))


# ---- bad input ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with the data small.npz and a finished run of two epochs, out."""
    folder = tmp_path_factory.mktemp("finished")
    write_npz(folder / "small.npz")
    done = run_script(SCRIPT, *of(folder), "--epochs", 2)
    assert done.returncode == 0, done.stdout
    return folder


def of(folder: Path) -> tuple:
    return ("--data", folder / "small.npz", *FLAGS, "--out", folder / "out")


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
def test_other_data_is_refused(finished, npz):
    done = run_script(SCRIPT, *of(finished), "--epochs", 3, "--data", npz(36))
    assert done.returncode == 2, done.stdout
    assert "--data (its checksum)" in done.stdout


@pytest.mark.slow
def test_another_model_is_refused(finished, tmp_path):
    fault = "Wide = lesson.CNN\nlesson.CNN = lambda *shape: Wide(*shape, hidden=65)\n"
    path = planted(tmp_path, "PT_CNN_Elastic", fault)
    done = run_script(path, *of(finished), "--epochs", 3)
    assert done.returncode == 2, done.stdout
    assert "another model: fc1.weight is (64, 512) in the file and (65, 512)" in done.stdout


@pytest.mark.slow
def test_a_folder_of_a_run_that_trains_is_refused(finished, tmp_path):
    """Its ranks hold the lock, as `folder` here does. A start waits for them for 10 s."""
    fault = "lesson.elastic.CheckpointFolder.open.__defaults__ = (0.2,)\n"
    path = planted(tmp_path, "PT_CNN_Elastic", fault)
    folder = elastic.CheckpointFolder(finished / "out" / "checkpoints")
    folder.open()
    try:
        done = run_script(path, *of(finished), "--epochs", 3)
    finally:
        folder.close()
    assert done.returncode == 2, done.stdout
    assert f"process {os.getpid()} on " in done.stdout and "--out" in done.stdout


@pytest.mark.slow
def test_a_folder_that_is_read_only(finished):
    done = run_script(SCRIPT, "--data", finished / "small.npz", "--out", "/proc/out")
    assert done.returncode == 2 and done.stdout.count("error: ") == 1, done.stdout
    assert "/proc/out" in done.stdout and "--out" in done.stdout


@pytest.mark.slow
def test_a_node_with_a_newer_checkpoint_than_rank_zero(tmp_path, npz):
    """The nodes do not share the folder."""
    fault = (
        "if os.environ['RANK'] == '1':\n"
        "    lesson.elastic.CheckpointFolder.newest_step = lambda folder: 40\n"
        "lesson.elastic.CheckpointFolder.require_shared.__defaults__ = (0.0,)\n"
    )
    path = planted(tmp_path, "PT_CNN_Elastic", fault)
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path / "out")
    done = torchrun(2, path, *flags)
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("rank 1 sees a checkpoint of step 40") == 1
    assert "file system that all nodes share" in done.stdout


LATE = """
from pathlib import Path

iterdir = Path.iterdir
listings = []

def late(path):
    found = list(iterdir(path))
    if path.name == "checkpoints" and os.environ["RANK"] == "0":
        listings.append(path)
        if len(listings) <= 2:
            found = [one for one in found if "step-00000005" not in one.name]
    return iter(found)

Path.iterdir = late
"""


@pytest.mark.slow
def test_a_checkpoint_that_rank_zero_sees_late_is_the_one_that_it_loads(tmp_path, npz):
    """Its first two listings of the folder are old, as on NFS."""
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path / "out", "--epochs")
    assert run_script(SCRIPT, *flags, 1).returncode == 0
    done = torchrun(2, planted(tmp_path, "PT_CNN_Elastic", LATE), *flags, 2)
    assert done.returncode == 0, done.stdout
    assert "rank 1 sees a checkpoint of step 5" in done.stdout
    assert re.search("resumed from .*step-00000005-", done.stdout), done.stdout


@pytest.mark.slow
def test_on_a_full_disk_training_goes_on(tmp_path, npz):
    """From the third save on, files cannot become longer than 1,000 bytes."""
    fault = (
        "import resource\n"
        "write = lesson.elastic.CheckpointFolder.write\n"
        "def limited(folder, step, content):\n"
        "    if step == 6:\n"
        "        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))\n"
        "    return write(folder, step, content)\n"
        "lesson.elastic.CheckpointFolder.write = limited\n"
    )
    path = planted(tmp_path, "PT_CNN_Elastic", fault)
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path / "out")
    done = run_script(path, *flags, "--epochs", 2, "--pause", 0.01)
    assert "step 6" in done.stdout and "no space left" in done.stdout
    assert "step 5 stays the newest" in done.stdout
    assert re.search(r"(?m)^ +2 +\d", done.stdout), "the second epoch has ended"
    folder = elastic.CheckpointFolder(tmp_path / "out" / "checkpoints")
    assert folder.newest()[1]["position"]["steps"] == 5


@pytest.mark.slow
def test_min_nodes_that_never_come_end_the_start(tmp_path):
    """After the time that --rdzv-conf states; torchrun's default is 600 s."""
    (port,) = free_ports(1)
    done = run(
        warm.torchrun(),
        "--nnodes=2:4",
        "--local-addr=127.0.0.1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=lonely",
        "--rdzv-conf=join_timeout=2",
        SCRIPT,
    )
    assert done.returncode == 1
    assert "RendezvousTimeoutError" in done.stdout
