"""Is the classroom cluster a real one, does it leave nothing behind, and does it keep its hands off other people's?"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cluster import Cluster, alive, wait_until

from multigpu import classroom
from multigpu.classroom import conf, processes
from multigpu.errors import UserError

pytestmark = pytest.mark.classroom

NODES = ["munged", "slurmctld", "slurmd n1", "slurmd n2"]


@pytest.fixture
def private(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """A place for a second cluster, so that these tests may break it; it never meets the one of the session."""
    folder = tmp_path_factory.mktemp("c")
    (folder / "etc").mkdir()
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setattr(conf, "ROOT_STATE", folder / "state/multigpu/slurm")
    monkeypatch.setattr(conf, "SYSTEM_CONF", folder / "etc/slurm.conf")
    if why_not := classroom.obstacle():
        pytest.skip(why_not)
    yield folder
    classroom.down()
    assert not processes.daemons() and not processes.job_processes()


def nothing_is_left(folder: Path) -> bool:
    there = [
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "foreign"
    ]
    return (
        sorted(there) == ["etc", "state"]
        and not processes.daemons()
        and not processes.job_processes()
    )


# ---- up, status, down -------------------------------------------------------------------------------------------


def test_up_status_down_and_each_of_them_twice(private: Path):
    assert classroom.status() == (
        False,
        "The cluster is not up: `multigpu slurm up` starts it.",
    )
    assert "nothing to do" in classroom.down()
    with pytest.raises(UserError, match="not up"):
        classroom.env()

    assert "The cluster is up: 2 nodes with 2 pretended GPUs each." in classroom.up()
    first = processes.daemons()
    assert sorted(first) == NODES
    assert "already up" in classroom.up()
    assert processes.daemons() == first, (
        "the second `up` must leave the first one's daemons alone"
    )
    running, text = classroom.status()
    assert running and len(re.findall(r"n[12] +idle +16 +gpu:2", text)) == 2, text
    if os.geteuid() == 0:
        assert os.readlink(conf.SYSTEM_CONF) == str(conf.conf_path()) and classroom.env() == ""
    else:
        assert classroom.env() == f"export SLURM_CONF={conf.conf_path()}"

    assert "is down" in classroom.down()
    assert nothing_is_left(private)
    assert not any(alive(pid) for pid in first.values())
    assert "nothing to do" in classroom.down()


def test_another_shape(private: Path):
    classroom.up(nodes=3, gpus_per_node=4)
    with pytest.raises(
        UserError,
        match=r"A cluster of 3 nodes with 4 GPUs each is up: run `multigpu slurm down` first",
    ):
        classroom.up()
    seen = 'echo "$SLURMD_NODENAME $SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES"'
    for gpus in ("--gpus-per-node=4", "--gres=gpu:4"):
        lines = Cluster().run("srun", "--nodes=3", gpus, "bash", "-c", seen).stdout.split("\n")
        assert sorted(lines) == ["", "n1 4 0,1,2,3", "n2 4 0,1,2,3", "n3 4 0,1,2,3"]


@pytest.mark.parametrize("nodes, gpus", [(0, 2), (17, 2), (2, -1), (2, 17)])
def test_an_impossible_shape(nodes: int, gpus: int, private: Path):
    with pytest.raises(
        UserError, match=f"1 to 16 nodes with 0 to 16 GPUs each, not {nodes} with {gpus}"
    ):
        classroom.up(nodes, gpus)


def test_four_at_once(private: Path):
    said = []
    threads = [
        threading.Thread(target=lambda: said.append(classroom.up().split(":")[0]))
        for _ in range(4)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(said) == 4 and sum("already up" in text for text in said) == 3
    assert classroom.status()[0] and sorted(processes.daemons()) == NODES


def test_it_listens_on_the_loopback_address_only(private: Path):
    try:
        named = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0]
    except OSError:
        named = "nothing"
    if named != "127.0.0.1":
        pytest.skip(f"Slurm binds to what this machine's name means, and it means {named}")
    classroom.up()
    ports = {int(port) for port in re.findall(r"[Pp]ort=(\d+)", conf.conf_path().read_text())}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    listening = [row[1].split(":") for row in rows if row[3] == "0A"]
    ours = [(address, int(port, 16)) for address, port in listening if int(port, 16) in ports]
    assert sorted(ours) == sorted(
        ("0100007F", port) for port in ports
    )  # 127.0.0.1, as the kernel writes it


@pytest.mark.parametrize(
    "version, plugin", [((22, 5), "cgroup/v1"), ((23, 11), "disabled"), ((24, 11), "disabled")]
)
def test_no_cgroups(version: tuple[int, int], plugin: str, private: Path):
    """Left to itself, slurmd looks for cgroups and ends where it finds no /sys or may not use it."""
    conf.write(2, 2, version)
    assert (conf.state_dir() / "cgroup.conf").read_text() == f"CgroupPlugin={plugin}\n"


# ---- what is not ours -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_a_foreign_configuration_is_left_alone(kind: str, private: Path):
    theirs = private / "foreign"
    if kind == "file":
        conf.SYSTEM_CONF.write_text("ClusterName=theirs\n")
    else:
        conf.SYSTEM_CONF.symlink_to(theirs)
    if kind == "link":
        theirs.write_text("ClusterName=theirs\n")
    before = os.lstat(conf.SYSTEM_CONF)
    with pytest.raises(
        UserError, match=r"slurm\.conf is not of our making: this machine has a Slurm already"
    ):
        classroom.up()
    classroom.down()
    assert os.lstat(conf.SYSTEM_CONF) == before
    assert not processes.daemons() and not conf.state_dir().exists()


def test_a_foreign_daemon_is_left_alone(private: Path):
    theirs = subprocess.Popen(["bash", "-c", "exec -a /usr/sbin/slurmd sleep 60"])
    try:
        deadline = time.monotonic() + 10
        while not processes.foreign() and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(
            UserError,
            match=rf"/usr/sbin/slurmd runs here \(pid {theirs.pid}\) and is not ours",
        ):
            classroom.up()
        classroom.down()
        assert theirs.poll() is None
    finally:
        theirs.kill()
        theirs.wait()


def test_a_foreign_slurm_conf_in_the_environment(
    private: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_CONF", "/site/slurm.conf")
    with pytest.raises(
        UserError, match=r"SLURM_CONF is /site/slurm\.conf, which is not of our making"
    ):
        classroom.up()


def test_down_ends_nobody_who_only_speaks_of_the_cluster(private: Path):
    """An editor with our slurm.conf open, a learner's shell with SLURM_CONF set, a copy of our pid file's number."""
    classroom.up()
    path = str(conf.conf_path())
    bystanders = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", path]),
        subprocess.Popen(["sleep", "60"], env={**os.environ, "SLURM_CONF": path}),
        subprocess.Popen(
            ["sleep", "60"],
            env={**os.environ, "SLURM_CONF": "/other", "SLURMD_NODENAME": "n1"},
        ),
    ]
    (conf.state_dir() / "slurmctld.pid").write_text(f"{bystanders[0].pid}\n")
    classroom.down()
    assert [process.poll() for process in bystanders] == [None] * 3
    for process in bystanders:
        process.kill()
        process.wait()


# ---- when it goes wrong -----------------------------------------------------------------------------------------


def test_slurm_is_missing(private: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(classroom, "_which", lambda program: None)
    with pytest.raises(
        UserError,
        match=r"not installed here \(munge and slurm-wlm missing\): run `multigpu slurm inst",
    ):
        classroom.up()


@pytest.mark.parametrize(
    "daemon, change, told",
    [
        ("slurmctld", lambda text: text + "Nonsense=yes\n", "unrecognized key: Nonsense"),
        (
            "slurmd n2",
            lambda text: re.sub(r"(NodeName=n2 .* Port=)\d+", r"\g<1>{taken}", text),
            "already in use",
        ),
    ],
)
def test_a_daemon_that_does_not_start(
    daemon: str, change, told: str, private: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its own last words are shown, and the daemons that did start are ended again."""
    real = conf.slurm_conf
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        monkeypatch.setattr(
            conf, "slurm_conf", lambda *shape: change(real(*shape)).replace("{taken}", taken)
        )
        with pytest.raises(UserError) as caught:
            classroom.up()
    assert str(caught.value).startswith(f"{daemon} ended with exit code 1") and told in str(
        caught.value
    )
    assert nothing_is_left(private)


def test_a_state_directory_that_slurm_cannot_use(
    private: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("with space", "x" * 80):
        folder = private / name / "multigpu/slurm"
        monkeypatch.setattr(conf, "ROOT_STATE", folder)
        monkeypatch.setenv("XDG_STATE_HOME", str(private / name))
        with pytest.raises(UserError, match=r"Slurm cannot work in .* set XDG_STATE_HOME"):
            classroom.up()
        assert not (private / name).exists()


def test_after_a_crash(private: Path):
    """All daemons killed, all files left: the next `up` starts afresh; so does it after a crash of one daemon alone."""
    classroom.up()
    for names in (NODES, ["slurmctld"], ["munged"], ["slurmd n2"]):
        running = processes.daemons()
        for name in names:
            os.kill(running[name], signal.SIGKILL)
        wait_until(lambda names=names: not set(names) & set(processes.daemons()))
        up, text = classroom.status()
        assert not up and (names == NODES or f"Not running: {names[0]}." in text), text
        assert "The cluster is up" in classroom.up()
        assert (
            classroom.status()[0]
            and Cluster().run("srun", "--nodes=2", "true").returncode == 0
        )


def test_down_ends_jobs_that_do_not_want_to_end(private: Path):
    """A task that ignores SIGTERM, a process that left its job's session, both also when their slurmd has crashed."""
    work = private / "foreign"  # a folder of the test's, not the cluster's
    for crash in (False, True):
        work.mkdir()
        classroom.up()
        pids = work / "pids"
        text = f"""trap '' TERM
        setsid sleep 600 & echo $! >> {pids}
        srun bash -c 'trap "" TERM; echo $$ >> {pids}; sleep 600; sleep 600'"""
        Cluster().submit("--nodes=2", Cluster().script(work, text), cwd=work)
        wait_until(lambda pids=pids: pids.exists() and pids.read_text().count("\n") == 3)
        if crash:
            os.kill(processes.daemons()["slurmd n1"], signal.SIGKILL)
        said = classroom.down()
        assert re.search(r"Cancelled: job \d+ of \w+\.", said), said
        assert not [pid for pid in pids.read_text().split() if alive(int(pid))]
        shutil.rmtree(work)
    assert nothing_is_left(private)


def test_a_job_may_not_take_its_own_cluster_down(
    private: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as job:
        job.setenv("SLURMD_NODENAME", "n1")
        job.setenv("SLURM_CONF", str(conf.conf_path()))
        with pytest.raises(UserError, match="is a job of the cluster itself"):
            classroom.down()


# ---- install ----------------------------------------------------------------------------------------------------


def test_install(monkeypatch: pytest.MonkeyPatch):
    there, ran = {"apt-get": "/usr/bin/apt-get"}, []
    monkeypatch.setattr(classroom, "_which", there.get)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        UserError,
        match=r"run `sudo apt-get install --yes --no-install-recommends munge slurm-wlm`",
    ):
        classroom.install()

    def apt(
        command: list[str], environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        ran.append(" ".join(command))
        return subprocess.CompletedProcess(command, answer, "reading\n", "E: no network\n")

    answer = 100
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(classroom, "_run", apt)
    with pytest.raises(UserError, match=r"(?s)`apt-get update` failed.*E: no network"):
        classroom.install()
    answer = 0
    there["munged"] = "/usr/sbin/munged"
    assert classroom.install(with_mpi=True) == "Installed: slurm-wlm, openmpi-bin."
    assert ran[1:] == [
        "apt-get update",
        "apt-get install --yes --no-install-recommends slurm-wlm openmpi-bin",
    ]
    there |= {"slurmd": "x", "mpirun": "x"}
    assert (
        classroom.install(with_mpi=True) == "Already installed: munge, slurm-wlm, openmpi-bin."
        and len(ran) == 3
    )
    there.clear()
    with pytest.raises(
        UserError, match="This is not Debian or Ubuntu: install munge and slurm-wlm"
    ):
        classroom.install()
