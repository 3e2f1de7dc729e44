"""All twelve strategies of lesson 10 in one table: `python benchmarks/strategies.py`.

It trains for ten epochs on two ranks with each, and writes benchmarks/strategies.json, which
the table on lesson 10's page is made of: bytes predicted and counted per step and rank, and
the largest difference of a weight from that of one process. All are the same in each run, on
CPUs, except those of bagua:async.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from multigpu.files import write_json

ROOT = Path(__file__).parent.parent
COLUMNS = {
    "bytes_predicted": "predicted",
    "bytes_counted": "counted",
    "difference_from_serial": "from_serial",
    "difference_from_adam": "from_Adam",
    "test_accuracy": "accuracy",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as out:
        script = ROOT / "scripts" / "PTL_Strategies.py"
        command = [sys.executable, script, "--strategy", "all", "--prove", "--out", out]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, env=environment, check=True)
        run = json.loads((Path(out) / "metrics.json").read_text())
    rows = {
        name: {title: row[key] for key, title in COLUMNS.items() if key in row}
        for name, row in run["strategies"].items()
    }
    accuracies = [row["accuracy"] for row in rows.values()]
    content = {
        "ranks": run["world_size"],
        "limit_of_exact": run["proof"]["limit"],
        "lowest_accuracy": min(accuracies),
        "highest_accuracy": max(accuracies),
        "strategies": rows,
    }
    write_json(Path(__file__).with_suffix(".json"), content)


if __name__ == "__main__":
    main()
