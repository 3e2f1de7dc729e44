"""A real Slurm cluster on one machine, to practise on.

`up` starts munged, slurmctld and one slurmd for each simulated node. The daemons are the
distribution's own, so sbatch, srun, squeue, scancel, salloc, arrays and dependencies are the
real ones. Only the hardware is simulated: CPUs, memory and GPUs are what slurm.conf says, and
a "GPU" is a link to /dev/null that Slurm counts and allocates. `down` removes everything
again. A Slurm that somebody else configured is left alone.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multigpu.classroom import conf
from multigpu.classroom.commands import nodes_table, queue
from multigpu.classroom.conf import conf_path, daemon_names, is_linked, state_dir
from multigpu.classroom.daemons import (
    anything_left,
    kill_node,
    start,
    start_node,
    stop,
)
from multigpu.classroom.packages import PACKAGES, install, missing_packages
from multigpu.classroom.processes import daemons, foreign_daemon
from multigpu.errors import UserError, pluralize

__all__ = ["down", "env", "install", "kill", "repair", "status", "unavailable_reason", "up"]


def up(nodes: int = 2, gpus_per_node: int = 2) -> str:
    """Start the cluster, or leave it alone if it runs with that shape; return what to do next.

    Raises UserError if Slurm is missing, if the machine has another Slurm, if a cluster of
    another shape is up, or if a daemon does not start (then all others are ended).
    """
    if not 1 <= nodes <= 16 or not 0 <= gpus_per_node <= 16:
        raise UserError(
            f"The cluster can have 1 to 16 nodes with 0 to 16 GPUs each, "
            f"not {nodes} with {gpus_per_node}."
        )
    if reason := unavailable_reason():
        raise UserError(reason)
    with _lock():
        shape = conf.cluster_shape()
        if shape and set(daemon_names(shape[0])) <= set(daemons()):
            if shape != (nodes, gpus_per_node):
                raise UserError(
                    f"A cluster of {shape[0]} nodes with {shape[1]} GPUs each is up: "
                    f"run `multigpu slurm down` first."
                )
            return f"The cluster is already up.\n{nodes_table()}\n{_how_to_use()}"
        # Remove what a crash left: files without daemons, or some daemons without the others.
        stop()
        try:
            start(nodes, gpus_per_node)
        except BaseException:
            stop()
            raise
        size = (
            f"{pluralize(nodes, 'node')} with {pluralize(gpus_per_node, 'simulated GPU')} each"
        )
        return f"The cluster is up: {size}.\n{nodes_table()}\n{_how_to_use()}"


def down() -> str:
    """Cancel all jobs, end the daemons and remove the cluster's files, if it is up.

    Returns a text that names the cancelled jobs and their users. Raises UserError if a job of
    the cluster calls it: the job would end itself.
    """
    if "SLURMD_NODENAME" in os.environ and os.environ.get("SLURM_CONF") == str(conf_path()):
        raise UserError(
            "This shell is a job of the cluster itself: leave it, then run `multigpu slurm "
            "down`."
        )
    if not anything_left():
        return "The cluster is not up: nothing to do."
    with _lock():
        jobs = queue()
        stop()
    text = "The cluster is down, and its files are gone."
    if jobs:
        text += f" Cancelled: {', '.join(f'job {number} of {user}' for number, user in jobs)}."
    return text


def status() -> tuple[bool, str]:
    """Whether the whole cluster runs, and a text: nodes and jobs, or what to do."""
    running = daemons()
    shape = conf.cluster_shape()
    if not running:
        return False, "The cluster is not up: `multigpu slurm up` starts it."
    expected = daemon_names(shape[0]) if shape else daemon_names(0)
    missing = [name for name in expected if name not in running]
    if missing or not shape:
        names = ", ".join(missing) or "the nodes"
        return False, f"Not running: {names}. `multigpu slurm up` starts the cluster again."
    jobs = pluralize(len(queue()), "job")
    text = f"The cluster is up, with {jobs} in the queue.\n{nodes_table()}\n{_how_to_use()}"
    return True, text


def kill(node: str) -> str:
    """End a node as a power cut does: its slurmd and all processes of its jobs, at once.

    Slurm notices it after SlurmdTimeout. Returns what will happen. Raises UserError if the
    cluster has no such node, or if it does not run.
    """
    with _lock():
        if f"slurmd {node}" not in _running_nodes(node):
            raise UserError(f"{node} does not run: `multigpu slurm repair {node}` starts it.")
        kill_node(node)
    return (
        f"{node} is dead, and all processes of its jobs. Slurm notices it within a minute "
        f"(SlurmdTimeout) and requeues these jobs: watch `sinfo` and `squeue`. "
        f"`multigpu slurm repair {node}` starts the node again."
    )


def repair(node: str) -> str:
    """Start a node again that `kill` has ended; return the table of nodes.

    Raises UserError if the cluster has no such node, or if its slurmd does not start.
    """
    with _lock():
        if f"slurmd {node}" in _running_nodes(node):
            return f"{node} runs: nothing to do."
        start_node(node)
    return f"{node} is back.\n{nodes_table()}"


def _running_nodes(node: str) -> set[str]:
    """The cluster's daemons. Raises UserError if it is not up, or has no node of this name."""
    running = set(daemons())
    shape = conf.cluster_shape()
    if not shape or not {"munged", "slurmctld"} <= running:
        raise UserError("The cluster is not up: run `multigpu slurm up` first.")
    names = conf.node_names(shape[0])
    if node not in names:
        raise UserError(f"The cluster has no node {node!r}: its nodes are {', '.join(names)}.")
    return running


def unavailable_reason() -> str | None:
    """Why no cluster can be started on this machine, as a sentence; None if one can.

    The reasons are: Slurm is missing, the machine has another Slurm (which must not be changed
    or hidden), or Slurm cannot use the name of the cluster's directory.
    """
    missing = missing_packages(PACKAGES)
    if missing:
        names = " and ".join(missing)
        return (
            f"Slurm is not installed here ({names} missing): run `multigpu slurm install` as "
            f"root."
        )
    system = conf.SYSTEM_CONF
    if (system.exists() or system.is_symlink()) and not is_linked():
        return (
            f"{system} was not written by `multigpu slurm up`: this machine has a Slurm "
            f"already, which is left alone."
        )
    chosen = os.environ.get("SLURM_CONF", "")
    known = (conf_path(), conf.ROOT_STATE / "slurm.conf", system)
    if chosen and Path(chosen) not in known:
        return (
            f"SLURM_CONF is {chosen}, which `multigpu slurm up` did not write: use that "
            f"Slurm, or `unset SLURM_CONF`."
        )
    if foreign := foreign_daemon():
        pid, program = foreign
        return (
            f"{program} runs here (pid {pid}), and it is not the classroom cluster's: "
            f"use that Slurm, or stop it."
        )
    state = str(state_dir())
    # The path of a Unix socket has at most 107 bytes.
    if len(state) > 80 or any(letter in state for letter in " \t#,=[]%"):
        return (
            f"Slurm cannot work in {state} (too long, or a special character): "
            f"set XDG_STATE_HOME to another folder."
        )
    return None


def env() -> str:
    """The shell line with which sbatch finds the cluster; empty if none is needed.

    Raises UserError if no cluster is up.
    """
    if not conf_path().exists():
        raise UserError("The cluster is not up: run `multigpu slurm up` first.")
    if os.geteuid() == 0 and is_linked():
        return ""
    return f"export SLURM_CONF={conf_path()}"


@contextmanager
def _lock() -> Iterator[None]:
    """Let only one `up` or `down` run at a time.

    The lock is on a directory that `down` does not remove, so no lock file is left.
    """
    folder = state_dir().parents[1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"Cannot use {folder} ({error.strerror}): set XDG_STATE_HOME to another folder."
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _how_to_use() -> str:
    """What to type next. An ordinary user's shell needs SLURM_CONF to find the cluster."""
    text = "Now sbatch, squeue, scancel, srun and salloc work."
    if env():
        text = (
            f"In each shell, first: {env()}\n"
            f"Then sbatch, squeue, scancel, srun and salloc work. In a shell without it they "
            f"print `Could not establish a configuration source`."
        )
    return (
        f"{text}\n`sacct -c` lists ended jobs; plain `sacct` cannot. After an array, `Unknown "
        f"type ArrayJobId` is harmless: `sacct -c 2>/dev/null` hides it."
    )
