"""Run a program as several ranks, each of which starts its own virtual GPUs."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from commands import free_ports, run_script


def run_ranks(program: str, ranks: int, folder: Path, *arguments: object) -> list:
    """Each rank's result: what it prints last, as JSON.

    The program's sys.argv has the rank, a free port for rank 0's store, and `arguments`.
    """
    script = folder / "program.py"
    script.write_text(program)
    (port,) = free_ports(1)
    with ThreadPoolExecutor(ranks) as pool:
        done = list(
            pool.map(lambda rank: run_script(script, rank, port, *arguments), range(ranks))
        )
    for process in done:
        assert process.returncode == 0, process.stdout
    return [json.loads(process.stdout.splitlines()[-1]) for process in done]
