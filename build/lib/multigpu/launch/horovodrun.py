"""`multigpu horovodrun`: start the ranks of a command, with Horovod's variables."""

import os
import shutil

from multigpu.errors import UserError, pluralize
from multigpu.launch.processes import Processes
from multigpu.launch.room import check_room

USAGE = "multigpu horovodrun -np 4 python train.py"
PROCESSES_FLAGS = ("-np", "--num-proc", "-n")
HOSTS_FLAGS = ("-H", "--hosts")
THIS_MACHINE = ("localhost", "127.0.0.1", os.uname().nodename)


def run(arguments: list[str]) -> int:
    """`-np N [-H localhost:N] command …`: run N ranks of the command on this machine.

    Returns the exit code of the first rank that fails, or 0 if none fails. Raises UserError
    for other arguments, for other machines, and if there is no memory for the ranks.
    """
    size, command = _parse(arguments)
    check_room(size)
    environments = {}
    for rank in range(size):
        place = {
            "HOROVOD_RANK": rank,
            "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": rank,
            "HOROVOD_LOCAL_SIZE": size,
            "HOROVOD_CROSS_RANK": 0,
            "HOROVOD_CROSS_SIZE": 1,
        }
        environments[rank] = os.environ | {name: str(value) for name, value in place.items()}
    return Processes(command, environments).run()


def _parse(arguments: list[str]) -> tuple[int, list[str]]:
    """The number of processes and the command."""
    command = list(arguments)
    processes = ""
    hosts = ""
    while command and command[0].startswith("-"):
        flag = command.pop(0)
        name, _, value = flag.partition("=")
        if name not in PROCESSES_FLAGS + HOSTS_FLAGS or not (value or command):
            raise UserError(
                f"horovodrun has no flag {flag!r}, or it lacks its value: write {USAGE}."
            )
        value = value or command.pop(0)
        if name in HOSTS_FLAGS:
            hosts = value
        else:
            processes = value
    if not processes.isdecimal() or int(processes) < 1:
        raise UserError(
            f"horovodrun needs a number of processes, got {processes or 'none'!r}: write "
            f"{USAGE}."
        )
    if not command:
        raise UserError(f"horovodrun needs a command to start: write {USAGE}.")
    _check_hosts(hosts, int(processes))
    if shutil.which(command[0]) is None:
        raise UserError(f"there is no command {command[0]!r}: write {USAGE}.")
    return int(processes), command


def _check_hosts(hosts: str, processes: int) -> None:
    """Raise UserError for another machine, or for fewer slots than processes."""
    for host in filter(None, hosts.split(",")):
        name, _, slots = host.partition(":")
        if name not in THIS_MACHINE:
            raise UserError(
                f"this horovodrun starts ranks on this machine only, but {name} is another "
                f"machine: use srun, or `mpirun -np {processes} -H {hosts} -x MASTER_ADDR -x "
                f"MASTER_PORT …`."
            )
        if slots and int(slots) < processes:
            raise UserError(
                f"-np {processes} is more than the {pluralize(int(slots), 'slot')} of {host}: "
                f"ask for fewer ranks."
            )
