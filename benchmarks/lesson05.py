"""Measures what lesson 05 promises about speed: `make bench`. Ratios of runs side by side, on the CPU of this machine.

1. Images/s with 2 processes beside 1, one thread each, on a batch that is large enough to compute on. Goal: 1.8 on 2 cores.
   Beside it, what two processes reach that do not talk to each other: the machine's own limit.
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


def run(*command: object, check: bool = True) -> str:
    text = [str(part) for part in command]
    done = subprocess.run(
        text, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if check and done.returncode:
        sys.exit(f"{' '.join(text)} failed:\n{done.stderr}")
    return done.stderr


def speedup(folder: Path) -> tuple[list[float], list[float]]:
    """Images/s with two processes over images/s with one, round by round: by DDP, and each process by itself."""
    random = np.random.default_rng(0)
    arrays = {
        f"x_{part}": random.integers(0, 256, (n, 28, 28), np.uint8)
        for part, n in (("train", 4096), ("test", 64))
    }
    arrays |= {
        f"y_{part}": random.integers(0, 10, n) for part, n in (("train", 4096), ("test", 64))
    }
    np.savez(folder / "large.npz", **arrays)
    run(
        sys.executable,
        HERE / "throughput.py",
        folder / "large.npz",
        4 * REPEATS,
        folder / "ratios.json",
    )
    return json.loads((folder / "ratios.json").read_text())


def seconds_to_first_step(folder: Path, *script: object) -> float:
    note = folder / "first-step"
    note.unlink(missing_ok=True)
    began = time.time()
    # How it ends does not matter here: the loop by hand can abort at its end, which is torch's (see multigpu/launch/exit.py).
    local = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    said = run("torchrun", *local, HERE / "first_step.py", note, *script, check=False)
    if not note.exists():
        sys.exit(f"{script[0]} made no step:\n{said}")
    return float(note.read_text()) - began


def told(what: str, goal: str, ratios: list[float]) -> dict:
    """Print the median of the ratios and their range, and give them back for the file."""
    found = {"what": what, "goal": goal, "median": round(statistics.median(ratios), 3)}
    found |= {"min": round(min(ratios), 3), "max": round(max(ratios), 3), "pairs": len(ratios)}
    print(
        f"{what}: {found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f} in {len(ratios)} pairs; goal: {goal})"
    )
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, digits = Path(name), data.fetch(None)
        by_ddp, at_most = speedup(folder)
        rows = [
            told("images/s, 2 processes ÷ 1, batch 4,096", "≥ 1.8 on 2 cores", by_ddp),
            told(
                "images/s, 2 processes that do not talk ÷ 1",
                "none: the machine's own limit",
                at_most,
            ),
        ]

        def first_steps() -> float:
            ours = seconds_to_first_step(folder, SCRIPT, "--epochs", 1, "--out", folder)
            return ours / seconds_to_first_step(folder, HERE / "bare.py", digits)

        first_steps()  # for warming up
        ratios = [first_steps() for _ in range(REPEATS)]
        rows.append(
            told("seconds to the first step, lesson 05 ÷ loop by hand", "≤ 1.10", ratios)
        )
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__.split("+")[0],
        "device": "cpu",
    }
    print(
        f"written: {write_json(HERE / 'lesson05.json', {'machine': machine, 'rows': rows}).relative_to(HERE.parent)}"
    )


if __name__ == "__main__":
    main()
