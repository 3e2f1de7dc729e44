"""All twelve strategies of lesson 10 in one table: `python benchmarks/strategies.py`.

It trains for ten epochs on two ranks with each, and writes benchmarks/strategies.json: bytes
predicted and counted per step and rank, and the largest difference of a weight from that of
one process. All are the same in each run, on CPUs, except those of bagua:async.
"""

import sys
from pathlib import Path

from multigpu.files import write_json

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "lessons" / "10-strategies"))
COLUMNS = {
    "predicted": "predicted",
    "counted": "counted",
    "from_one": "from_serial",
    "accuracy": "accuracy",
}


def main() -> None:
    from experiments import LIMIT, STRATEGIES, compare

    rows = {}
    for stem, names in STRATEGIES.items():
        new = [name for name in names if name not in rows]
        rows |= compare(stem, new, epochs=10)
    strategies = {
        name: {title: row[key] for key, title in COLUMNS.items()} for name, row in rows.items()
    }
    accuracies = [row["accuracy"] for row in rows.values()]
    content = {
        "ranks": 2,
        "limit_of_exact": LIMIT,
        "lowest_accuracy": min(accuracies),
        "highest_accuracy": max(accuracies),
        "strategies": strategies,
    }
    write_json(Path(__file__).with_suffix(".json"), content)


if __name__ == "__main__":
    main()
