"""The classroom cluster works like a real one, for root and for an ordinary user."""

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cluster import Cluster, wait_until
from commands import ROOT, alive, clean_environment

from multigpu import classroom

pytestmark = pytest.mark.classroom


def test_a_plain_sbatch_finds_the_cluster(cluster: Cluster, tmp_path: Path):
    """As root in any new shell; as an ordinary user after eval "$(multigpu slurm env)"."""
    sbatch = 'sbatch --wait --output=log --wrap="hostname; exit 3"'
    line = f'eval "$(multigpu slurm env)" && {sbatch}; echo "code $?"'
    done = subprocess.run(
        ["bash", "-c", line],
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("code 3\n"), done
    assert (tmp_path / "log").read_text().strip() == socket.gethostname()


def test_squeue_and_scancel(cluster: Cluster, tmp_path: Path):
    number = cluster.submit(cluster.script(tmp_path, "touch began; sleep 600"), cwd=tmp_path)
    wait_until((tmp_path / "began").exists)
    assert (
        cluster.run("squeue", "--noheader", f"--jobs={number}", "--format=%T").stdout.strip()
        == "RUNNING"
    )
    assert cluster.run("scancel", number).returncode == 0
    job = cluster.wait(number, timeout=60)
    assert job.state == "CANCELLED" and "CANCELLED" in job.log


def test_salloc_and_srun(cluster: Cluster):
    line = 'echo "$SLURM_PROCID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"'
    options = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2")
    done = cluster.run("salloc", *options, "srun", "bash", "-c", line)
    assert sorted(done.stdout.splitlines()) == [
        "0 n1 0,1",
        "1 n1 0,1",
        "2 n2 0,1",
        "3 n2 0,1",
    ], done.stderr
    done = cluster.run("srun", *options, "--gpus-per-task=1", "bash", "-c", line)
    assert sorted(done.stdout.splitlines()) == ["0 n1 0", "1 n1 1", "2 n2 0", "3 n2 1"], (
        done.stderr
    )


def test_two_jobs_on_a_node_get_different_gpus(cluster: Cluster, tmp_path: Path):
    script = cluster.script(
        tmp_path,
        "echo $CUDA_VISIBLE_DEVICES > $SLURM_JOB_ID; until [ -e go ]; do sleep 0.1; done",
    )
    flags = ("--nodelist=n1", "--gres=gpu:1")
    first, second, third = (cluster.submit(*flags, script, cwd=tmp_path) for _ in range(3))
    wait_until(
        lambda: all(
            (tmp_path / str(job)).exists() and (tmp_path / str(job)).read_text()
            for job in (first, second)
        )
    )
    assert {(tmp_path / str(job)).read_text().strip() for job in (first, second)} == {"0", "1"}
    assert (
        cluster.run("squeue", "--noheader", f"--jobs={third}", "--format=%T").stdout.strip()
        == "PENDING"
    )
    (tmp_path / "go").touch()
    assert [cluster.wait(job).exit_code for job in (first, second, third)] == [0, 0, 0]


def test_more_gpus_than_a_node_has(cluster: Cluster):
    done = cluster.run("srun", "--nodes=1", "--gpus-per-node=99", "true")
    assert done.returncode != 0 and "configuration is not available" in done.stderr


def test_sacct_lists_the_jobs_that_ended(cluster: Cluster, tmp_path: Path):
    job = cluster.job(
        "--job-name=remembered", cluster.script(tmp_path, "exit 4"), cwd=tmp_path
    )
    listed = cluster.run(
        "sacct", "-c", "--noheader", "--parsable2", "--format=jobid,jobname,state"
    ).stdout.splitlines()
    assert f"{job.number}|remembered|FAILED" in listed


# ---- as an ordinary user --------------------------------------------------------------------


@pytest.fixture
def ordinary_user():
    """A user of this machine without privileges, removed after the test."""
    if os.geteuid() != 0 or not shutil.which("useradd"):
        pytest.skip("only root can make a user for this test, with useradd (package passwd)")
    if reason := classroom.unavailable_reason():
        pytest.skip(reason)
    name, home = f"course{os.getpid()}", Path(tempfile.mkdtemp(prefix="course-"))
    subprocess.run(
        ["useradd", "--no-create-home", "--home-dir", home, "--shell", "/bin/bash", name],
        check=True,
    )
    try:
        user = pwd.getpwnam(name)
        shutil.copytree(
            ROOT / "multigpu", home / "multigpu", ignore=shutil.ignore_patterns("__pycache__")
        )
        for path in (home, *home.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid)
        yield user
    finally:
        subprocess.run(["userdel", name], check=True)
        shutil.rmtree(home, ignore_errors=True)


def test_as_an_ordinary_user(ordinary_user):
    """A cluster of a user without privileges, beside root's cluster if that is up."""
    home = ordinary_user.pw_dir

    def as_user(*command: str) -> subprocess.CompletedProcess[str]:
        path = "/usr/local/bin:/usr/bin:/bin"
        return subprocess.run(
            command,
            cwd=home,
            user=ordinary_user.pw_uid,
            group=ordinary_user.pw_gid,
            extra_groups=[],
            env={"HOME": home, "USER": ordinary_user.pw_name, "PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )

    def works(python: str) -> bool:
        is_old = "import sys; sys.exit(sys.version_info < (3, 11))"
        try:
            return as_user(python, "-c", is_old).returncode == 0
        except PermissionError:
            return False

    pythons = [sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")]
    python = next(filter(works, filter(None, pythons)), None)
    if not python:
        pytest.skip(
            "an ordinary user can run no python ≥ 3.11 here (this environment's lies in "
            "root's home)"
        )

    def course(expression: str) -> str:
        program = f"from multigpu import classroom; print({expression})"
        done = as_user(python, "-c", program)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    started = course("classroom.up()")
    assert "The cluster is up: 2 nodes" in started
    try:
        # The line that the shell needs, and the message of a shell without it.
        assert f"export SLURM_CONF={home}/" in started
        assert "Could not establish a configuration source" in started
        assert "already up" in course("classroom.up()")
        line = course("classroom.env()")
        assert line == f"export SLURM_CONF={home}/.local/state/multigpu/slurm/slurm.conf"
        Path(home, "job.sh").write_text(
            "#!/bin/bash\n"
            "#SBATCH --nodes=2 --ntasks-per-node=2 --gres=gpu:2 --output=log\n"
            "srun bash -c 'echo $(id -un) $SLURMD_NODENAME'\n"
            "exit 6\n"
        )
        done = as_user(
            "bash",
            "-c",
            f"{line} && sbatch --wait job.sh; echo code $?; sacct -c -n -P -o state",
        )
        assert done.stdout.splitlines()[1:] == ["code 6", "FAILED"], done
        name = ordinary_user.pw_name
        lines = sorted(Path(home, "log").read_text().splitlines())
        assert lines == [f"{name} n1", f"{name} n1", f"{name} n2", f"{name} n2"]
        assert course("classroom.status()[0]") == "True"
    finally:
        text = course("classroom.down()")
    assert "is down" in text and "nothing to do" in course("classroom.down()")
    assert os.listdir(Path(home, ".local/state")) == []
    own = [
        path
        for path in Path("/proc").glob("[0-9]*")
        if path.exists() and path.stat().st_uid == ordinary_user.pw_uid
    ]
    assert not [path for path in own if alive(int(path.name))]
