"""Measure the Trainer and the real Lightning, alternating: `python benchmarks/trainer.py`.

CPU timings with one thread, on a tiny model.
1. Time per step above a plain loop, with logger, progress bar and checkpoints off.
   Goal: at most 40 µs. Lightning's time is measured too.
2. The same with progress bar, TensorBoard and checkpoints on.
   Goal: at most a third of Lightning's.
3. Time of the import above torch's. Goal: at most 0.15 s.
4. Two ranks, ten steps, from the command to the exit ÷ torchrun with a loop written by hand.
   Goal: at most 1.10.

It writes benchmarks/trainer.json.
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
STEPS = 2000
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 7
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
}


def on_a_terminal(*command: object) -> None:
    """Run a command whose output goes to a terminal: progress bars are then drawn."""
    os.environ.update(ENVIRONMENT)
    words = [str(part) for part in command]
    status = pty.spawn(words, lambda fd: os.read(fd, 65536) and b" ")
    if status:
        sys.exit(f"{command} ended with {status}")


def steps(folder: Path) -> dict[str, list[float]]:
    """Microseconds per step above the plain loop, which runs before and after each run."""
    out = folder / "steps.json"
    on_a_terminal(sys.executable, HERE / "tiny.py", "steps", STEPS, ROUNDS, folder, out)
    return json.loads(out.read_text())


def seconds(*command: object) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        [str(part) for part in command], env=ENVIRONMENT, capture_output=True, text=True
    )
    # The loop by hand can abort at its end (multigpu/launch/exit.py).
    if done.returncode and "terminate called" not in done.stderr:
        sys.exit(f"{command} failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - began


def importing(statement: str) -> float:
    code = f"import time; a = time.perf_counter(); {statement}; print(time.perf_counter() - a)"
    command = [sys.executable, "-c", code]
    return float(subprocess.check_output(command, env=ENVIRONMENT, text=True))


def summary(what: str, goal: str, values: list[float]) -> dict:
    """Print the median with its 95% interval, and return them and the range for the file.

    The interval is that between two of the sorted values, by the binomial distribution.
    """
    ordered = sorted(values)
    rank = max(0, int((len(values) - 1.96 * len(values) ** 0.5) / 2))
    row = {
        "quantity": what,
        "goal": goal,
        "median": round(statistics.median(values), 3),
        "interval": [round(ordered[rank], 3), round(ordered[-1 - rank], 3)],
        "min": round(ordered[0], 3),
        "max": round(ordered[-1], 3),
        "rounds": len(values),
    }
    low, high = row["interval"]
    print(
        f"{what}: {row['median']:g} (95% interval {low:g} to {high:g}, {len(values)} rounds; "
        f"goal: {goal})",
        flush=True,
    )
    return row


def ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def differences(values: list[float], baseline: list[float]) -> list[float]:
    return [a - b for a, b in zip(values, baseline, strict=True)]


def step_rows(folder: Path) -> list[dict]:
    above = steps(folder)
    lightning = statistics.median(above["lightning"])
    return [
        summary("µs a step above the plain loop, all off", "≤ 40", above["multigpu"]),
        summary("Lightning's, all off", "none", above["lightning"]),
        summary(
            "multigpu's ÷ Lightning's, all off",
            "≤ 0.12",
            [value / lightning for value in above["multigpu"]],
        ),
        summary(
            "multigpu's ÷ Lightning's, progress bar, TensorBoard and checkpoints on",
            "≤ 0.33",
            ratios(above["multigpu, all on"], above["lightning, all on"]),
        ),
    ]


def import_rows() -> list[dict]:
    goals = {"multigpu.trainer": "≤ 0.15", "lightning": "none"}
    times = {
        module: [importing(f"import {module}") for _ in range(ROUNDS)]
        for module in ("torch", *goals)
    }
    rows = []
    for module, goal in goals.items():
        above = differences(times[module], times["torch"])
        rows.append(summary(f"seconds to import {module}, above torch's", goal, above))
    return rows


def two_ranks_row(folder: Path) -> dict:
    digits = folder / "ten.npz"
    # 640 images: ten steps of 2 × 32
    with np.load(data.fetch(None)) as file:
        np.savez(digits, x_train=file["x_train"][:640], y_train=file["y_train"][:640])
    local = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    with_trainer = (sys.executable, HERE / "tiny.py", "ranks", digits)
    by_hand = ("torchrun", *local, HERE / "bare.py", digits)
    pairs = [seconds(*with_trainer) / seconds(*by_hand) for _ in range(ROUNDS)]
    return summary("two ranks, ten steps, command to exit ÷ loop by hand", "≤ 1.10", pairs)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        rows = [*step_rows(Path(name)), *import_rows(), two_ranks_row(Path(name))]
    write_json(HERE / "trainer.json", {"steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
