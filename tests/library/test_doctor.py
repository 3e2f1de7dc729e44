"""The doctor's JSON is stable, and the doctor works on unusual machines."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from multigpu import __version__
from multigpu.cli import doctor
from multigpu.cli.doctor import machine, pytorch, software
from multigpu.launch.commands import run_bounded

pytestmark = pytest.mark.slow

# A copy on purpose: a change of the JSON needs a new `schema`, and a change here.
DETAILS = {
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


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_the_text_fits_80_columns_and_names_every_check():
    done = multigpu(COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[1] for line in lines if re.match(r"(ok|warn|missing) ", line)]
    assert names == list(DETAILS)
    assert lines[-1].startswith("The lessons can run")


def test_without_any_program(tmp_path):
    """Without nvidia-smi, mpirun, bwrap and unshare it succeeds and names the packages.

    The output is JSON of the schema and nothing else.
    """
    done = multigpu("--json", PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert_schema(report)
    assert report["ok"]
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

    specs = [replace(spec, probe=broken) for spec in doctor.CHECKS]
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

    monkeypatch.setattr(pytorch, "TORCH_PROBE", torch)
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


# A torch without a GPU, whose gloo waits for the host's name.
HANGS = """
import json, time
from types import SimpleNamespace as Module
no, yes = lambda: 0, lambda: 1
version = Module(cuda=None, hip=None)
torch = Module(__version__="2.13.0", version=version, cuda=Module(device_count=no))
dist = Module(is_available=yes, is_mpi_available=no, is_nccl_available=no, HashStore=object)
dist.is_gloo_available, dist.init_process_group = yes, lambda *_, **__: time.sleep(60)
"""


def test_a_gloo_that_never_answers(monkeypatch):
    """The facts about torch are kept if gloo hangs on the host's name."""
    imports, _, rest = pytorch.TORCH_PROBE.partition("facts =")
    assert imports.split()[-1] == "dist"
    monkeypatch.setattr(pytorch, "TORCH_PROBE", f"{HANGS}\nfacts ={rest}")
    monkeypatch.setattr(pytorch, "TORCH_SECONDS", 1)
    facts = pytorch.torch_facts()
    assert pytorch.torch(facts).status == "ok"
    assert (pytorch.gloo(facts).status, pytorch.gloo(facts).text) == ("missing", "no answer")


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
    assert pytorch.torch({"version": version, "cuda": None, "hip": None}).status == status


def test_gpus_that_torch_does_not_see(tmp_path, monkeypatch):
    program(tmp_path, "nvidia-smi", "echo NVIDIA A100; echo NVIDIA A100")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = pytorch.gpu({"gpus": [], "cuda": None})
    assert found.status == "warn"
    assert "nvidia-smi sees 2" in found.text and "CUDA build" in found.fix
    program(tmp_path, "nvidia-smi", "echo 'No devices were found'; exit 6")
    assert pytorch.gpu({"gpus": [], "cuda": None}).status == "missing"


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
    assert found.status == "ok"
    assert (found.details["flavour"], found.details["version"]) == (flavour, version)


@pytest.mark.parametrize(
    ("installed", "status", "fix"),
    [
        ([], "missing", "multigpu slurm install"),
        (["sbatch"], "ok", ""),
        (["sbatch", "slurmctld"], "warn", "multigpu slurm install"),
        (["sbatch", "slurmctld", "slurmd", "munged"], "ok", ""),
    ],
)
def test_slurm_in_part(tmp_path, monkeypatch, installed, status, fix):
    for name in installed:
        program(tmp_path, name, "echo slurm 23.11.4")
    monkeypatch.setattr(
        software,
        "find_program",
        lambda name: str(tmp_path / name) if name in installed else None,
    )
    found = software.slurm()
    assert (found.status, found.fix) == (status, fix)
    assert found.details.get("version") == ("23.11.4" if installed else None)


def test_a_small_and_a_missing_dev_shm(monkeypatch):
    import shutil

    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(64 * 2**20, 0, 64 * 2**20)
    )
    monkeypatch.setattr(os.path, "isdir", lambda _: True)
    monkeypatch.setattr(os, "access", lambda *_: True)
    found = machine.shm()
    assert found.status == "warn"
    assert found.details == {"total_gib": 0.06, "free_gib": 0.06}
    monkeypatch.setattr(os.path, "isdir", lambda _: False)
    assert machine.shm().status == "missing"


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
    # Both sleeps are ended.
    assert run_bounded("sh", "-c", "echo early; sleep 60 & sleep 60", seconds=0.5) == early
    # One sleep is in another session and keeps running.
    code, _, err = run_bounded("sh", "-c", "setsid sleep 5 & sleep 60", seconds=0.5)
    assert (code, err) == (None, "no answer in 0.5 s")
    assert time.monotonic() - started < 4
