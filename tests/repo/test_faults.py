"""`make test-faults` fails if no process gets the signal, or if a rank ends by an error."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import faults
import pytest

WORKER = faults.Fault(0, 1, 2, "worker", "SIGKILL", "step", 7, 0.0, 0, False)


@pytest.fixture
def events(tmp_path: Path) -> Path:
    folder = tmp_path / "events"
    folder.mkdir()
    return folder


@pytest.fixture
def process():
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield started
    started.kill()
    started.wait()


def ended() -> int:
    """The number of a process that has ended."""
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_a_signal_that_reaches_no_process_is_a_failure(events):
    """The run has finished before the moment has come."""
    agent = subprocess.Popen(["true"])
    agent.wait()
    with pytest.raises(faults.TooLate, match="reached no process"):
        faults.send_signal(WORKER, events, [agent])


def test_a_run_that_ends_before_the_moment_is_tried_with_an_earlier_one(tmp_path, monkeypatch):
    """Only if the moment is a time: any other one comes in each run."""
    late = dataclasses.replace(WORKER, moment="any time", at=4.0)

    def ended_after_a_second(fault, folder):
        if fault.at > 1:
            raise faults.TooLate
        return {"at": fault.at, "folder": folder}

    monkeypatch.setattr(faults, "_try", ended_after_a_second)
    found = faults.run_fault(late, tmp_path)
    assert found == {"at": 1.0, "folder": tmp_path / "earlier" / "earlier"}
    with pytest.raises(faults.TooLate):
        faults.run_fault(dataclasses.replace(late, moment="step"), tmp_path)


def test_a_rank_that_has_ended_does_not_get_the_signal(events, process):
    """A rank of an earlier world is in the list, too: the signal goes to one that runs."""
    (events / "processes").write_text(
        f"{process.pid} {os.getpid()} 0 0\n{ended()} {os.getpid()} 0 0\n"
    )
    (events / "marker").write_text(f'{{"worker": {ended()}, "agent": {os.getpid()}}}')
    faults.send_signal(WORKER, events, [process])
    assert process.wait(10) == -signal.SIGKILL


OWN_ERROR = """[rank0]: Traceback (most recent call last):
[rank0]:   File "/course/scripts/PT_CNN_Elastic.py", line 500, in main
[rank0]: KeyError: 'position'
"""
# What torchrun prints when a signal ends it.
OF_TORCHRUN = """Traceback (most recent call last):
  File "/torch/distributed/run.py", line 10, in <module>
torch.distributed.elastic.multiprocessing.api.SignalException: got signal: 15
elastic_instrumented.py FAILED, --out results/PT_CNN_Elastic.py
"""


def test_an_error_in_lesson_12_is_a_failure_and_torchruns_own_is_not():
    faults.check_reason(OF_TORCHRUN)
    with pytest.raises(faults.Failed, match="KeyError"):
        faults.check_reason(OWN_ERROR + OF_TORCHRUN)


def test_an_error_at_the_beginning_of_a_long_log_is_a_failure(tmp_path, monkeypatch):
    """Also if torchrun started the ranks again, and they finished."""

    @contextlib.contextmanager
    def finishes(folder: Path, start: int, *_):
        (folder / f"log-{start}-0").write_text(OWN_ERROR + "a step\n" * 10000)
        (folder / "out").mkdir()
        (folder / "out" / "metrics.json").write_text("{}")
        yield []

    monkeypatch.setattr(faults, "torchruns", finishes)
    monkeypatch.setattr(faults, "send_signal", lambda *_: None)
    with pytest.raises(faults.Failed, match="KeyError"):
        faults.run_fault(WORKER, tmp_path)
