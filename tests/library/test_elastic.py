"""Checkpoints of an elastic run: each is whole, the newest is that of the highest step."""

import errno
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import run_script
from small_disk import small_disk

from multigpu.elastic import (
    CheckpointFolder,
    Writer,
    checkpoint_file,
    checkpoint_name,
    report_lost_ranks,
)
from multigpu.errors import UserError
from multigpu.launch import World


def content(step: int) -> dict:
    return {
        "format": checkpoint_file.FORMAT,
        "parts": {},
        "settings": {},
        "position": {"steps": step, "weights": torch.full((1000,), float(step))},
    }


@pytest.fixture
def folder(tmp_path: Path):
    opened = CheckpointFolder(tmp_path / "checkpoints")
    opened.open()
    yield opened
    opened.close()


def steps(folder: CheckpointFolder) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.path.glob("step-*.pt"))


def newest_step(folder: CheckpointFolder) -> int | None:
    found = folder.newest()
    return None if found is None else found[1]["position"]["steps"]


def test_the_last_two_are_kept(folder):
    assert folder.newest() is None and folder.newest_step() == -1
    for step in (10, 20, 30, 100):
        folder.write(step, content(step))
    assert steps(folder) == [30, 100]
    assert newest_step(folder) == folder.newest_step() == 100


def test_newest_is_by_step_and_not_by_time(folder):
    """A clock that was set back: the file of step 20 looks older."""
    for step in (10, 20):
        path = folder.write(step, content(step))
        os.utime(path, (0, 1e9 - step))
    assert newest_step(folder) == 20


@pytest.mark.parametrize("damage", ["cut", "empty", "a bit", "longer"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(folder, capsys, damage):
    for step in (10, 20):
        path = folder.write(step, content(step))
    data = bytearray(path.read_bytes())
    if damage == "a bit":
        data[len(data) // 2] ^= 1
    path.write_bytes(
        {"cut": data[:-100], "empty": b"", "a bit": data, "longer": data + b"1"}[damage]
    )
    assert newest_step(folder) == 10
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: {path} is damaged") and "step-00000010" in warning
    # The run goes on to this step again.
    folder.write(20, content(20))
    assert newest_step(folder) == 20 and steps(folder) == [10, 20]


def test_if_all_are_damaged_no_new_run_starts(folder):
    for step in (10, 20):
        folder.write(step, content(step)).write_bytes(b"")
    with pytest.raises(UserError, match=r"none is good: .*--out"):
        folder.newest()


def test_a_file_of_another_program_is_ignored(folder):
    """The checksum in its name is right, its content is not a checkpoint."""
    (folder.path / checkpoint_name(30, b"hello")).write_bytes(b"hello")
    folder.write(10, content(10))
    assert newest_step(folder) == 10


def test_a_killed_writer_leaves_an_orphan_which_the_next_start_removes(tmp_path):
    """The kill comes when half of the file is written."""
    program = tmp_path / "killed.py"
    program.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from multigpu.elastic import CheckpointFolder\n"
        "folder = CheckpointFolder(Path(sys.argv[1]))\n"
        "folder.open()\n"
        "folder.write(1, {'format': 1, 'parts': {}, 'settings': {}, 'position': 1})\n"
        "def write_half(path, data):\n"
        "    path.open('wb').write(data[: len(data) // 2])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Path.write_bytes = write_half\n"
        "folder.write(2, {'format': 1, 'parts': {}, 'settings': {}, 'position': 2})\n"
    )
    path = tmp_path / "checkpoints"
    killed = run_script(program, path)
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    orphans = [name for name in os.listdir(path) if name.startswith(".step-00000002")]
    assert len(orphans) == 1
    (path / ".notes").write_text("of the user")
    folder = CheckpointFolder(path)
    folder.open()
    assert folder.newest()[1]["position"] == 1
    folder.close()
    assert sorted(name.split("-")[0] for name in os.listdir(path)) == [
        ".notes",
        "lock",
        "step",
    ]


def test_a_folder_belongs_to_one_process(folder):
    """Also to one that was killed: the lock ends with the process."""
    second = CheckpointFolder(folder.path)
    with pytest.raises(UserError, match=f"process {os.getpid()} .*--out"):
        second.open(wait=0.2)
    folder.close()
    second.open(wait=0.2)
    second.close()


def test_a_folder_waits_for_the_end_of_the_process_before(folder, monkeypatch):
    """The lock is released while the second one pauses between two tries."""
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        folder.close()

    monkeypatch.setattr("multigpu.elastic.folder.time.sleep", pause)
    second = CheckpointFolder(folder.path)
    second.open(wait=30)
    second.close()
    assert len(pauses) == 1


def cannot_read(step: int, number: int):
    """Path.read_bytes, which fails with an error's number for the checkpoint of this step."""
    original = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name.startswith(f"step-{step:08d}"):
            raise OSError(number, os.strerror(number))
        return original(path)

    return read_bytes


def test_a_checkpoint_on_a_bad_disk_is_damaged(folder, monkeypatch, capsys):
    for step in (10, 20):
        folder.write(step, content(step))
    monkeypatch.setattr(Path, "read_bytes", cannot_read(20, errno.EIO))
    assert newest_step(folder) == 10
    assert "damaged" in capsys.readouterr().err


def test_a_checkpoint_that_this_user_may_not_read_is_not_damaged(folder, monkeypatch):
    for step in (10, 20):
        folder.write(step, content(step))
    monkeypatch.setattr(Path, "read_bytes", cannot_read(20, errno.EACCES))
    with pytest.raises(UserError, match=r"step-00000020.*Permission denied"):
        folder.newest()
    assert steps(folder) == [10, 20]


def test_a_folder_that_is_not_writable():
    with pytest.raises(UserError, match=r"cannot write to the folder .*--out"):
        CheckpointFolder(Path("/proc/checkpoints")).open()


def other_rank_sees(monkeypatch, step: int, rank: int = 1, expired: bool = False) -> None:
    """all_gather_object among two ranks, of which the other one sees this step."""

    def gather(found: list, own: tuple[int, bool]) -> None:
        found[rank], found[1 - rank] = (step, expired), own

    monkeypatch.setattr("multigpu.elastic.folder.dist.all_gather_object", gather)


def test_a_file_of_another_node_that_is_seen_late_is_waited_for(folder, monkeypatch, capsys):
    """NFS: rank 0's node shows an old listing until it looks again."""
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            folder.write(40, content(40))

    folder.write(30, content(30))
    other_rank_sees(monkeypatch, 40)
    monkeypatch.setattr("multigpu.elastic.folder.time.sleep", pause)
    folder.require_shared(World(0, 2))
    assert len(pauses) == 3
    assert capsys.readouterr().out.count("rank 1 sees a checkpoint of step 40") == 1


def test_a_newer_checkpoint_of_another_node_is_waited_for_a_bounded_time(folder, monkeypatch):
    """The folder is on each node's own disk. Rank 0's clock ends the wait on all ranks."""
    clock = [0.0]
    monkeypatch.setattr("multigpu.elastic.folder.time.monotonic", lambda: clock[0])

    def pause(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("multigpu.elastic.folder.time.sleep", pause)
    folder.write(30, content(30))
    other_rank_sees(monkeypatch, 40)
    with pytest.raises(UserError, match=r"rank 1 sees .*step 40 .*all nodes share"):
        folder.require_shared(World(0, 2), wait=7)
    assert 7 <= clock[0] < 10
    folder.write(40, content(40))
    other_rank_sees(monkeypatch, 30, rank=0, expired=True)
    with pytest.raises(UserError, match="rank 1 sees a checkpoint of step 40"):
        folder.require_shared(World(1, 2), wait=100)
    assert clock[0] < 10, "rank 1 does not wait for its own clock"


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch, capsys):
    def no_locks(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("multigpu.elastic.folder.fcntl.flock", no_locks)
    folder = CheckpointFolder(tmp_path)
    folder.open()
    folder.close()
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ") and "no locks" in warning


def test_on_a_full_disk_training_goes_on_and_the_last_checkpoint_stays(folder, capsys):
    writer = Writer(folder)
    writer.save(1, content(1))
    writer.wait()
    assert writer.saved == 1
    with small_disk():
        writer.save(2, content(2))
        writer.wait()
    warning = capsys.readouterr().err
    assert "no space left" in warning
    assert "step 2" in warning and "step 1 stays the newest" in warning
    assert writer.saved == newest_step(folder) == 1
    assert not list(folder.path.glob(".step*"))
    writer.save(3, content(3))
    writer.wait()
    assert writer.saved == newest_step(folder) == 3


def test_an_old_checkpoint_that_cannot_be_removed_is_reported_once(folder, capsys):
    """Nobody can unlink a folder. The new checkpoints are written, and others are removed."""
    stuck = folder.path / checkpoint_name(1, b"")
    stuck.mkdir()
    writer = Writer(folder)
    for step in (2, 3, 4, 5):
        writer.save(step, content(step))
    writer.wait()
    assert writer.saved == newest_step(folder) == 5
    assert steps(folder) == [1, 4, 5]
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and str(stuck) in warning


def test_a_folder_that_cannot_be_listed_is_reported(folder, monkeypatch, capsys):
    """Nothing is written there, and the thread does not end by an OSError."""
    writer = Writer(folder)
    writer.save(1, content(1))
    writer.wait()

    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", stale)
        writer.save(2, content(2))
        writer.wait()
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "step 1 stays the newest" in warning
    assert str(folder.path) in warning and "--out" in warning
    assert writer.saved == newest_step(folder) == 1


def test_an_error_of_the_program_in_the_thread_ends_training_once(folder):
    """A lambda cannot be pickled."""
    writer = Writer(folder)
    writer.save(1, {**content(1), "parts": {"model": lambda: None}})
    with pytest.raises(Exception, match="lambda"):
        writer.save(2, content(2))
    writer.save(2, content(2))
    writer.wait()
    assert writer.saved == newest_step(folder) == 2


def test_what_is_written_is_the_copy_of_the_moment(folder):
    """Training changes the weights before a thread writes them."""
    weights = torch.zeros(1000)
    writer = Writer(folder)
    go_on = threading.Event()
    writer.thread.submit(go_on.wait)
    writer.save(1, {**content(1), "parts": {"weights": weights}})
    weights += 1
    go_on.set()
    writer.wait()
    assert folder.newest()[1]["parts"]["weights"].sum() == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[../gloo/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1", "has ended"),
        ("Timed out waiting 1000ms for recv operation to complete", "did not answer"),
    ],
)
def test_a_lost_rank_is_reported(monkeypatch, text, words):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(UserError, match=f"rank 3 .*{words}.*newest checkpoint"):
        with report_lost_ranks():
            raise RuntimeError(text)


def test_a_lost_store_is_reported():
    """Connecting to a store fails, because its process has ended."""
    with pytest.raises(UserError, match="another rank has ended"), report_lost_ranks():
        dist.TCPStore("127.0.0.1", 9, is_master=False, timeout=timedelta(milliseconds=300))


def test_another_error_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="shape"):
        with report_lost_ranks():
            raise RuntimeError("shape mismatch")
