"""Measures the Trainer beside the real Lightning, in turns: `python benchmarks/trainer.py`. CPU timings, one thread.

1. What a step costs above a plain loop, on a tiny model, with all bells off. Goal: at most 20 µs (Lightning: about 210).
2. The same with progress bar, TensorBoard and checkpoints on. Goal: at most a third of Lightning's.
3. Importing it, beside importing torch. Goal: at most 0.15 s more.
4. Two ranks, ten steps, from the command to the exit, beside torchrun with a loop written by hand. Goal: at most 1.10.

Writes benchmarks/trainer.json.
"""

import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from multigpu import data
from multigpu.files import write_json

HERE = Path(__file__).parent
STEPS, ROUNDS = 2000, int(sys.argv[1]) if len(sys.argv) > 1 else 7
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
}


def on_a_terminal(*command: object) -> None:
    """Run a command whose output goes to a terminal, so that progress bars are drawn."""
    os.environ.update(ENVIRONMENT)
    if status := pty.spawn(
        [str(part) for part in command], lambda fd: os.read(fd, 65536) and b" "
    ):
        sys.exit(f"{command} ended with {status}")


def steps(folder: Path) -> dict[str, list[float]]:
    """µs a step, round by round, of each way: tiny.py takes them in turns within one process."""
    out = folder / "steps.json"
    on_a_terminal(sys.executable, HERE / "tiny.py", "steps", STEPS, ROUNDS, folder, out)
    return json.loads(out.read_text())


def seconds(*command: object) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        [str(part) for part in command], env=ENVIRONMENT, capture_output=True, text=True
    )
    if (
        done.returncode and "terminate called" not in done.stderr
    ):  # the loop by hand can abort at its end: torch's
        sys.exit(f"{command} failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - began


def importing(statement: str) -> float:
    code = f"import time; a = time.perf_counter(); {statement}; print(time.perf_counter() - a)"
    return float(
        subprocess.run(
            [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True
        ).stdout
    )


def told(what: str, goal: str, values: list[float]) -> dict:
    row = {"what": what, "goal": goal, "median": round(statistics.median(values), 3)}
    row |= {"min": round(min(values), 3), "max": round(max(values), 3), "rounds": len(values)}
    print(
        f"{what}: {row['median']:g} ({row['min']:g} to {row['max']:g} in {len(values)} rounds; goal: {goal})",
        flush=True,
    )
    return row


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        found = steps(Path(name))
        plain = found["plain"]
        above = {
            way: [a - b for a, b in zip(found[way], plain, strict=True)]
            for way in found
            if way != "plain"
        }
        bare, full = above["ours"], above["ours, all on"]
        rows = [
            told("µs a step above the plain loop, all off", "≤ 20", bare),
            told("Lightning's, all off", "none", above["lightning"]),
            told("our part of Lightning's, all off", "≤ 0.10", [a / b for a, b in zip(bare, above["lightning"], strict=True)]),
            told(
                "our part of Lightning's, progress bar, TensorBoard and checkpoints on", "≤ 0.33",
                [a / b for a, b in zip(full, above["lightning, all on"], strict=True)],
            ),
        ]  # fmt: skip
        modules = ("torch", "multigpu.trainer", "lightning")
        times = {
            module: [importing(f"import {module}") for _ in range(ROUNDS)]
            for module in modules
        }
        for module in modules[1:]:
            goal = "≤ 0.15" if module == "multigpu.trainer" else "none"
            more = [a - b for a, b in zip(times[module], times["torch"], strict=True)]
            rows.append(told(f"seconds to import {module}, above torch's", goal, more))
        digits = Path(name) / "ten.npz"
        with np.load(data.fetch(None)) as file:  # 640 images: ten steps of 2 × 32
            np.savez(digits, x_train=file["x_train"][:640], y_train=file["y_train"][:640])
        local = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
        ours = (sys.executable, HERE / "tiny.py", "ranks", digits)
        by_hand = ("torchrun", *local, HERE / "bare.py", digits)
        pairs = [(seconds(*ours), seconds(*by_hand)) for _ in range(ROUNDS)]
        rows.append(
            told(
                "two ranks, ten steps, command to exit ÷ loop by hand",
                "≤ 1.10",
                [a / b for a, b in pairs],
            )
        )
    write_json(HERE / "trainer.json", {"steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
