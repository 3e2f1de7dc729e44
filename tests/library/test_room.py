"""Before processes start, their memory and cores are counted: too many are refused."""

import os
from pathlib import Path

import pytest
from commands import ROOT, SUPPORT, planted, run, run_script, torchrun

from multigpu import launch
from multigpu.errors import UserError
from multigpu.launch import horovodrun, room

GIB = 2**30


def files(root: Path, contents: dict[str, object]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:    {8 * GIB // 1024} kB"}


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"proc/self/cgroup": "0::/"}, 8 * GIB),
        # a container with cgroup v2 that sees its own group as the root; the kernel can drop
        # pages of files that are not in use
        (
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": 4 * GIB,
                "sys/fs/cgroup/memory.current": 3 * GIB,
                "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}",
            },
            2 * GIB,
        ),
        # a Slurm job with cgroup v2: the job has a limit, the step has none
        (
            {
                "proc/self/cgroup": "0::/slurm/job_7/step_0",
                "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max",
                "sys/fs/cgroup/slurm/job_7/memory.max": 3 * GIB,
                "sys/fs/cgroup/slurm/job_7/memory.current": GIB,
                "sys/fs/cgroup/slurm/job_7/memory.stat": "anon 1",
            },
            2 * GIB,
        ),
        # cgroup v1, without a limit
        (
            {
                "proc/self/cgroup": "5:cpu:/a\n4:memory:/a\n0::/",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 2**63 - 4096,
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": GIB,
                "sys/fs/cgroup/memory/a/memory.stat": "total_inactive_file 0",
            },
            8 * GIB,
        ),
        # cgroup v1 in a container: the path is the host's, only the top folder is there
        (
            {
                "proc/self/cgroup": "4:memory:/docker/abc",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GIB,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
                "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}",
            },
            3 * GIB // 2,
        ),
    ],
    ids=["no limit", "container v2", "Slurm job v2", "v1 without limit", "container v1"],
)
def test_available_memory(tmp_path: Path, contents: dict, expected: int):
    assert room.available_memory(files(tmp_path, MEMINFO | contents)) == expected


def test_a_system_that_does_not_say(tmp_path: Path, monkeypatch):
    """macOS has no /proc: nothing is refused."""
    assert room.available_memory(tmp_path) is None
    monkeypatch.setattr(room, "available_memory", lambda: None)
    room.check_room(1)


def nothing() -> None:
    raise AssertionError("a process was started")


@pytest.mark.parametrize("how", ["call", "horovodrun"])
def test_more_processes_than_memory_holds_are_refused(monkeypatch, how: str):
    monkeypatch.setattr(room, "available_memory", lambda: GIB)
    starts = {
        "call": lambda: launch.call(nothing, 99),
        "horovodrun": lambda: horovodrun.run(["-np", "99", "python", "-c", "1"]),
    }
    with pytest.raises(UserError, match=r"99 processes .* GiB .* start \d+ or fewer"):
        starts[how]()


def test_more_processes_than_cores_are_warned_about(monkeypatch, capfd):
    monkeypatch.setattr(room, "available_cores", lambda: 2)
    room.check_room(2)
    assert capfd.readouterr().err == ""
    room.check_room(3)
    warning = capfd.readouterr().err
    assert warning.startswith("warning: 3 processes share 2 cores")
    assert warning.count("\n") == 1


def test_cores_outside_linux(monkeypatch):
    """macOS has no sched_getaffinity."""
    assert room.available_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert room.available_cores() == 8


# ---- in scripts -----------------------------------------------------------------------------

LITTLE = f"from multigpu.launch import room\nroom.available_memory = lambda: {GIB}\n"


@pytest.mark.slow
def test_a_script_refuses_what_memory_cannot_hold(tmp_path):
    script = planted(tmp_path, "PTL_multiGPU", LITTLE)
    done = run_script(script, "--devices", 99, "--out", tmp_path / "o")
    assert done.returncode and "Traceback" not in done.stdout, done.stdout
    (error,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert "99 processes" in error and "5 or fewer" in error


def library_script(folder: Path, fault: str) -> Path:
    """Write library_script.py with `fault` before its start; return the path."""
    text = (SUPPORT / "library_script.py").read_text()
    begin, start, end = text.partition("if __name__ ==")
    (folder / "script.py").write_text(f"{begin}{fault}\n\n{start}{end}")
    return folder / "script.py"


ONE_CORE = "from multigpu.launch import room\nroom.available_cores = lambda: 1\n"


@pytest.mark.slow
def test_ranks_of_torchrun_are_warned_about_once(tmp_path, npz):
    script = library_script(tmp_path, ONE_CORE)
    flags = ("--data", npz(), "--out", tmp_path / "o")
    done = torchrun(2, script, *flags)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("2 processes share 1 core ") == 1, done.stdout


@pytest.mark.slow
def test_an_estimate_is_not_above_what_a_rank_uses(tmp_path, npz):
    """Otherwise a run would be refused for which there is memory. A really started rank."""
    fault = """
original = files.write_json
def write_json(*arguments):
    status = open("/proc/self/status").read()
    print("alone", status.partition("RssAnon:")[2].split()[0], flush=True)
    original(*arguments)
files.write_json = write_json
"""
    script = library_script(tmp_path, fault)
    flags = ("--data", npz(), "--out", tmp_path / "o")
    done = run("python", script, *flags, PYTHONPATH=ROOT)
    kib = int(done.stdout.partition("alone ")[2].split()[0])
    assert room.TORCH_RANK / 1024 < kib < 3 * room.TORCH_RANK / 1024
