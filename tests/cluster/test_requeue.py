"""Lesson 12 on a real Slurm: a job that is stopped goes on, and its weights are the same.

`make test` runs the tests of a few seconds, `make test-jobs` all of them.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import Cluster, Job, wait_until
from commands import ROOT, alive, planted

from multigpu import classroom
from multigpu.classroom import processes

pytestmark = pytest.mark.classroom
slow = pytest.mark.skipif("ALL_JOBS" not in os.environ, reason="make test-jobs runs it")

JOB = "slurm/PT_CNN_Elastic.slurm"
NODE_JOB = "slurm/PT_CNN_ElasticNode.slurm"
# The pauses leave time for a signal.
FLAGS = ("--epochs", 4, "--pause", 0.05, "--prove")


@pytest.fixture
def own(private) -> Cluster:
    """A cluster for this test alone, which is then removed."""
    classroom.up()
    return Cluster()


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(words: str, log: Path, seconds: float = 90) -> None:
    """Wait until a line of the log matches."""
    wait_until(lambda: re.search(rf"(?m)^{words}", read(log)), seconds)


def first_epoch(log: Path, start: int = 1) -> None:
    """Wait until the first epoch of this start is in the log."""
    wait_for(rf".*start {start}:(.|\n)*\nepoch 1: loss", log)


def wait_for_state(cluster: Cluster, number: object, state: str, seconds: float = 90) -> None:
    show = ("scontrol", "--oneliner", "show", "job", number)
    wait_until(lambda: f"JobState={state} " in cluster.run(*show).stdout, seconds)


def start_again_soon(cluster: Cluster, number: object) -> None:
    """A requeued job starts after 3 s, not after the 15 s of the cluster's slurm.conf.

    In the first second slurmd would refuse it: "Job credential revoked".
    """
    wait_for_state(cluster, number, "PENDING")
    done = cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+3")
    assert done.returncode == 0, done.stderr


def check_to_the_bit(
    cluster: Cluster, number: int, out: Path, ranks: int, starts: object
) -> Job:
    """The job ends with 0, and its weights are those of a run without a stop; nothing is left.

    `starts` is a regular expression: the signal can come before the ranks have started.
    """
    job = cluster.wait(number)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    claim = rf"{ranks} ranks, {starts} starts?, equal a run without a stop: "
    assert re.search(claim, job.log), job.log
    assert "max difference 0.0e+00, limit 0e+00: holds" in job.log
    assert_nothing_left(out)
    return job


def assert_nothing_left(out: Path) -> None:
    """Two checkpoints, the lock, the results; and no process of a job."""
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert [name[:5] for name in names] == ["lock", "step-", "step-"], names
    own = ("checkpoints", "metrics.json", "model.pt", "rendezvous")
    assert not [path for path in out.iterdir() if not path.name.startswith(own)]
    wait_until(lambda: not processes.job_processes())


def with_script(folder: Path, fault: str) -> Path:
    """A repository's root with the real job files, and lesson 12's script with a fault."""
    shutil.copytree(ROOT / "slurm", folder / "slurm")
    (folder / "scripts").mkdir()
    planted(folder, "PT_CNN_Elastic", fault).rename(folder / "scripts/PT_CNN_Elastic.py")
    return folder


# ---- in `make test` -------------------------------------------------------------------------

SIGNALS = {
    # what scancel sends, the option of sbatch that does the same, and who sees SIGUSR1
    "USR1@60": ((), {"rank"}),
    "B:USR1@60": (("--batch",), {"batch shell"}),
}


@pytest.mark.parametrize("option", SIGNALS)
def test_what_a_signal_before_the_time_limit_reaches(cluster, tmp_path, option):
    """SIGUSR1 ends torchrun, and its rank goes on alone. It does not end the batch shell."""
    flags, receivers = SIGNALS[option]
    log = tmp_path / "log"
    job = ("--time=3", f"--signal={option}", f"--output={log}", "slurm/Signals.slurm")
    number = cluster.submit(*job, cwd=ROOT)
    wait_for("rank: ready", log, 60)
    assert cluster.run("scancel", *flags, "--signal=USR1", number).returncode == 0
    wait_until(lambda: "SIGUSR1" in read(log))
    if "rank" in receivers:
        wait_for("torchrun: ends with 138", log)
        wait_for("rank: its torchrun has died", log)
    else:
        time.sleep(1)
    text = log.read_text()
    assert set(re.findall(r"(?m)^(.*): SIGUSR1$", text)) == receivers, text
    # Sent to the rank, it ends the job; at scancel alone Slurm would wait for 30 s.
    cluster.run("scancel", "--signal=USR1", number)
    cluster.wait(number)


@slow
def test_scontrol_requeue_with_the_number_of_an_array_starts_all_its_tasks(cluster, tmp_path):
    """The last task's SLURM_JOB_ID is that number: the job file gives ARRAY_TASK instead."""
    text = """
    id=$SLURM_JOB_ID
    [ -e named ] && id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    echo $SLURM_ARRAY_TASK_ID >> starts
    if [ $SLURM_ARRAY_TASK_ID = 2 ] && [ ! -e requeued ]; then
        until [ -e go ]; do sleep 0.1; done
        touch requeued; scontrol requeue $id; sleep 60
    fi"""
    starts = {}
    for way in ("SLURM_JOB_ID", "named"):
        folder = tmp_path / way
        folder.mkdir()
        if way == "named":
            (folder / "named").touch()
        script = cluster.script(folder, text)
        number = cluster.submit("--array=1-2", script, cwd=folder)
        wait_for_state(cluster, f"{number}_1", "COMPLETED")
        (folder / "go").touch()
        start_again_soon(cluster, f"{number}_2")
        cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+3")
        cluster.wait_for_tasks(number)
        starts[way] = sorted(map(int, (folder / "starts").read_text().split()))
    assert starts == {"SLURM_JOB_ID": [1, 1, 2, 2], "named": [1, 2, 2]}


# ---- in `make test-jobs` --------------------------------------------------------------------


@slow
def test_a_killed_worker(own, tmp_path):
    out = tmp_path / "out"
    job = (f"--output={tmp_path}/log", JOB, *FLAGS, "--kill", 3, 30, "--out", out)
    found = check_to_the_bit(own, own.submit(*job, cwd=ROOT), out, 4, 2)
    assert "step-00000030" in found.log and "Traceback" not in found.log


@slow
def test_near_the_time_limit_the_job_goes_back_into_the_queue(own, tmp_path):
    """Twice: the signal comes in an epoch, and while the ranks start."""
    cluster, out, log = own, tmp_path / "out", tmp_path / "log"
    number = cluster.submit(f"--output={log}", JOB, *FLAGS, "--out", out, cwd=ROOT)
    first_epoch(log)
    cluster.run("scancel", "--batch", "--signal=USR1", number)
    start_again_soon(cluster, number)
    wait_for("requeued: 1", log)
    cluster.run("scancel", "--batch", "--signal=USR1", number)
    start_again_soon(cluster, number)
    job = check_to_the_bit(cluster, number, out, 4, "[23]")
    assert job.log.count(f"job {number} is requeued") == 2
    assert re.search(r"(?m)^SIGUSR1 after step .*: saved", job.log)
    assert len(re.findall(r"(?m)^requeued: ", job.log)) == 3, "one log for all starts"
    assert "Traceback" not in job.log and "error: rank" not in job.log


@slow
def test_a_real_time_limit(own, tmp_path):
    """Slurm looks at time limits once a minute: the signal comes up to a minute early."""
    cluster, out, log = own, tmp_path / "out", tmp_path / "log"
    job = ("--time=2", "--nodes=1", f"--output={log}", JOB, "--epochs", 60, "--pause", 0.05)
    number = cluster.submit(*job, "--out", out, cwd=ROOT)
    wait_for(rf"the time limit is near: job {number} is requeued", log, 150)
    start_again_soon(cluster, number)
    wait_for("requeued: 1", log)
    wait_for(".*start 2: (?!epoch 1, 0 images)", log)  # it goes on
    assert cluster.run("scancel", number).returncode == 0
    assert cluster.wait(number).state == "CANCELLED"


SLOW_SAVE = (
    "import time\n"
    "write = lesson.elastic.CheckpointFolder.write\n"
    "def slow(folder, step, content):\n"
    "    if step % 23:\n"  # not at the end of an epoch
    "        time.sleep(4)\n"
    "    return write(folder, step, content)\n"
    "lesson.elastic.CheckpointFolder.write = slow\n"
)


@slow
def test_pre_empted_by_a_job_of_higher_priority(own, tmp_path):
    """Also if a save takes seconds: the job has 30 s (KillWait), and torchrun waits for it."""
    cluster, out, log = own, tmp_path / "out", tmp_path / "log"
    root = with_script(tmp_path / "root", SLOW_SAVE)
    flags = ("--save-every", 1000, "--out", out)  # and after each epoch
    number = cluster.submit(f"--output={log}", JOB, *FLAGS, *flags, cwd=root)
    first_epoch(log)
    urgent = ("--partition=urgent", "--nodes=2", "--gpus-per-node=2", "--output=/dev/null")
    other = cluster.submit(*urgent, "--wrap=sleep 1", cwd=tmp_path)
    assert cluster.wait(other).state == "COMPLETED"
    start_again_soon(cluster, number)
    job = check_to_the_bit(cluster, number, out, 4, 2)
    saved = len(re.findall(r"(?m)^SIGTERM after step .*: saved", job.log))
    assert saved == 1 and "Traceback" not in job.log, job.log


@slow
def test_scontrol_requeue_in_an_array(own, tmp_path):
    """One task is requeued; the other one goes on, and each has its own folder."""
    cluster, logs = own, {task: tmp_path / f"log-{task}" for task in (1, 2)}
    root = with_script(tmp_path / "root", "")
    job = ("--array=1-2", "--nodes=1", f"--output={tmp_path}/log-%a", JOB, *FLAGS)
    number = cluster.submit(*job, cwd=root)
    first_epoch(logs[2])
    assert cluster.run("scontrol", "requeue", f"{number}_2").returncode == 0
    start_again_soon(cluster, f"{number}_2")
    cluster.wait_for_tasks(number, 120)
    for task, starts in ((1, "1 start"), (2, "2 starts")):
        text = logs[task].read_text()
        assert f"2 ranks, {starts}, equal a run without a stop" in text and "holds" in text
        assert_nothing_left(root / f"results/PT_CNN_Elastic-{number}_{task}")


@slow
def test_a_node_dies(own, tmp_path):
    """Slurm notices it by itself, and requeues the job, which waits for two nodes."""
    cluster, out, log = own, tmp_path / "out", tmp_path / "log"
    number = cluster.submit(f"--output={log}", JOB, *FLAGS, "--out", out, cwd=ROOT)
    first_epoch(log)
    began = time.monotonic()
    classroom.kill("n2")
    wait_for_state(cluster, number, "PENDING", 120)
    print(f"requeued {time.monotonic() - began:.0f} s after the node's death")
    classroom.repair("n2")
    start_again_soon(cluster, number)
    job = check_to_the_bit(cluster, number, out, 4, 2)
    assert "DUE TO NODE FAILURE" in job.log


@slow
def test_a_node_comes_and_goes(own, tmp_path):
    """Each node is a job of its own. Slurm does not requeue the job that scancel ends."""
    cluster = own
    root = with_script(tmp_path / "root", "")
    log, second = tmp_path / "log-1", tmp_path / "log-2"
    flags = ("--epochs", 40, "--pause", 0.02, "--prove")
    number = cluster.submit(f"--output={log}", NODE_JOB, *flags, cwd=root)
    first_epoch(log)
    joined = cluster.submit(f"--output={second}", NODE_JOB, "--join", number, cwd=root)
    wait_for(".*start 2:", log)
    time.sleep(1)
    cluster.run("scancel", joined)
    wait_for(".*start 3:", log)
    job = cluster.wait(number)
    assert job.state == "COMPLETED", job.log
    assert "2 and 4 ranks, 3 starts, equal 2 ranks without a stop" in job.log
    assert "limit 1e-05: holds" in job.log
    assert cluster.wait(joined).state == "CANCELLED"
    assert_nothing_left(root / f"results/PT_CNN_ElasticNode-{number}")


@slow
def test_a_sweep_with_submitit(own, tmp_path):
    """One task of the array gets the signal of its time limit; each has its own result."""
    pytest.importorskip("submitit", reason="pip install submitit")
    cluster, out = own, tmp_path / "sweep"
    command = [sys.executable, ROOT / "lessons/12-elastic/sweep.py", "--out", out]
    command += ["--lr", 0.05, 0.1, *FLAGS]
    environment = os.environ | {"SLURM_CONF": str(cluster.conf), "PYTHONPATH": str(ROOT)}
    sweep = subprocess.Popen(
        [str(word) for word in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: list((out / "submitit").glob("*_1_0_log.out")), 60)
        (log,) = (out / "submitit").glob("*_1_0_log.out")
        first_epoch(log)
        task = log.name.removesuffix("_0_log.out")
        cluster.run("scancel", "--signal=USR2", task)
        start_again_soon(cluster, task)
        text, _ = sweep.communicate(timeout=240)
    finally:
        sweep.kill()
        sweep.wait()
    assert sweep.returncode == 0, text
    rows = [line.split() for line in text.splitlines()[-2:]]
    assert [(row[0], row[2]) for row in rows] == [("0.05", "1"), ("0.1", "2")], text
    assert "2 ranks, 2 starts, equal a run without a stop" in read(log)
    for lr in ("0.05", "0.1"):
        assert_nothing_left(out / f"lr-{lr}")
    assert not alive(sweep.pid)
