"""The model parallel tutorial's figures on the simulated clock, beside the published ones.

    python tests/outside/figure.py FOLDER   writes benchmarks/outside_figure.json

FOLDER is that of `make test-outside`. The script runs at its full size, with shapes only;
num_repeat is 1 instead of 10, because the simulated clock gives the same time each time.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from case import Case
from run import ROOT, Run, checked_folder, install

from multigpu.files import write_json

REPORT = ROOT / "benchmarks" / "outside_figure.json"
GPU = "V100-16GB"
LINKS = ("NVLink2", "PCIe3")
TUTORIAL = Case(
    "model_parallel_tutorial",
    "tutorials",
    "intermediate_source",
    "{helpers}/times.py SLOWER model_parallel_tutorial.py",
    smaller={"model_parallel_tutorial.py": [("num_repeat = 10", "num_repeat = 1")]},
)
# The tutorial's text, in s; it names neither its GPUs nor their link. Splits of 20 images, and
# of 12, the best of those that it tries.
PUBLISHED = {"one_gpu": 3.75, "model_parallel": 4.02, "pipeline": 2.51, "best": 2.43}
PUBLISHED_BEST_SPLIT = 12


def main() -> None:
    folder = checked_folder("".join(sys.argv[1:2]), "python tests/outside/figure.py FOLDER")
    runs = [_run(folder, link, slower=1.0) for link in LINKS]
    # The published time of one GPU is many times that of a V100. A GPU that is as slow has the
    # same shares of arithmetic and of launches as the published one.
    one_gpu = next(row for row in runs[-1]["rows"] if row["row"] == "one_gpu")
    slower = PUBLISHED["one_gpu"] / one_gpu["simulated_seconds"]
    runs.append(_run(folder, LINKS[-1], slower))
    content = {"torch": torch.__version__, "gpu": GPU, "unit": "the time on one GPU"}
    write_json(REPORT, content | {"runs": runs})


def _run(folder: Path, link: str, slower: float) -> dict:
    """Print and return the times with a GPU that is `slower` times as slow as GPU."""
    times = _times(folder, link, slower)
    by_split = {int(size): seconds for size, seconds in times.pop("by_split").items()}
    best = min(by_split, key=by_split.get)
    simulated = times | {"best": by_split[best]}
    rows = [
        {
            "row": name,
            "simulated_seconds": simulated[name],
            "simulated": simulated[name] / simulated["one_gpu"],
            "published": seconds / PUBLISHED["one_gpu"],
        }
        for name, seconds in PUBLISHED.items()
    ]
    print(f"{link}, a GPU {slower:.1f} times as slow as {GPU}: the time on one GPU is 1")
    for row in rows:
        print(f"{row['row']:<15} {row['simulated']:.3f}  published {row['published']:.3f}")
    print(f"best split      {best}  published {PUBLISHED_BEST_SPLIT}", flush=True)
    return {
        "link": link,
        "slower": slower,
        "rows": rows,
        "best_split": {"simulated": best, "published": PUBLISHED_BEST_SPLIT},
        "simulated_seconds_by_split": by_split,
    }


def _times(folder: Path, link: str, slower: float) -> dict:
    """The script's times in simulated seconds."""
    options = f"--gpu {GPU} --link {link} --shapes-only --clock simulated"
    command = TUTORIAL.command.replace("SLOWER", str(slower))
    case = replace(TUTORIAL, options=options, command=command)
    with tempfile.TemporaryDirectory(prefix="outside-") as temporary:
        checkout = folder / "checkouts" / case.checkout
        packages = install(folder / "packages")
        run = Run(case, checkout, packages, Path(temporary), Path(temporary, "run"))
        run.seconds = 3600
        code, output = run.virtual()
    found = [line for line in output.splitlines() if line.startswith("times: ")]
    if code or not found:
        sys.exit(f"{output[-3000:]}\nerror: the script ended with exit code {code}.")
    return json.loads(found[-1].removeprefix("times: "))


if __name__ == "__main__":
    main()
