"""Is the doctor's JSON stable, and does the doctor survive odd machines?"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from multigpu import __version__
from multigpu.cli import doctor
from multigpu.cli.doctor import machine, software

ROOT = Path(__file__).parents[2]
DETAILS = {  # written out once more: whoever changes the JSON must change `schema`, and this
    "python": ["version"],
    "cpu": ["cores"],
    "memory": ["total_gib", "available_gib"],
    "gpu": ["count", "devices"],
    "torch": ["version", "cuda", "hip"],
    "gloo": ["works"],
    "nccl": ["version"],
    "torch-mpi": ["built_in"],
    "tensorflow": ["version", "keras"],
    "slurm": ["version", "sbatch", "slurmctld", "slurmd", "munged"],
    "mpi": ["flavour", "version", "mpirun"],
    "sandbox": ["bwrap", "works"],
    "netns": ["works", "slow_link"],
    "port": ["loopback", "port_29500_free"],
    "shm": ["total_gib", "free_gib"],
    "files": ["soft", "hard"],
}


def multigpu(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "multigpu.cli", "doctor", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, text=True, capture_output=True, timeout=60
    )


def assert_schema(report: dict) -> None:
    assert list(report) == ["schema", "multigpu", "ok", "checks"]
    assert (report["schema"], report["multigpu"]) == (1, __version__)
    assert {check["name"]: list(check["details"]) for check in report["checks"]} == DETAILS
    for check in report["checks"]:
        assert list(check) == ["name", "status", "needed", "found", "why", "fix", "details"]
        assert check["status"] in ("ok", "warn", "missing")
        assert check["needed"] == (check["name"] in ("python", "torch", "gloo", "port"))
        for text in ("found", "why", "fix"):
            assert isinstance(check[text], str) and "\n" not in check[text]
        assert check["found"] and check["why"]
    lacking = [
        check for check in report["checks"] if check["needed"] and check["status"] == "missing"
    ]
    assert report["ok"] == (not lacking)


def of(name: str) -> doctor.Check:
    return next(check for check in doctor.examine() if check.name == name)


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_json_is_the_schema_and_nothing_else():
    done = multigpu("--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert_schema(report)
    assert report["ok"]


def test_the_text_fits_80_columns_and_names_every_check():
    done = multigpu(COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[1] for line in lines if re.match(r"(ok|warn|missing) ", line)]
    assert names == list(DETAILS)
    assert lines[-1].startswith("Every lesson's needs are met")


def test_without_any_program(tmp_path):
    """Neither nvidia-smi, mpirun, bwrap nor unshare: no trouble, and what to install is said."""
    done = multigpu("--json", PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert_schema(report)
    fixes = {
        check["name"]: check["fix"]
        for check in report["checks"]
        if check["status"] == "missing"
    }
    assert fixes["mpi"] == "sudo apt-get install openmpi-bin"
    assert fixes["sandbox"] == "sudo apt-get install bubblewrap"


def test_a_machine_on_which_every_probe_fails(monkeypatch):
    def broken(*_):
        raise PermissionError(13, "Permission denied\non two lines")

    specs = [spec._replace(probe=broken) for spec in doctor.CHECKS]
    monkeypatch.setattr(doctor, "CHECKS", specs)
    report = doctor.as_dict(doctor.examine())
    assert_schema(report)
    assert not report["ok"]
    assert {check["status"] for check in report["checks"] if not check["needed"]} == {"warn"}
    assert all("Permission denied" in check["found"] for check in report["checks"])


@pytest.mark.parametrize(
    "torch",
    ["raise ImportError('libfoo.so: not found')", "import os; os._exit(7)", "print('hm')"],
)
def test_without_torch_the_exit_code_is_1(monkeypatch, capsys, torch):
    from multigpu import cli

    monkeypatch.setattr(software, "TORCH_PROBE", torch)
    with pytest.raises(SystemExit) as ended:
        cli.doctor_command(as_json=True)
    assert ended.value.code == 1
    report = json.loads(capsys.readouterr().out)
    assert_schema(report)
    missing = [
        check["name"]
        for check in report["checks"]
        if check["needed"] and check["status"] == "missing"
    ]
    assert missing == ["torch", "gloo"]


def test_a_torch_that_never_answers(monkeypatch):
    monkeypatch.setattr(software, "TORCH_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(software, "TORCH_SECONDS", 0.5)
    assert software.torch(software.torch_facts()).text == "no answer in 0.5 s"


def test_a_gloo_that_never_answers(monkeypatch):
    """The facts about torch are not lost if gloo hangs on the host's name."""
    began = time.monotonic()
    assert software.gloo(software.torch_facts()).status == "ok"
    whole = time.monotonic() - began
    hangs = software.TORCH_PROBE.replace(
        "    try:\n", "    import time; time.sleep(60)\n    try:\n"
    )
    monkeypatch.setattr(software, "TORCH_PROBE", hangs)
    monkeypatch.setattr(software, "TORCH_SECONDS", 2 + 2 * whole)
    facts = software.torch_facts()
    assert software.torch(facts).status == "ok"
    assert (software.gloo(facts).status, software.gloo(facts).text) == ("missing", "no answer")


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.10.1", "missing"),
        ("2.11.0", "ok"),
        ("2.13.0+cu130", "ok"),
        ("2.14.0a0+git", "warn"),
        ("3.0", "warn"),
    ],
)
def test_versions_of_torch(version, status):
    assert software.torch({"version": version, "cuda": None, "hip": None}).status == status


def test_the_range_of_torch_is_pyprojects():
    low, high = re.search(
        r'"torch>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text()
    ).groups()
    assert (low, high) == tuple(
        ".".join(map(str, limit)) for limit in (software.TORCH_FROM, software.TORCH_BELOW)
    )


def test_gpus():
    gpus = [{"name": "NVIDIA H100", "memory_gib": 79.2}] * 2
    found = software.gpu({"gpus": gpus})
    assert (found.status, found.details) == ("ok", {"count": 2, "devices": gpus})
    assert found.text == "2: NVIDIA H100 (79.2 GiB), NVIDIA H100 (79.2 GiB)"


def test_gpus_that_torch_does_not_see(tmp_path, monkeypatch):
    program(tmp_path, "nvidia-smi", "echo NVIDIA A100; echo NVIDIA A100")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = software.gpu({"gpus": [], "cuda": None})
    assert (found.status, "nvidia-smi sees 2" in found.text, "CUDA build" in found.fix) == (
        "warn",
        True,
        True,
    )
    program(tmp_path, "nvidia-smi", "echo 'No devices were found'; exit 6")
    assert software.gpu({"gpus": [], "cuda": None}).status == "missing"


@pytest.mark.parametrize(
    ("says", "flavour", "version"),
    [
        ("mpirun (Open MPI) 4.1.4", "openmpi", "4.1.4"),
        ("HYDRA build details:\\n    Version:     4.0.2", "mpich", "4.0.2"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307",
            "intel",
            "2021.9",
        ),
        ("another one", None, None),
    ],
)
def test_which_mpi(tmp_path, monkeypatch, says, flavour, version):
    program(tmp_path, "mpirun", f"printf '{says}\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = software.mpi()
    assert (found.status, found.details["flavour"], found.details["version"]) == (
        "ok",
        flavour,
        version,
    )


def test_a_sandbox_that_does_not_work(tmp_path, monkeypatch):
    program(
        tmp_path, "bwrap", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = software.sandbox()
    assert (found.status, found.details["works"]) == ("warn", False)
    assert "No permissions to create new namespace" in found.text


@pytest.mark.parametrize(
    ("there", "status", "fix"),
    [
        ([], "missing", "multigpu slurm install"),
        (["sbatch"], "ok", ""),
        (["sbatch", "slurmctld"], "warn", "multigpu slurm install"),
        (["sbatch", "slurmctld", "slurmd", "munged"], "ok", ""),
    ],
)
def test_slurm_in_part(tmp_path, monkeypatch, there, status, fix):
    for name in there:
        program(tmp_path, name, "echo slurm 23.11.4")
    monkeypatch.setattr(
        software, "find", lambda name: str(tmp_path / name) if name in there else None
    )
    found = software.slurm()
    assert (found.status, found.fix, found.details.get("version")) == (
        status,
        fix,
        "23.11.4" if there else None,
    )


def test_a_small_and_a_missing_dev_shm(monkeypatch):
    import shutil

    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(64 * 2**20, 0, 64 * 2**20)
    )
    monkeypatch.setattr(os.path, "isdir", lambda _: True)
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert (machine.shm().status, machine.shm().details) == (
        "warn",
        {"total_gib": 0.06, "free_gib": 0.06},
    )
    monkeypatch.setattr(os.path, "isdir", lambda _: False)
    assert machine.shm().status == "missing"


def test_a_low_limit_on_open_files(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    found = machine.files()
    assert (found.status, found.fix, found.details) == (
        "warn",
        "ulimit -n 4096",
        {"soft": 256, "hard": None},
    )


@pytest.mark.parametrize(
    ("name", "text", "cores"), [("cpu.max", "150000 100000", 1), ("cpu.max", "max 100000", 8)]
)
def test_cores_of_a_container(monkeypatch, name, text, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "cgroup", lambda asked: text if asked == name else "")
    assert machine.cpu().details == {"cores": cores}


def test_memory_of_a_container(monkeypatch):
    monkeypatch.setattr(
        machine, "cgroup", lambda name: str(2**30) if name == "memory.max" else ""
    )
    assert (machine.memory().status, machine.memory().details["total_gib"]) == ("warn", 1.0)


def test_a_command_that_hangs_with_its_children_holding_the_pipe():
    started = time.monotonic()
    early = (None, "early\n", "no answer in 0.5 s")
    assert (
        machine.ask("sh", "-c", "echo early; sleep 60 & sleep 60", seconds=0.5) == early
    )  # both sleeps were ended
    code, _, err = machine.ask(
        "sh", "-c", "setsid sleep 5 & sleep 60", seconds=0.5
    )  # one got away
    assert (code, err) == (None, "no answer in 0.5 s")
    assert time.monotonic() - started < 4


def test_daemons_are_found_on_the_path_and_off_it(tmp_path, monkeypatch):
    program(tmp_path, "multigpu-tool", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.find("multigpu-tool") == str(tmp_path / "multigpu-tool")
    assert machine.find("multigpu-no-such-tool") is None
    monkeypatch.setattr(machine, "SBIN", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert machine.find("multigpu-tool") == str(tmp_path / "multigpu-tool")


def test_a_command_that_is_not_there_or_not_allowed(tmp_path):
    (tmp_path / "tool").touch()
    assert machine.ask("/nowhere/tool") == (
        None,
        "",
        "/nowhere/tool: No such file or directory",
    )
    assert machine.ask(str(tmp_path / "tool")) == (
        None,
        "",
        f"{tmp_path}/tool: Permission denied",
    )


def test_the_whole_is_fast():
    started = time.monotonic()
    doctor.examine()
    assert (
        time.monotonic() - started < 30
    )  # a few seconds; the limit leaves room for a busy machine
