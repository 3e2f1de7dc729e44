"""Run programs for the classroom cluster: the cluster's own Slurm commands, and others."""

import os
import subprocess

from multigpu.classroom.conf import conf_path
from multigpu.classroom.processes import daemons
from multigpu.launch.commands import find_program


def run(
    command: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and capture what it prints."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment
    )


def slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands on the cluster.

    A daemon that does not answer (a stopped one, for example) counts as a failure after 10 s.
    """
    return run(["timeout", "--kill-after=1", "10", *command], cluster_environment())


def cluster_environment() -> dict[str, str]:
    """This environment with the cluster's slurm.conf, without the variables of a Slurm job."""
    outer = ("SLURM", "SBATCH", "SALLOC")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    return kept | {"SLURM_CONF": str(conf_path())}


def slurm_version() -> tuple[int, int]:
    """Slurm's version: `slurm-wlm 22.05.8` is (22, 5)."""
    major, minor = run([find_program("slurmd"), "-V"]).stdout.split()[-1].split(".")[:2]
    return int(major), int(minor)


def queue() -> list[list[str]]:
    """Number and user of each job that waits or runs; empty if the cluster does not answer."""
    if not {"munged", "slurmctld"} <= daemons().keys():
        return []
    lines = slurm("squeue", "--noheader", "--format=%i %u").stdout.splitlines()
    return [line.split() for line in lines]


def nodes_table() -> str:
    """The table of nodes: name, state, CPUs, GPUs."""
    columns = "--format=%.8N %.10T %.5c %.8G"
    return slurm("sinfo", "--Node", "--partition=classroom", columns).stdout.rstrip()


def last_lines(text: str, lines: int = 12) -> str:
    """The last lines of a log, indented."""
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
