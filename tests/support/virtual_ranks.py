"""Run a program as several ranks, each of which starts its own virtual GPUs."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from commands import free_ports, run_script

HEAD = """
import json, sys, torch
from datetime import timedelta
import torch.distributed as dist
from multigpu.virtual import control

rank, port, ranks = int(sys.argv[1]), int(sys.argv[2]), RANKS


def join(backend="vgpu", **options):
    minute = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=minute)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=minute, **options
    )


results = {}


def record(call):
    \"\"\"Numbers and spans, in seconds, of a call's collectives, by the call's name.\"\"\"
    since = len(control.timeline().events)
    numbers = call()
    events = [e for e in control.timeline().events[since:] if e.kind == "collective"]
    numbers = numbers if isinstance(numbers, list) else [numbers]
    results[call.__name__] = {
        "numbers": [tensor.tolist() for tensor in numbers],
        "spans": [[e.name, e.end - e.start] for e in events],
    }
"""


def run_ranks(program: str, ranks: int, folder: Path, *arguments: object) -> list:
    """Each rank's result: what it prints last, as JSON.

    The program begins with HEAD: `rank`, `ranks`, `join()`, which starts their group, and
    `record`, which decorates a function and puts what it does into `results`.
    sys.argv has the rank, a free port for rank 0's store, and `arguments`.
    """
    head = HEAD.replace("RANKS", str(ranks))
    return results(start_ranks(head + program, ranks, folder, *arguments))


def start_ranks(program: str, ranks: int, folder: Path, *arguments: object) -> list:
    """The ranks' processes, ended; sys.argv has the rank, a free port, and `arguments`."""
    script = folder / "program.py"
    script.write_text(program)
    (port,) = free_ports(1)
    with ThreadPoolExecutor(ranks) as pool:
        return list(
            pool.map(lambda rank: run_script(script, rank, port, *arguments), range(ranks))
        )


def results(processes: list) -> list:
    """What each process has printed last, as JSON; all must have succeeded."""
    for process in processes:
        assert process.returncode == 0, process.stdout
    return [json.loads(process.stdout.splitlines()[-1]) for process in processes]
