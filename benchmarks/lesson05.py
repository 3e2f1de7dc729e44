"""Measures what lesson 05 promises about speed: `make bench`. Ratios of runs side by side, on the CPU of this machine.

1. Images/s with 2 processes beside 1, one thread each, on a batch that is large enough to compute on. Goal: 1.8 on 2 cores.
2. Time from the command to the first step, beside torchrun with a loop written by hand. Goal: at most 1.10.

Writes benchmarks/lesson05.json. The runs take turns, so that a machine whose speed drifts slows both alike.
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


def run(*command: object, check: bool = True) -> None:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": None if check else subprocess.DEVNULL}
    subprocess.run([str(part) for part in command], env=ENVIRONMENT, check=check, **quiet)


def images_per_second(processes: int, source: Path, folder: Path) -> float:
    """The best of six epochs: on a machine that others share, what slows an epoch down is seldom our own doing.

    The global batch is 1024 for both, in pieces of 256: one process would be slower on larger ones, for its caches' sake.
    """
    flags = ("--data", source, "--epochs", 6, "--batch-size", 1024, "--accumulate", 4 // processes, "--out", folder)
    run(sys.executable, SCRIPT, "--spawn", processes, *flags)
    epochs = json.loads((folder / "metrics.json").read_text())["epochs"]
    return max(epoch["images_per_s"] for epoch in epochs)


def seconds_to_first_step(folder: Path, *script: object) -> float:
    note = folder / "first-step"
    note.unlink(missing_ok=True)
    began = time.time()
    # How it ends does not matter here: the loop by hand can abort at its end, which is torch's (see multigpu/launch.py).
    local = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    run("torchrun", *local, HERE / "first_step.py", note, *script, check=False)
    return float(note.read_text()) - began


def beside(name: str, goal: str, one, other) -> dict:
    """Run the two in turn, after a warm-up each; the median of the ratios, pair by pair, and their range."""
    one(), other()
    pairs = [(one(), other()) for _ in range(REPEATS)]
    ratios = sorted(a / b for a, b in pairs)
    found = {"what": name, "goal": goal, "median": round(statistics.median(ratios), 3)}
    found |= {"min": round(ratios[0], 3), "max": round(ratios[-1], 3), "pairs": REPEATS}
    print(
        f"{name}: {found['median']:.2f} (from {found['min']:.2f} to {found['max']:.2f} in {REPEATS} pairs; goal: {goal})"
    )
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random = np.random.default_rng(0)
        arrays = {
            f"x_{part}": random.integers(0, 256, (n, 28, 28), np.uint8) for part, n in (("train", 8192), ("test", 64))
        }
        arrays |= {f"y_{part}": random.integers(0, 10, n) for part, n in (("train", 8192), ("test", 64))}
        np.savez(folder / "large.npz", **arrays)
        digits = data.fetch(None)
        rows = [
            beside(
                "images/s, 2 processes ÷ 1",
                "≥ 1.8 on 2 cores",
                lambda: images_per_second(2, folder / "large.npz", folder),
                lambda: images_per_second(1, folder / "large.npz", folder),
            ),
            beside(
                "seconds to the first step, lesson 05 ÷ loop by hand",
                "≤ 1.10",
                lambda: seconds_to_first_step(folder, SCRIPT, "--epochs", 1, "--out", folder),
                lambda: seconds_to_first_step(folder, HERE / "bare.py", digits),
            ),
        ]
    machine = {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__.split("+")[0], "device": "cpu"}
    print(f"written: {write_json(HERE / 'lesson05.json', {'machine': machine, 'rows': rows}).relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
