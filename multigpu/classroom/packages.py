"""Install the packages of the classroom cluster with apt-get."""

import os

from multigpu.classroom.commands import last_lines, run
from multigpu.errors import UserError
from multigpu.launch.commands import find_program
from multigpu.launch.terminal import announce

# Debian's package → a program in it
PACKAGES = {"munge": "munged", "slurm-wlm": "slurmd"}
MPI_PACKAGES = {"openmpi-bin": "mpirun"}
SANDBOX_PACKAGES = {"bubblewrap": "bwrap"}


def missing_packages(packages: dict[str, str]) -> list[str]:
    """The packages that are not installed."""
    return [package for package, program in packages.items() if not find_program(program)]


def install(with_mpi: bool = False, with_bubblewrap: bool = False) -> str:
    """Install Slurm, Open MPI and bubblewrap with apt-get; do nothing if they are installed.

    Raises UserError if there is no apt-get, if this user is not root (with the command for
    root), or if apt-get fails (with its last lines).
    """
    wanted = dict(PACKAGES)
    if with_mpi:
        wanted |= MPI_PACKAGES
    if with_bubblewrap:
        wanted |= SANDBOX_PACKAGES
    missing = missing_packages(wanted)
    if not missing:
        return f"Already installed: {', '.join(wanted)}."
    if not find_program("apt-get"):
        raise UserError(
            f"This is not Debian or Ubuntu: install {' and '.join(missing)} with this "
            f"system's own package manager."
        )
    command = f"apt-get install --yes --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0:
        raise UserError(f"Only root can install packages: run `sudo {command}`.")
    announce(f"running apt-get update, then {command}: about a minute")
    for line in ("apt-get update", command):
        done = run(line.split(), os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
        if done.returncode:
            output = last_lines(done.stdout + done.stderr)
            raise UserError(f"`{line}` failed. Its last lines:\n{output}")
    return f"Installed: {', '.join(missing)}."
