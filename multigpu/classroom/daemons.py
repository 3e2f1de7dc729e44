"""Start and stop the daemons of the classroom cluster."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from multigpu.classroom import conf
from multigpu.classroom.commands import (
    cluster_environment,
    last_lines,
    slurm,
    slurm_version,
)
from multigpu.classroom.conf import conf_path, is_linked, node_names, state_dir
from multigpu.classroom.processes import daemons, job_processes
from multigpu.errors import UserError
from multigpu.launch.commands import find_program

# sinfo's states of a node whose slurmd answers
RUNNING = ("idle", "mixed", "allocated", "planned", "completing")
START_TIMEOUT = 60  # seconds in which a daemon has to answer; it needs less than one


def start(nodes: int, gpus_per_node: int) -> None:
    """Write the cluster's files and start its daemons, one after another.

    Raises UserError if a file cannot be written or a daemon does not start.
    """
    state = state_dir()
    slurm_conf = str(conf_path())
    try:
        conf.write(nodes, gpus_per_node, slurm_version())
    except OSError as error:
        raise UserError(f"Cannot write the cluster's files: {error}.") from None
    munge_files = [f"--{kind}-file={state}/munge.{kind}" for kind in ("key", "pid", "seed")]
    _launch(
        # --force, because munged refuses a socket in a home directory that other users
        # cannot enter.
        ["munged", "--foreground", "--force", f"--socket={state}/munge.socket", *munge_files],
        name="munged",
        ready=lambda: (state / "munge.socket").exists(),
    )
    _launch(
        ["slurmctld", "-D", "-f", slurm_conf],
        name="slurmctld",
        ready=lambda: slurm("scontrol", "ping").returncode == 0,
    )
    for node in node_names(nodes):
        start_node(node)
    if os.geteuid() == 0 and conf.SYSTEM_CONF.parent.is_dir() and not is_linked():
        # From now on a plain sbatch finds the cluster, in any shell of any user.
        conf.SYSTEM_CONF.symlink_to(slurm_conf)


def start_node(node: str) -> None:
    """Start a node's slurmd. Raises UserError if it does not start."""
    _launch(
        ["slurmd", "-D", "-f", str(conf_path()), "-N", node],
        name=f"slurmd {node}",
        ready=lambda: _node_state(node) in RUNNING,
    )


def kill_node(node: str) -> None:
    """End a node's slurmd and all processes of its jobs by SIGKILL."""
    daemon = daemons()[f"slurmd {node}"]
    _kill(lambda: [pid for pid in daemons().values() if pid == daemon], signal.SIGKILL)
    _kill(lambda: job_processes(node), signal.SIGKILL)


def _node_state(node: str) -> str:
    options = ("--noheader", f"--nodes={node}", "--partition=classroom", "--format=%T")
    return slurm("sinfo", *options).stdout.strip()


def _launch(command: list[str], name: str, ready: Callable[[], bool]) -> None:
    """Start one daemon and wait until `ready()`.

    Raises UserError with the last lines of its log if it does not start.
    """
    log = state_dir() / f"{name.replace(' ', '-')}.log"
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            [find_program(command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=cluster_environment(),
            umask=0o022,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT
    while not ready():
        problem = ""
        if daemon.poll() is not None:
            problem = f"ended with exit code {daemon.returncode}"
        elif time.monotonic() > deadline:
            problem = f"did not answer within {START_TIMEOUT} s"
        if problem:
            lines = last_lines(log.read_text(errors="replace"))
            raise UserError(f"{name} {problem}. The last lines of its log:\n{lines}")
        time.sleep(0.05)


def stop() -> None:
    """End every process of the cluster and remove every file.

    Jobs are ended first: srun and salloc can then report the end of their jobs.
    """
    # If munged does not run, scancel would wait for minutes.
    if {"munged", "slurmctld"} <= daemons().keys():
        slurm("scancel", "--partition=classroom")
        slurm("scancel", "--partition=urgent")
        _wait_until(lambda: not job_processes(), 3)
    _kill(job_processes, signal.SIGKILL)
    _kill(lambda: list(daemons().values()), signal.SIGTERM, signal.SIGKILL)
    _kill(job_processes, signal.SIGKILL)
    if os.geteuid() == 0 and is_linked():
        conf.SYSTEM_CONF.unlink()
    shutil.rmtree(state_dir(), ignore_errors=True)
    # OSError: the parent folder has another program's files, or does not exist.
    with suppress(OSError):
        state_dir().parent.rmdir()


def _kill(pids: Callable[[], list[int]], *signals: int) -> None:
    """Send the signals in turn, each to all of `pids()`, until none is left."""
    for number in signals:
        for pid in pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if _wait_until(lambda: not pids(), 2):
            return


def anything_left() -> bool:
    """Whether any file or process of the cluster exists."""
    linked_by_root = os.geteuid() == 0 and is_linked()
    return bool(state_dir().exists() or daemons() or job_processes() or linked_by_root)


def _wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Wait until `done()` is true, at most `seconds`; return whether it became true."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
