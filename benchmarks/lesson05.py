"""Measure the speed of lesson 05 on the CPU of this machine, as ratios of runs: `make bench`.

1. Images/s of two processes ÷ images/s of one, with one thread each and a large batch.
   Goal: 1.8 on 2 cores. The same for two processes that never communicate: the upper bound.
2. Time from the command to the first step ÷ that of torchrun with a loop written by hand.
   Goal: at most 1.10.

It writes benchmarks/lesson05.json. The runs alternate, so a change of the machine's speed
affects both equally.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from multigpu import data
from multigpu.files import write_json

HERE = Path(__file__).parent
SCRIPT = HERE.parent / "scripts" / "PT_CNN_MultiGPU.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
REPEATS = int(sys.argv[1]) if len(sys.argv) > 1 else 7


def run(*command: object, check: bool = True) -> str:
    text = [str(part) for part in command]
    done = subprocess.run(
        text, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if check and done.returncode:
        sys.exit(f"{' '.join(text)} failed:\n{done.stderr}")
    return done.stderr


def speedup(folder: Path) -> tuple[list[float], list[float]]:
    """Images/s of two processes ÷ one, by round: with DDP, and without communication."""
    random = np.random.default_rng(0)
    data_file = folder / "large.npz"
    ratios = folder / "ratios.json"
    np.savez(
        data_file,
        x_train=random.integers(0, 256, (4096, 28, 28), np.uint8),
        x_test=random.integers(0, 256, (64, 28, 28), np.uint8),
        y_train=random.integers(0, 10, 4096),
        y_test=random.integers(0, 10, 64),
    )
    run(sys.executable, HERE / "throughput.py", data_file, 4 * REPEATS, ratios)
    return json.loads(ratios.read_text())


def seconds_to_first_step(folder: Path, *script: object) -> float:
    note = folder / "first-step"
    note.unlink(missing_ok=True)
    began = time.time()
    # torchrun's exit code is ignored, because the loop by hand can abort at its end
    # (multigpu/launch/exit.py).
    local = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    errors = run("torchrun", *local, HERE / "first_step.py", note, *script, check=False)
    if not note.exists():
        sys.exit(f"{script[0]} made no step:\n{errors}")
    return float(note.read_text()) - began


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
        digits = data.fetch(None)
        with_ddp, upper_bound = speedup(folder)
        rows = [
            summary("images/s, 2 processes ÷ 1, batch 4,096", "≥ 1.8 on 2 cores", with_ddp),
            summary(
                "images/s, 2 processes that never communicate ÷ 1",
                "none: the upper bound on this machine",
                upper_bound,
            ),
        ]

        def first_steps() -> float:
            lesson = seconds_to_first_step(folder, SCRIPT, "--epochs", 1, "--out", folder)
            return lesson / seconds_to_first_step(folder, HERE / "bare.py", digits)

        # The first pair warms up.
        first_steps()
        ratios = [first_steps() for _ in range(REPEATS)]
        rows.append(
            summary("seconds to the first step, lesson 05 ÷ loop by hand", "≤ 1.10", ratios)
        )
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__.split("+")[0],
        "device": "cpu",
    }
    path = write_json(HERE / "lesson05.json", {"machine": machine, "rows": rows})
    print(f"written: {path.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
