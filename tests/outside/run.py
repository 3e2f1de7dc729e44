"""Run public CUDA scripts under `multigpu virtual`, and compare them with the CPU.

    python tests/outside/run.py FOLDER         all of cases/; writes benchmarks/outside.json
    python tests/outside/run.py FOLDER NAME…   these alone; with --report FILE, it replaces
                                               their rows there, else it writes nothing

FOLDER holds checkouts/NAME, with a file COMMIT ("owner/name sha"), as README.md lists them; a
script that is not there is left out. The first run installs requirements.txt into
FOLDER/packages. Each script runs in a copy, with literals that make it smaller, on stand-in
data.
`make test-outside FROM=FOLDER` calls this; it is not part of `make test`.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import stand_in
import torch
from case import Case, replace_texts
from cases import CASES
from compare import Comparison, compare_losses, compare_weights, losses, scalars
from translate import translate

from multigpu.files import write_json

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REPORT = ROOT / "benchmarks" / "outside.json"
REQUIREMENTS = HERE / "requirements.txt"
SEED = "1"
# What a rank says because another has failed.
CONSEQUENCES = ("ChildFailedError", "Connection closed by peer")
# They decide which GPUs a script sees, and are of this process's own run.
NOT_PASSED_ON = ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE")
NO_LOSSES = "it prints no loss and writes no checkpoint"
NO_MOVES = "its optimizer moves no weight: equal numbers would say little"


def main() -> None:
    arguments = _arguments()
    folder = checked_folder(arguments.folder, "make test-outside FROM=FOLDER")
    cases = _chosen(arguments.names)
    packages = install(folder / "packages")
    for wanted in sorted({case.packages for case in cases} - {""}):
        install_pinned(folder / _folder(wanted), wanted)
    report = (
        Path(arguments.report or REPORT) if arguments.report or not arguments.names else None
    )
    rows = _earlier(report) if arguments.names else []
    with tempfile.TemporaryDirectory(prefix="outside-") as temporary:
        data = Path(temporary, "data")
        stand_in.make(data)
        for case in cases:
            checkout = folder / "checkouts" / case.checkout
            if not (checkout / case.script).exists():
                print(f"{case.name:<28} is not in the folder")
                continue
            working = Path(temporary, case.name)
            run = Run(case, checkout, packages, data, working)
            row = run.reference() if arguments.reference else run.row()
            print(line(row), flush=True)
            if arguments.keep:
                kept = Path(arguments.keep, case.name)
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(working, kept, symlinks=True)
            shutil.rmtree(working)
            if arguments.reference:
                continue
            rows = merged(rows, row)
            if report:
                # After each script: a run that is stopped keeps what it has.
                write_json(report, {"summary": summary(rows), "rows": rows})
    if not arguments.reference:
        print(json.dumps(summary(rows)))


def checked_folder(given: str, command: str) -> Path:
    """The folder with the checkouts; ends the program if it is not one."""
    folder = Path(given or "nowhere").resolve()
    if not (folder / "checkouts").is_dir():
        sys.exit(
            f"error: {given or 'FROM='} holds no checkouts: expected a folder as "
            f"tests/outside/README.md describes it; run {command}."
        )
    return folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="a folder with checkouts/, see tests/outside/README.md")
    parser.add_argument("names", nargs="*", help="cases of tests/outside/cases")
    parser.add_argument("--report", help="the JSON file to write")
    parser.add_argument(
        "--reference", action="store_true", help="make the references' runs alone"
    )
    parser.add_argument("--keep", help="a folder for the scripts' files and outputs")
    return parser.parse_intermixed_args()


def _chosen(names: list[str]) -> list[Case]:
    known = {case.name: case for case in CASES}
    wrong = [name for name in names if name not in known]
    if wrong:
        sys.exit(f"error: there is no case {wrong[0]!r}: the cases are {', '.join(known)}.")
    return [known[name] for name in names] or list(known.values())


def install(folder: Path) -> Path:
    """Install the packages that the scripts import, once, beside the checkouts."""
    installed = folder / REQUIREMENTS.name
    if not installed.exists() or installed.read_text() != REQUIREMENTS.read_text():
        # torch 2.13 needs torchvision 0.28, torch 2.12 needs torchvision 0.27, and so on.
        minor = int(torch.__version__.split(".")[1])
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"]
        command += ["--target", folder, "--requirement", REQUIREMENTS]
        subprocess.run([*command, f"torchvision==0.{minor + 15}.*"], check=True)
        installed.write_text(REQUIREMENTS.read_text())
    return folder


def install_pinned(folder: Path, packages: str) -> None:
    """Install a script's own packages, once, in a folder of their own."""
    if folder.exists():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    # A folder that holds only a part, after an interrupted run, has another name.
    part = folder.with_name(f"{folder.name}.part")
    subprocess.run([*command, "--target", part, *packages.split()], check=True)
    part.rename(folder)


def _folder(packages: str) -> str:
    return "packages-" + re.sub(r"[^\w.]+", "-", packages.split()[0])


class Run:
    """One script's two runs, each in a copy of its folder, below `working`."""

    # A script that hangs is ended after this many seconds.
    seconds = 420

    def __init__(self, case: Case, checkout: Path, packages: Path, data: Path, working: Path):
        self.options = f"--gpus {case.gpus} {case.options}".strip()
        self.case = case
        self.checkout = checkout
        self.packages = packages
        self.data = data
        self.working = working

    def row(self) -> dict:
        """Run the script on virtual GPUs, then the reference; return the row of the table."""
        case = self.case
        repository, commit = (self.checkout / "COMMIT").read_text().split()
        row = {
            "name": case.name,
            "script": case.script,
            "repository": repository,
            "commit": commit,
            "torch": torch.__version__,
            "command": f"multigpu virtual {self.options} {case.command}",
            "smaller": case.smaller,
            **({"changed": case.changed} if case.changed else {}),
            "result": "",
        }
        started = time.monotonic()
        code, output = self.virtual()
        row["seconds"] = round(time.monotonic() - started, 1)
        report = self.report()
        if code:
            row["result"] = f"failed: {_last_line(output)}"
        elif not report["gpus"]:
            row["result"] = "failed: it used no virtual GPU"
        else:
            row["result"] = "ran"
            row["simulated_seconds"] = report["simulated_seconds"]
            row["losses"] = self._compared(output)
        return row

    def virtual(self) -> tuple[int, str]:
        """Run the script on virtual GPUs; return its exit code and what it printed."""
        folder = self._copy("virtual")
        command = [str(Path(sys.executable).parent / "multigpu"), "virtual"]
        command += [*self.options.split(), "--json", str(self.working / "report.json")]
        return self._start(folder, [*command, *self._command(self.case.command)], {})

    def report(self) -> dict:
        """What `multigpu virtual --json` has written."""
        path = self.working / "report.json"
        return json.loads(path.read_text()) if path.exists() else {"gpus": []}

    def _compared(self, output: str) -> dict | str:
        """What the reference says: a comparison, or the reason why there is none."""
        case = self.case
        if case.unproven or not (case.losses or case.scalars or case.weights):
            return f"unproven: {case.unproven or NO_LOSSES}"
        code, reference = self._reference()
        if code:
            return f"unproven: the reference fails: {_last_line(reference)}"
        try:
            found = asdict(self._comparison(output, reference))
        except ValueError as error:
            return f"unproven: {error}"
        stepped, moved = ((self.working / name).exists() for name in ("stepped", "moved"))
        if found["equal"] and stepped and not moved:
            return f"unproven: {NO_MOVES}"
        return {"reference": case.reference, **found}

    def reference(self) -> dict:
        """Make the reference's run alone: to see whether a new entry of cases/ holds."""
        started = time.monotonic()
        code, output = self._reference()
        return {
            "name": self.case.name,
            "result": "ran" if code == 0 else f"failed: {_last_line(output)}",
            "seconds": round(time.monotonic() - started, 1),
            "losses": " ".join(losses(output, self.case.losses or "(?!)")),
        }

    def _reference(self) -> tuple[int, str]:
        case = self.case
        folder = self._copy("reference")
        translate(folder, case.reference, case.gpus, case.translated)
        command = self._command(case.reference_command or case.command)
        if command[0] == "torchrun":
            command[:1] = [sys.executable, "-m", "torch.distributed.run"]
        elif command[0] == "-m" or command[0].endswith(".py"):
            command[:0] = [sys.executable]
        more = {
            f"OUTSIDE_{case.reference.upper()}": str(case.gpus),
            "OUTSIDE_STEPS": str(self.working),
        }
        return self._start(folder, command, more)

    def _comparison(self, output: str, reference: str) -> Comparison:
        case = self.case
        if case.losses:
            return compare_losses(losses(output, case.losses), losses(reference, case.losses))
        written = case.scalars or case.weights
        one, other = (
            max((self.working / run / case.folder).glob(written), default=None)
            for run in ("virtual", "reference")
        )
        if one is None or other is None:
            raise ValueError(f"a run has not written {written}")
        if case.scalars:
            return compare_losses(scalars(one), scalars(other))
        return compare_weights(one, other)

    def _copy(self, run: str) -> Path:
        """Copy the script's folder below working/`run`, made smaller, with its data."""
        folder = self.working / run / self.case.folder
        copied = self.case.copied or self.case.folder
        shutil.copytree(self.checkout / copied, self.working / run / copied)
        replace_texts(folder, self.case.smaller)
        replace_texts(folder, self.case.changed)
        for path, name in self.case.data.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.is_dir():
                shutil.rmtree(place)
            place.symlink_to(self.data / name)
        return folder

    def _command(self, command: str) -> list[str]:
        words = {"{helpers}": str(HERE / "launch"), "{gpus}": str(self.case.gpus)}
        for name, value in words.items():
            command = command.replace(name, value)
        return command.split()

    def _start(self, folder: Path, command: list[str], more: dict) -> tuple[int, str]:
        """Run a command in `folder`; return its exit code and what it printed."""
        case = self.case
        own = [folder / case.python_path] if case.python_path else []
        pinned = [self.packages.with_name(_folder(case.packages))] if case.packages else []
        places = [HERE / "site", *own, *pinned, self.packages, ROOT]
        places.append(os.environ.get("PYTHONPATH", ""))
        python_path = os.pathsep.join(map(str, filter(None, places)))
        environment = {
            **{name: text for name, text in os.environ.items() if name not in NOT_PASSED_ON},
            "PYTHONPATH": python_path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "hf_home"),
            "TORCH_HOME": str(folder / "torch_home"),
            **({} if case.seeded else {"OUTSIDE_SEED": SEED}),
            **more,
        }
        log = folder / "output.txt"
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(self.seconds)
            except subprocess.TimeoutExpired:
                code = 124
                file.write(f"\nended after {self.seconds} s\n")
            finally:
                _end(process)
        return code, log.read_text(errors="replace")


def _end(process: subprocess.Popen) -> None:
    """End what is left of the command's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(output: str) -> str:
    """What failed: why the run stood still, else the last exception, else the last line."""
    lines = [text.strip() for text in output.splitlines() if text.strip()]
    for text in lines:
        if text.startswith("likely: "):
            return f"it stands still, {text}"[:300]
    lines = [re.sub(r"^\[rank\d+\]: *", "", text) for text in lines]
    errors = [text for text in lines if re.match(r"[\w.]+(Error|Exception)\b", text)]
    errors = [text for text in errors if not any(words in text for words in CONSEQUENCES)]
    return ((errors or lines)[-1] if lines else "no output")[:300]


def line(row: dict) -> str:
    """A row as text."""
    found = row.get("losses", "")
    if isinstance(found, dict):
        word = "equal" if found["equal"] else f"differ by {found['difference']:.1e}"
        found = f"{found['compared']} {word}"
    simulated = row.get("simulated_seconds")
    simulated = "" if simulated is None else f"{simulated:.4f} s"
    start = f"{row['name']:<28} {row['result']:<12}"
    return f"{start} {simulated:>12}  {row['seconds']:>6} s  {found}"


def _earlier(report: Path | None) -> list[dict]:
    return json.loads(report.read_text())["rows"] if report and report.exists() else []


def merged(rows: list[dict], row: dict) -> list[dict]:
    """`rows` with `row` in place of that of the same name, in the order of cases/."""
    by_name = {one["name"]: one for one in [*rows, row]}
    return [by_name[case.name] for case in CASES if case.name in by_name]


def summary(rows: list[dict]) -> dict[str, int]:
    """How many scripts ran, and what the comparisons say."""
    ran = [row for row in rows if row["result"] == "ran"]
    compared = [row["losses"] for row in ran if isinstance(row["losses"], dict)]
    equal = sum(found["equal"] for found in compared)
    return {
        "scripts": len(rows),
        "ran": len(ran),
        "equal": equal,
        "differ": len(compared) - equal,
        "unproven": len(ran) - len(compared),
    }


if __name__ == "__main__":
    main()
