"""Stop an elastic run N times at random moments: `python tests/faults/run.py [N] [--real]`.

Each time, lesson 12's script trains, and one process of the run gets a signal: a fault, which
is chosen by its seed: 0, 1, … N - 1. What was found is added to results/faults.jsonl at once,
so the command goes on where it stopped; --again begins anew. A fault that was tried with other
code is tried again. After N faults the report is in results/faults.json, or, of 200 and more,
in benchmarks/faults.json, from which lesson 12's page quotes. The exit code is 1 if a fault
had another result than it must have: `--seed S` tries that one alone, and keeps its folder.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

STATE = ROOT / "results" / "faults.jsonl"
MINUTES = 30  # after that no new fault is begun
AT_A_TIME = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", type=int, nargs="?", default=110)
    parser.add_argument("--again", action="store_true", help="begin anew")
    parser.add_argument("--seed", type=int, help="try the fault of this seed alone")
    parser.add_argument(
        "--real", action="store_true", help="start each process really, not as a fork"
    )
    args = parser.parse_args()
    if args.real:
        os.environ["REAL_START"] = "1"
    if args.seed is not None:
        row = try_fault(args.seed, Path(tempfile.mkdtemp(prefix="fault")))
        print(json.dumps(row, indent=2))
        return int(row["failure"] is not None)
    if args.again:
        STATE.unlink(missing_ok=True)
    deadline = time.monotonic() + 60 * MINUTES
    import fault_rows

    code = fault_rows.code_hash() + (" real" if "REAL_START" in os.environ else "")
    rows = {row["seed"]: row for row in fault_rows.earlier(STATE, code)}
    left = [seed for seed in range(args.number) if seed not in rows]
    print(f"{args.number} faults, {args.number - len(left)} of them tried earlier", flush=True)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for row in pool.map(lambda seed: run_one(seed, code, deadline), left):
            if row is not None:
                rows[row["seed"]] = row
    tried = [rows[seed] for seed in sorted(rows) if seed < args.number]
    failed = [row["seed"] for row in tried if row["failure"] is not None]
    if len(tried) < args.number:
        print(f"{len(tried)} of {args.number} in time: the same command goes on from there.")
        return 1
    path = fault_rows.report_path(len(tried))
    fault_rows.report(tried, path)
    print(f"{len(tried)} faults, {len(failed)} failed {failed or ''}: {path}")
    return int(bool(failed))


def run_one(seed: int, code: str, deadline: float) -> dict | None:
    """Try a fault, and keep what was found; None if there is no time for it."""
    import fault_rows

    if time.monotonic() > deadline:
        return None
    with tempfile.TemporaryDirectory(prefix="fault") as name:
        row = {**try_fault(seed, Path(name)), "code": code}
    fault_rows.add(STATE, row)
    what = f"{row['signal']} to one {row['target']} of {row['agents']} × torchrun"
    moment = row["moment"] + (f" {row['count']}" if row["count"] > 1 else "")
    result = row["failure"] or f"{row['launches']} launches, world sizes {row['sizes']}"
    print(f"seed {seed}: {what}, {moment}: {result}, {row['seconds']:.0f} s", flush=True)
    return row


def try_fault(seed: int, folder: Path) -> dict:
    from dataclasses import asdict

    import faults

    fault = faults.choose(seed)
    began = time.monotonic()
    try:
        row = {**faults.run_fault(fault, folder), "failure": None}
    except Exception as error:
        row = {**asdict(fault), "failure": f"{type(error).__name__}: {error}"}
    return {**row, "seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    sys.exit(main())
