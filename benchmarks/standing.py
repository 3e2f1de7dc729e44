"""The same scripts under `multigpu virtual` and under FakeGPU, each beside a reference.

    python benchmarks/standing.py FOLDER [--fakegpu PYTHON] [--native PYTHON CHECKOUT] [NAME…]

writes benchmarks/standing.json. FOLDER holds checkouts of the public scripts, as
tests/outside/README.md describes it. FakeGPU is started in the two ways of its documentation:
fakecuda  each Python process of the run calls fakegpu.init(runtime="fakecuda", …) before torch
          is imported. PYTHON is of an environment with FakeGPU, this torch, and what the
          scripts import.
native    its launcher preloads its CUDA and NCCL libraries, beside its coordinator. PYTHON is
          of an environment with torch's CUDA build; CHECKOUT is FakeGPU's, built. It runs the
          scripts that fakecuda does not run rightly.
Results of a way that is not given are kept from the report, as are rows of other NAMEs.
"""

import argparse
import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from standing_scripts import ROOT, SCRIPTS, Script
from standing_tools import Compared, FakeCUDA, Native, OneGenerator

import stand_in  # isort: skip, of tests/outside
from compare import losses  # isort: skip
from run import Run, _last_line, checked_folder, install  # isort: skip

from multigpu.files import write_json
from multigpu.virtual.sim.presets import GPUS

REPORT = ROOT / "benchmarks" / "standing.json"


def judged(script: Script, run: Run) -> dict:
    """What a tool made of a script: right, wrong or cannot run, with the reason."""
    case, started = run.case, time.monotonic()
    code, output = run.virtual()
    output = re.sub(r"^\s*[=-]*$", "", output, flags=re.MULTILINE)  # lines of FakeGPU's report
    found = {"seconds": round(time.monotonic() - started, 1)}
    if script.expected:
        match = re.search(script.expected, output)
        printed = match[0] if match else _last_line(output)
        return found | {"result": "right" if match else "wrong", "printed": printed[:200]}
    found["printed"] = " ".join(losses(output, case.losses or "(?!)"))[:200]
    if code:
        return found | {"result": "cannot run", "reason": _last_line(output)[:200]}
    compared = run._compared(output)
    differs = isinstance(compared, dict) and not compared["equal"]
    if differs and not isinstance(run, Native) and "_parallel" not in case.name:
        # Which random numbers a GPU draws is not known here: the CPU's are as good.
        other = OneGenerator(case, run.checkout, run.packages, run.data, run.working / "one")
        shutil.copytree(run.working / "virtual", other.working / "virtual", symlinks=True)
        compared = max(other._compared(output), compared, key=lambda one: one["equal"])
    if isinstance(compared, str):
        reason = re.sub(r"unproven: | on virtual GPUs", "", compared)
        return found | {"result": "wrong", "reason": reason}
    reason = f"{compared['compared']} numbers, largest difference {compared['difference']:.2g}"
    return found | {"result": "right" if compared["equal"] else "wrong", "reason": reason}


def summary(rows: list[dict]) -> dict:
    """How often each tool was right, wrong, or could not run; FakeGPU's better way counts."""
    found = {"scripts": len(rows), "public": sum(row["from"] != "here" for row in rows)}
    for tool, ways in {"virtual": ["virtual"], "fakegpu": ["fakecuda", "native"]}.items():
        results = [[row[way]["result"] for way in ways if way in row] for row in rows]
        right = sum("right" in result for result in results)
        unable = sum(set(result) == {"cannot run"} for result in results)
        found[tool] = {"right": right, "wrong": len(rows) - right - unable, "unable": unable}
    return found


def about(checkout: str) -> dict:
    """FakeGPU's commit, and how many GPUs each tool knows."""
    command = ["git", "-C", checkout, "rev-parse", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    profiles = list(Path(checkout, "profiles").rglob("*.yaml"))
    known = {"virtual": len(GPUS), "fakegpu": len(profiles)}
    return {"fakegpu": f"FanBB2333/FakeGPU {commit}", "gpus": known}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="checkouts of the public scripts")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--fakegpu", metavar="PYTHON")
    parser.add_argument("--native", nargs=2, metavar=("PYTHON", "CHECKOUT"))
    args = parser.parse_intermixed_args()
    folder = checked_folder(args.folder, "python benchmarks/standing.py FOLDER")
    packages = install(folder / "packages")
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {"rows": []}
    rows = {row["name"]: row for row in report["rows"]}
    if args.native:
        report |= about(args.native[1])
    with tempfile.TemporaryDirectory(prefix="standing-") as temporary:
        data = Path(temporary, "data")
        stand_in.make(data)
        for number, script in enumerate(SCRIPTS):
            case = script.case
            if args.names and case.name not in args.names:
                continue
            checkout = folder / "checkouts" / case.checkout if case.checkout else ROOT
            given = (case, checkout, packages, data)
            places = [Path(temporary, f"{way}{number}") for way in ("v", "f", "n")]
            where = (checkout / "COMMIT").read_text().strip() if case.checkout else "here"
            reference = case.reference_command or f"the script on the {case.reference}"
            row = rows.get(case.name, {}) | {
                "name": case.name,
                "script": case.script,
                "from": where,
                "command": case.command,
                "smaller": case.smaller,
                "expected": script.expected or "the reference's losses or weights",
                "reference": script.source or reference,
                "virtual": judged(script, Compared(*given, places[0])),
            }
            if args.fakegpu:
                fake = FakeCUDA(args.fakegpu, script.profile, *given, places[1])
                row["fakecuda"] = judged(script, fake)
            if args.native and row["fakecuda"]["result"] != "right":
                python, built = args.native
                native = Native(built, python, script.profile, *given, places[2])
                row["native"] = judged(script, native)
            rows[case.name] = row
            ways = (
                f"{way}: {row[way]}" for way in ("virtual", "fakecuda", "native") if way in row
            )
            print(case.name, *ways, sep="\n  ", flush=True)
            kept = [rows[one.case.name] for one in SCRIPTS if one.case.name in rows]
            report |= {"torch": torch.__version__, "summary": summary(kept), "rows": kept}
            write_json(REPORT, report)


if __name__ == "__main__":
    main()
