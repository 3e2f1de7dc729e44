"""The classroom cluster is a real one, removes everything, and leaves other Slurms alone."""

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
from cluster import Cluster, wait_until
from commands import ROOT, alive

from multigpu import classroom
from multigpu.classroom import conf, packages, processes
from multigpu.errors import UserError

pytestmark = pytest.mark.classroom

NODES = ["munged", "slurmctld", "slurmd n1", "slurmd n2"]


def nothing_is_left(folder: Path) -> bool:
    files = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "foreign"
    )
    running = processes.daemons() or processes.job_processes()
    return files == ["etc", "state"] and not running


# ---- up, status, down -----------------------------------------------------------------------


def test_up_status_down_and_each_of_them_twice(private: Path):
    running, text = classroom.status()
    assert not running and "not up" in text and "`multigpu slurm up`" in text
    assert "nothing to do" in classroom.down()
    with pytest.raises(UserError, match="not up"):
        classroom.env()

    text = classroom.up()
    assert "The cluster is up" in text and "2 nodes with 2 simulated GPUs each" in text
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


def test_gpus_that_have_a_type(private: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a real site: --gres=gpu:a100:2 and --gpus-per-node=a100:2 count as two GPUs."""
    plain = conf.slurm_conf
    monkeypatch.setattr(
        conf, "slurm_conf", lambda *shape: plain(*shape).replace("Gres=gpu:", "Gres=gpu:a100:")
    )
    write = conf.write

    def write_typed(*arguments: object) -> None:
        write(*arguments)
        gres = conf.state_dir() / "gres.conf"
        gres.write_text(gres.read_text().replace("Name=gpu ", "Name=gpu Type=a100 "))

    monkeypatch.setattr(conf, "write", write_typed)
    classroom.up()
    line = (
        "from multigpu.launch import find_world; import os; world = find_world(); "
        "print(world.size, os.environ['SLURM_GPUS_ON_NODE'])"
    )
    for gpus in ("--gres=gpu:a100:2", "--gpus-per-node=a100:2", "--gpus-per-node=2"):
        done = Cluster().run(
            *("srun", "--ntasks-per-node=2", "--nodes=2", gpus),
            *(sys.executable, "-c", line),
            PYTHONPATH=str(ROOT),
        )
        assert done.stdout.splitlines() == ["4 2"] * 4, done.stderr
    # One task for two GPUs is refused, whatever the form of the request.
    done = Cluster().run(
        *("srun", "--ntasks-per-node=1", "--nodes=2", "--gres=gpu:a100:2"),
        *(sys.executable, "-c", line),
        PYTHONPATH=str(ROOT),
    )
    assert done.returncode != 0 and "2 GPUs, but srun started 1 task" in done.stderr


def test_four_calls_of_up_at_once(private: Path):
    texts = []
    threads = [
        threading.Thread(target=lambda: texts.append(classroom.up().split(":")[0]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4 and sum("already up" in text for text in texts) == 3
    assert classroom.status()[0] and sorted(processes.daemons()) == NODES


def test_it_listens_on_the_loopback_address_only(private: Path):
    try:
        address = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0]
    except OSError:
        address = "nothing"
    if address != "127.0.0.1":
        pytest.skip(f"Slurm binds to the address of this machine's name, which is {address}")
    classroom.up()
    ports = {int(port) for port in re.findall(r"[Pp]ort=(\d+)", conf.conf_path().read_text())}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    listening = [row[1].split(":") for row in rows if row[3] == "0A"]
    own = [(address, int(port, 16)) for address, port in listening if int(port, 16) in ports]
    # 127.0.0.1, as the kernel writes it
    assert sorted(own) == sorted(("0100007F", port) for port in ports)


# ---- another Slurm -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_a_foreign_configuration_is_left_alone(kind: str, private: Path):
    foreign = private / "foreign"
    if kind == "file":
        conf.SYSTEM_CONF.write_text("ClusterName=foreign\n")
    else:
        conf.SYSTEM_CONF.symlink_to(foreign)
    if kind == "link":
        foreign.write_text("ClusterName=foreign\n")
    before = os.lstat(conf.SYSTEM_CONF)
    with pytest.raises(
        UserError, match=r"slurm\.conf was not written by .*: this machine has a Slurm already"
    ):
        classroom.up()
    classroom.down()
    assert os.lstat(conf.SYSTEM_CONF) == before
    assert not processes.daemons() and not conf.state_dir().exists()


def test_a_foreign_daemon_is_left_alone(private: Path):
    foreign = subprocess.Popen(["bash", "-c", "exec -a /usr/sbin/slurmd sleep 60"])
    try:
        deadline = time.monotonic() + 10
        while not processes.foreign_daemon() and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(
            UserError,
            match=rf"/usr/sbin/slurmd runs here \(pid {foreign.pid}\).* not the classroom",
        ):
            classroom.up()
        classroom.down()
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_down_ends_no_other_process_that_names_the_cluster(private: Path):
    """An editor of slurm.conf, a shell with SLURM_CONF, a process with a pid file's number."""
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


# ---- when it goes wrong ---------------------------------------------------------------------


def test_slurm_is_missing(private: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packages, "find_program", lambda program: None)
    with pytest.raises(
        UserError,
        match=r"not installed here \(munge and slurm-wlm missing\).*`multigpu slurm install`",
    ):
        classroom.up()


@pytest.mark.parametrize(
    "daemon, change, message",
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
    daemon: str, change, message: str, private: Path, monkeypatch: pytest.MonkeyPatch
):
    """The last lines of its log are shown, and the daemons that did start are ended."""
    original = conf.slurm_conf
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        monkeypatch.setattr(
            conf,
            "slurm_conf",
            lambda *shape: change(original(*shape)).replace("{taken}", taken),
        )
        with pytest.raises(UserError) as caught:
            classroom.up()
    text = str(caught.value)
    assert text.startswith(f"{daemon} ended with exit code 1") and message in text
    assert nothing_is_left(private)


def test_after_a_crash(private: Path):
    """After all daemons, or one of them, were killed, the next `up` starts afresh."""
    classroom.up()
    for names in (NODES, ["slurmctld"], ["munged"], ["slurmd n2"]):
        running = processes.daemons()
        for name in names:
            os.kill(running[name], signal.SIGKILL)
        wait_until(lambda names=names: not set(names) & set(processes.daemons()))
        up, text = classroom.status()
        assert not up and (names == NODES or f"Not running: {names[0]}." in text), text
        assert "The cluster is up" in classroom.up()
        assert classroom.status()[0]
        assert Cluster().run("srun", "--nodes=2", "true").returncode == 0


def test_down_ends_jobs_that_ignore_signals(private: Path):
    """A task that ignores SIGTERM, a process in another session; also after slurmd crashed."""
    # a folder of the test, not of the cluster
    work = private / "foreign"
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
        text = classroom.down()
        assert re.search(r"Cancelled: job \d+ of \w+\.", text), text
        assert not [pid for pid in pids.read_text().split() if alive(int(pid))]
        shutil.rmtree(work)
    assert nothing_is_left(private)


def test_a_job_may_not_end_its_own_cluster(private: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as job:
        job.setenv("SLURMD_NODENAME", "n1")
        job.setenv("SLURM_CONF", str(conf.conf_path()))
        with pytest.raises(UserError, match="is a job of the cluster itself"):
            classroom.down()


# ---- install --------------------------------------------------------------------------------


def test_install(monkeypatch: pytest.MonkeyPatch):
    installed = {"apt-get": "/usr/bin/apt-get"}
    commands = []
    monkeypatch.setattr(packages, "find_program", installed.get)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        UserError,
        match=r"run `sudo apt-get install --yes --no-install-recommends munge slurm-wlm`",
    ):
        classroom.install()

    def apt(
        command: list[str], environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        commands.append(" ".join(command))
        return subprocess.CompletedProcess(command, exit_code, "reading\n", "E: no network\n")

    exit_code = 100
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(packages, "run", apt)
    with pytest.raises(UserError, match=r"(?s)`apt-get update` failed.*E: no network"):
        classroom.install()
    exit_code = 0
    installed["munged"] = "/usr/sbin/munged"
    assert classroom.install(with_mpi=True) == "Installed: slurm-wlm, openmpi-bin."
    assert commands[1:] == [
        "apt-get update",
        "apt-get install --yes --no-install-recommends slurm-wlm openmpi-bin",
    ]
    installed |= {"slurmd": "x", "mpirun": "x"}
    text = classroom.install(with_mpi=True)
    assert text == "Already installed: munge, slurm-wlm, openmpi-bin." and len(commands) == 3
    text = classroom.install(with_mpi=True, with_bubblewrap=True)
    assert text == "Installed: bubblewrap." and commands[-1].endswith(" bubblewrap")
    installed.clear()
    with pytest.raises(
        UserError, match="This is not Debian or Ubuntu: install munge and slurm-wlm"
    ):
        classroom.install()


# ---- a node dies ----------------------------------------------------------------------------


def test_a_killed_node_and_its_repair(private: Path):
    """Its slurmd and all processes of its jobs end at once; the other node's do not."""
    with pytest.raises(UserError, match="not up"):
        classroom.kill("n2")
    classroom.up()
    for command in (classroom.kill, classroom.repair):
        with pytest.raises(UserError, match="no node 'n3': its nodes are n1, n2"):
            command("n3")
    assert "n1 runs" in classroom.repair("n1")

    work = private / "foreign"
    work.mkdir()
    pids = work / "pids"
    text = f"""srun bash -c 'echo $SLURMD_NODENAME $$ >> {pids}; sleep 600; sleep 600'"""
    script = Cluster().script(work, text)
    Cluster().submit("--nodes=2", "--no-requeue", script, cwd=work)
    wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2)
    pid = {line.split()[0]: int(line.split()[1]) for line in pids.read_text().splitlines()}
    assert "n2 is dead" in classroom.kill("n2")
    assert not alive(pid["n2"]) and alive(pid["n1"])
    assert not processes.job_processes("n2") and processes.job_processes("n1")
    assert "slurmd n2" not in processes.daemons() and "slurmd n1" in processes.daemons()
    with pytest.raises(UserError, match="n2 does not run"):
        classroom.kill("n2")
    assert "n2 is back" in classroom.repair("n2")
    assert sorted(processes.daemons()) == NODES
