"""How does one practise Slurm without a cluster? With a real Slurm on one machine.

`up` starts munged, slurmctld and one slurmd for each pretended node. The daemons are the distribution's own, so that
sbatch, srun, squeue, scancel, salloc, arrays and dependencies are the real ones. Only the hardware is pretended: the
CPUs, the memory and the GPUs are what slurm.conf says, and a "GPU" is a link to /dev/null that Slurm counts and hands
out. `down` removes everything again. Nothing that somebody else configured is touched.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from multigpu.classroom import conf
from multigpu.classroom.conf import conf_path, daemon_names, linked, node_names, state_dir
from multigpu.classroom.processes import daemons, foreign, job_processes
from multigpu.errors import UserError, pluralize

PACKAGES = {
    "munge": "munged",
    "slurm-wlm": "slurmd",
}  # Debian's package: a program that comes with it
MPI_PACKAGES = {"openmpi-bin": "mpirun"}
PATIENCE = 60  # seconds that a daemon has to answer; it needs less than one


def up(nodes: int = 2, gpus_per_node: int = 2) -> str:
    """Start the cluster, or leave it alone where it already runs in that shape; return what to do next.

    Raises UserError where Slurm is missing, where the machine has a Slurm that is not ours, where a cluster of another
    shape is up, and where a daemon does not start. After an error nothing is left behind.
    """
    if not 1 <= nodes <= 16 or not 0 <= gpus_per_node <= 16:
        raise UserError(
            f"The cluster can have 1 to 16 nodes with 0 to 16 GPUs each, not {nodes} with {gpus_per_node}."
        )
    if why_not := obstacle():
        raise UserError(why_not)
    with _lock():
        there = conf.shape()
        if there and set(daemon_names(there[0])) <= set(daemons()):
            if there != (nodes, gpus_per_node):
                raise UserError(
                    f"A cluster of {there[0]} nodes with {there[1]} GPUs each is up: run `multigpu slurm down` first."
                )
            return f"The cluster is already up.\n{_nodes()}\n{_how_to_use()}"
        _stop()  # what a crash has left: files without daemons, or some daemons without the others
        try:
            _start(nodes, gpus_per_node)
        except BaseException:
            _stop()
            raise
        return f"The cluster is up: {pluralize(nodes, 'node')} with {pluralize(gpus_per_node, 'pretended GPU')} each.\n{_nodes()}\n{_how_to_use()}"


def down() -> str:
    """Cancel all jobs, end the daemons and remove every file of the cluster; do nothing where none is up.

    The text names the jobs that were cancelled, and whose they were.

    Raises UserError in a job of the cluster, which would end itself.
    """
    if "SLURMD_NODENAME" in os.environ and os.environ.get("SLURM_CONF") == str(conf_path()):
        raise UserError(
            "This shell is a job of the cluster itself: leave it, then run `multigpu slurm down`."
        )
    if not _leftovers():
        return "The cluster is not up: nothing to do."
    with _lock():
        jobs = _queue()
        _stop()
    cancelled = (
        f" Cancelled: {', '.join(f'job {number} of {user}' for number, user in jobs)}."
        if jobs
        else ""
    )
    return f"The cluster is down, and its files are gone.{cancelled}"


def status() -> tuple[bool, str]:
    """Whether the whole cluster runs, and a text for people: nodes, jobs, or what is broken and what to do."""
    running, there = daemons(), conf.shape()
    if not running:
        return False, "The cluster is not up: `multigpu slurm up` starts it."
    dead = [name for name in daemon_names(there[0] if there else 0) if name not in running]
    if dead or not there:
        return (
            False,
            f"Not running: {', '.join(dead) or 'the nodes'}. `multigpu slurm up` starts the cluster afresh.",
        )
    return (
        True,
        f"The cluster is up, with {pluralize(len(_queue()), 'job')} in the queue.\n{_nodes()}\n{_how_to_use()}",
    )


def obstacle() -> str | None:
    """Why no cluster can be started here, in a sentence; None where nothing speaks against it.

    Slurm is missing, the machine has a Slurm that is not ours (which must be neither touched nor hidden), or Slurm
    cannot use the name of our directory.
    """
    missing = [package for package, program in PACKAGES.items() if not _which(program)]
    if missing:
        return f"Slurm is not installed here ({' and '.join(missing)} missing): run `multigpu slurm install` as root."
    system, chosen, state = (
        conf.SYSTEM_CONF,
        os.environ.get("SLURM_CONF", ""),
        str(state_dir()),
    )
    if (system.exists() or system.is_symlink()) and not linked():
        return f"{system} is not of our making: this machine has a Slurm already, which we leave alone."
    if chosen and Path(chosen) not in (conf_path(), conf.ROOT_STATE / "slurm.conf", system):
        return f"SLURM_CONF is {chosen}, which is not of our making: use that Slurm, or `unset SLURM_CONF`."
    if stranger := foreign():
        return f"{stranger[1]} runs here (pid {stranger[0]}) and is not ours: use that Slurm, or stop it."
    if len(state) > 80 or any(
        letter in state for letter in " \t#,=[]%"
    ):  # a Unix socket's path ends at 107 bytes
        return f"Slurm cannot work in {state} (too long, or a special letter): set XDG_STATE_HOME to another folder."
    return None


def env() -> str:
    """The shell line that makes sbatch and the rest find the cluster; empty where they find it anyway.

    Raises UserError where no cluster is up.
    """
    if not conf_path().exists():
        raise UserError("The cluster is not up: run `multigpu slurm up` first.")
    return "" if os.geteuid() == 0 and linked() else f"export SLURM_CONF={conf_path()}"


def install(with_mpi: bool = False) -> str:
    """Install Slurm (and Open MPI) with apt-get; do nothing where it is already there.

    Raises UserError with the command to run where we are not root or there is no apt-get, and with apt-get's last
    lines where it fails.
    """
    wanted = PACKAGES | (MPI_PACKAGES if with_mpi else {})
    missing = [package for package, program in wanted.items() if not _which(program)]
    if not missing:
        return f"Already installed: {', '.join(wanted)}."
    if not _which("apt-get"):
        raise UserError(
            f"This is not Debian or Ubuntu: install {' and '.join(missing)} with the system's own means."
        )
    command = f"apt-get install --yes --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0:
        raise UserError(f"Only root can install packages: run `sudo {command}`.")
    for line in ("apt-get update", command):
        done = _run(line.split(), os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
        if done.returncode:
            raise UserError(
                f"`{line}` failed. Its last lines:\n{_tail(done.stdout + done.stderr)}"
            )
    return f"Installed: {', '.join(missing)}."


# ---- start and stop ---------------------------------------------------------------------------------------------


def _start(nodes: int, gpus_per_node: int) -> None:
    state, conf = state_dir(), str(conf_path())
    try:
        conf.write(nodes, gpus_per_node, _version())
    except OSError as error:
        raise UserError(f"Cannot write the cluster's files: {error}.") from None
    own_files = [f"--{kind}-file={state}/munge.{kind}" for kind in ("key", "pid", "seed")]
    # --force, because munged refuses a socket in a home directory that others cannot enter.
    munged = [
        "munged",
        "--foreground",
        "--force",
        f"--socket={state}/munge.socket",
        *own_files,
    ]
    _launch(munged, ready=lambda: (state / "munge.socket").exists())
    _launch(
        ["slurmctld", "-D", "-f", conf],
        ready=lambda: _slurm("scontrol", "ping").returncode == 0,
    )
    for node in node_names(nodes):
        ask = ["sinfo", "--noheader", f"--nodes={node}", "--format=%T"]
        _launch(
            ["slurmd", "-D", "-f", conf, "-N", node],
            ready=lambda ask=ask: _slurm(*ask).stdout.strip() == "idle",
        )
    if os.geteuid() == 0 and conf.SYSTEM_CONF.parent.is_dir() and not linked():
        conf.SYSTEM_CONF.symlink_to(
            conf
        )  # now a plain sbatch finds the cluster, in any shell of any user


def _launch(command: list[str], ready: Callable[[], bool]) -> None:
    """Start one daemon and wait until it answers; raise UserError with its last lines where it does not."""
    name = " ".join([command[0], *command[5:]]) if command[0] == "slurmd" else command[0]
    log = state_dir() / f"{name.replace(' ', '-')}.log"
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            [_which(command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=_environment(),
            umask=0o022,
            start_new_session=True,
        )
    deadline = time.monotonic() + PATIENCE
    while not ready():
        ended = daemon.poll() is not None
        if ended or time.monotonic() > deadline:
            what = (
                f"ended with exit code {daemon.returncode}"
                if ended
                else f"did not answer within {PATIENCE} s"
            )
            lines = _tail(log.read_text(errors="replace"))
            raise UserError(
                f"{name} {what}, so the cluster is not up. The last lines of its log:\n{lines}"
            )
        time.sleep(0.05)


def _stop() -> None:
    """End every process of the cluster and remove every file. Jobs first, so that srun and salloc hear of it."""
    if {
        "munged",
        "slurmctld",
    } <= daemons().keys():  # without munged scancel would wait for minutes
        _slurm("scancel", "--partition=classroom")
        _wait(lambda: not job_processes(), 3)
    gently, at_once = (signal.SIGTERM, signal.SIGKILL), (signal.SIGKILL,)
    for ours, ways in (
        (job_processes, at_once),
        (lambda: list(daemons().values()), gently),
        (job_processes, at_once),
    ):
        for way in ways:
            for pid in ours():
                with suppress(ProcessLookupError):
                    os.kill(pid, way)
            if _wait(lambda ours=ours: not ours(), 2):
                break
    if os.geteuid() == 0 and linked():
        conf.SYSTEM_CONF.unlink()
    shutil.rmtree(state_dir(), ignore_errors=True)
    with suppress(OSError):  # somebody else's files are in it, or it is gone
        state_dir().parent.rmdir()


def _leftovers() -> bool:
    return bool(
        state_dir().exists()
        or daemons()
        or job_processes()
        or (os.geteuid() == 0 and linked())
    )


@contextmanager
def _lock() -> Iterator[None]:
    """One `up` or `down` at a time. The lock is on a directory that stays, so that no lock file is left behind."""
    place = state_dir().parents[1]
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle = os.open(place, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"Cannot use {place}: {error.strerror}. XDG_STATE_HOME can name another place."
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# ---- small helpers ----------------------------------------------------------------------------------------------


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _which(program: str) -> str | None:
    """The program's path. An ordinary user's PATH often lacks the directories where Debian puts daemons."""
    return shutil.which(
        program,
        path=os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/local/sbin:/usr/sbin:/sbin",
    )


def _version() -> tuple[int, int]:
    """Slurm's version: `slurm-wlm 22.05.8` is (22, 5)."""
    major, minor = _run([_which("slurmd"), "-V"]).stdout.split()[-1].split(".")[:2]
    return int(major), int(minor)


def _environment() -> dict[str, str]:
    """Our environment with our slurm.conf, and without what an outer job has set."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "SBATCH", "SALLOC"))
    }
    return kept | {"SLURM_CONF": str(conf_path())}


def _run(
    command: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment
    )


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Ask our cluster. A daemon that does not answer (stopped, say) counts as a failure after 10 s."""
    return _run(["timeout", "--kill-after=1", "10", *command], _environment())


def _queue() -> list[list[str]]:
    """Number and user of each job that waits or runs. Empty where the cluster does not answer."""
    if not {"munged", "slurmctld"} <= daemons().keys():
        return []
    return [
        line.split()
        for line in _slurm("squeue", "--noheader", "--format=%i %u").stdout.splitlines()
    ]


def _nodes() -> str:
    return _slurm("sinfo", "--Node", "--format=%.8N %.10T %.5c %.8G").stdout.rstrip()


def _how_to_use() -> str:
    first = 'In each shell, first: eval "$(multigpu slurm env)"\n' if env() else ""
    return f"{first}Now sbatch, squeue, scancel, srun and salloc work. `sacct -c` lists ended jobs; plain `sacct` cannot."


def _tail(text: str, lines: int = 12) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
