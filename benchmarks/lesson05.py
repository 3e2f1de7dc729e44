"""Measure the speed of lesson 05 on the CPU of this machine, as ratios of runs: `make bench`.

Images/s of two processes ÷ images/s of one, with one thread each and a large batch. Goal: 1.8
on 2 cores. The same for two processes that never communicate: the upper bound.

It writes benchmarks/lesson05.json. The runs alternate, so a change of the machine's speed
affects both equally.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from multigpu.files import write_json

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
REPEATS = int(sys.argv[1]) if len(sys.argv) > 1 else 7


def speedup(folder: Path) -> tuple[list[float], list[float]]:
    """Images/s of two processes ÷ one, by round: with DDP, and without communication."""
    random = np.random.default_rng(0)
    data_file = folder / "large.npz"
    ratios = folder / "ratios.json"
    np.savez(
        data_file,
        x_train=random.random((4096, 28, 28), np.float32),
        x_test=random.random((64, 28, 28), np.float32),
        y_train=random.integers(0, 10, 4096),
        y_test=random.integers(0, 10, 64),
    )
    command = [sys.executable, HERE / "throughput.py", data_file, str(4 * REPEATS), ratios]
    subprocess.run(command, env=ENVIRONMENT, check=True)
    return json.loads(ratios.read_text())


def summary(what: str, goal: str, ratios: list[float]) -> dict:
    """Print the median and the range of the ratios, and return them for the file."""
    row = {"quantity": what, "goal": goal, "median": round(statistics.median(ratios), 3)}
    row |= {"min": round(min(ratios), 3), "max": round(max(ratios), 3), "pairs": len(ratios)}
    spread = f"{row['min']:.2f} to {row['max']:.2f} in {len(ratios)} pairs"
    print(f"{what}: {row['median']:.2f} ({spread}; goal: {goal})")
    return row


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with_ddp, upper_bound = speedup(folder)
        rows = [
            summary("images/s, 2 processes ÷ 1, batch 4,096", "≥ 1.8 on 2 cores", with_ddp),
            summary(
                "images/s, 2 processes that never communicate ÷ 1",
                "none: the upper bound on this machine",
                upper_bound,
            ),
        ]
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__.split("+")[0],
        "device": "cpu",
    }
    path = write_json(HERE / "lesson05.json", {"machine": machine, "rows": rows})
    print(f"written: {path.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
