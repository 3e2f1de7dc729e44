"""What does horovodrun do? It starts the ranks, tells each its place by HOROVOD_* variables, and watches over them."""

import os
import shutil

from multigpu.errors import UserError, pluralize
from multigpu.launch.processes import Ranks

USAGE = "multigpu horovodrun -np 4 python train.py"
HERE = ("localhost", "127.0.0.1", os.uname().nodename)


def run(arguments: list[str]) -> int:
    """`-np N [-H localhost:N] command …`: start N ranks of the command on this machine; the exit code of the first that fails.

    Raises UserError for arguments that do not say it, and for other machines.
    """
    processes, command = _parse(arguments)
    common = {
        "HOROVOD_SIZE": processes,
        "HOROVOD_LOCAL_SIZE": processes,
        "HOROVOD_CROSS_RANK": 0,
        "HOROVOD_CROSS_SIZE": 1,
    }
    environments = {
        rank: os.environ
        | {
            k: str(v)
            for k, v in {**common, "HOROVOD_RANK": rank, "HOROVOD_LOCAL_RANK": rank}.items()
        }
        for rank in range(processes)
    }
    return Ranks(command, environments).run()


def _parse(arguments: list[str]) -> tuple[int, list[str]]:
    rest, told = list(arguments), {}
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        name, _, value = flag.partition("=")
        if name not in ("-np", "--num-proc", "-n", "-H", "--hosts") or not (value or rest):
            raise UserError(f"horovodrun does not know {flag!r} here: write {USAGE}.")
        told["hosts" if name in ("-H", "--hosts") else "np"] = value or rest.pop(0)
    count = told.get("np", "")
    if not count.isdecimal() or int(count) < 1:
        raise UserError(
            f"horovodrun wants a number of processes, and was given {count or 'none'!r}: write {USAGE}."
        )
    if not rest:
        raise UserError(f"horovodrun wants a command to start: write {USAGE}.")
    for host in filter(None, told.get("hosts", "").split(",")):
        name, _, slots = host.partition(":")
        if name not in HERE:
            raise UserError(
                f"this horovodrun starts ranks on this machine, and {name} is another: use srun, or "
                f"`mpirun -np {count} -H {told['hosts']} -x MASTER_ADDR -x MASTER_PORT …`."
            )
        if slots and int(slots) < int(count):
            raise UserError(
                f"-np {count}, and {host} has {pluralize(int(slots), 'slot')}: ask for fewer ranks."
            )
    if shutil.which(rest[0]) is None:
        raise UserError(f"there is no command {rest[0]!r}: write {USAGE}.")
    return int(count), rest
