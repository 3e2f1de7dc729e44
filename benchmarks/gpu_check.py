"""Check the course on a real GPU: `make gpu-check`, or `python benchmarks/gpu_check.py`.

It needs an NVIDIA GPU, torch 2.11 or later, scikit-learn and matplotlib; no network, and no
installation of the course. What else is missing is skipped by name. It stops after 9 minutes
at most (a rehearsal after 36), and writes benchmarks/gpu/GPU-NAME.json and a page beside it.
Until a run is complete, both names contain "partial". A stopped run and a run with --only
leave these partial files.

    python benchmarks/gpu_check.py --only steps sweep      some sections only
    python benchmarks/gpu_check.py --device cpu --quick    a rehearsal: the CPU in its place

A rehearsal executes the code of all sections on tiny sizes, and measures nothing. Its report
is in results/gpu-check, and says on its first line that it is a rehearsal.

Each section is a program in benchmarks/gpu_sections/ that runs in a process of its own, with a
time limit. The exit code is 1 if a check failed, a section could not be finished, or there is
no GPU.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu_sections"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from page import failures, page_of
from processes import kill_session, last_lines

from multigpu.errors import UserError
from multigpu.files import atomic, writable_folder, write_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SECTIONS_FOLDER = HERE / "gpu_sections"
REPORTS = HERE / "gpu"
REHEARSALS = ROOT / "results" / "gpu-check"
TOTAL_SECONDS = 540.0
# A rehearsal can share its machine with other programs: its limits are longer.
REHEARSAL_LIMITS = 4
CARD_SECONDS = 60.0
# The report is saved this often, in seconds, while a section runs.
POLL = 1.0
EMPTY: dict[str, list] = {"rows": [], "skipped": [], "failed": [], "notes": []}


@dataclass(frozen=True)
class Plan:
    """A section's file in gpu_sections/, its title on the page, and its time limit."""

    name: str
    title: str
    seconds: float


# What can only be learnt on a GPU comes first, in case the time is short.
PLANS = (
    Plan("steps", "Steps: simulated against measured", 110),
    Plan("sweep", "Kernels: simulated against measured, worst first", 75),
    Plan("launches", "The cost of a launch", 30),
    Plan("memory", "Peak memory", 45),
    Plan("allocator", "Workspaces, segments and copies", 30),
    Plan("values", "The same numbers", 35),
    Plan("error_texts", "Error texts", 25),
    Plan("amp", "Mixed precision", 30),
    Plan("nccl", "NCCL with one rank", 25),
    Plan("shared_gpu", "Two ranks on one GPU, over gloo", 30),
    Plan("prove", "multigpu prove on this GPU", 150),
    Plan("lessons", "The lessons' scripts", 150),
)


class Stopped(BaseException):
    """A signal has asked this program to end; `number` is the signal's."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Report:
    """The report of a run: `save` writes what there is so far, `finish` the final files."""

    def __init__(self, folder: Path, stem: str, content: dict[str, Any]):
        self.folder = folder
        self.stem = stem
        self.content = content

    def save(self) -> None:
        self._write(f"{self.stem}.partial")

    def finish(self) -> Path:
        """Write the complete report under its final name; return the page's path."""
        self.content["complete"] = True
        self._write(self.stem)
        for suffix in ("json", "md"):
            (self.folder / f"{self.stem}.partial.{suffix}").unlink(missing_ok=True)
        return self.folder / f"{self.stem}.md"

    def _write(self, stem: str) -> None:
        write_json(self.folder / f"{stem}.json", self.content)
        with atomic(self.folder / f"{stem}.md") as temporary:
            temporary.write_text(page_of(self.content))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    names = [plan.name for plan in PLANS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a rehearsal")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SECTION")
    parser.add_argument("--out", type=Path, help="folder for the report")
    args = parser.parse_args(arguments)
    args.rehearsal = args.quick or args.device == "cpu"
    if args.device == "cpu" and not args.quick:
        parser.error("--device cpu is a rehearsal: give --quick with it")
    if args.out is None:
        args.out = REHEARSALS if args.rehearsal else REPORTS
    if args.rehearsal and args.out.resolve() == REPORTS:
        parser.error("a rehearsal's figures are no GPU's: give another folder with --out")
    return args


def environment_for(work: Path, device: str) -> dict[str, str]:
    """The sections' environment: they find the course, and write into `work`.

    The digits are in the user's cache, or in `work` if that cannot be written.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    more = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MPLBACKEND": "agg",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(work),
    }
    try:
        writable_folder(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except (UserError, RuntimeError):
        more["XDG_CACHE_HOME"] = str(work / "cache")
    if device == "cpu":
        # With several threads, tiny operations wait for the busiest core.
        more |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **more}


@contextmanager
def in_own_session(
    command: list[object], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen]:
    """Start a command whose output goes to `log`; at the end, kill all that it has started."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_session(process.pid)
        process.wait()


def find_card(work: Path, device: str, environment: dict[str, str]) -> dict:
    """The machine's GPU, as gpu_sections/card.py finds it.

    Raises UserError if there is none, or if it does not answer.
    """
    path, log = work / "card.json", work / "card.log"
    command = [sys.executable, SECTIONS_FOLDER / "card.py", "--device", device, "--out", path]
    with in_own_session(command, environment, log) as process:
        try:
            code = process.wait(CARD_SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"torch did not find the GPU within {CARD_SECONDS:.0f} s: look at nvidia-smi."
            ) from None
    if code:
        raise UserError(log.read_text(errors="replace").strip() or f"exit code {code}")
    return json.loads(path.read_text())


def read_results(path: Path) -> dict[str, Any]:
    """What a section has written so far."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {name: list(values) for name, values in EMPTY.items()}


def run_section(
    plan: Plan,
    report: Report,
    args: argparse.Namespace,
    work: Path,
    environment: dict[str, str],
    seconds: float,
) -> dict[str, Any]:
    """Run a section for at most `seconds`, and return its part of the report.

    The report on the disk has the section's rows while it runs.
    """
    out, log = work / f"{plan.name}.json", work / f"{plan.name}.log"
    command: list[object] = [sys.executable, SECTIONS_FOLDER / f"{plan.name}.py"]
    command += ["--device", args.device, "--card", work / "card.json", "--out", out]
    command += ["--quick"] if args.quick else []
    began = time.monotonic()
    sections = report.content["sections"]

    def part(status: str) -> dict[str, Any]:
        taken = time.monotonic() - began
        return {"title": plan.title, "status": status, "seconds": taken, **read_results(out)}

    sections[plan.name] = part("was stopped")
    code = None
    try:
        with in_own_session(command, environment, log) as process:
            while code is None and time.monotonic() - began < seconds:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(POLL)
                    break
                sections[plan.name] = part("was stopped")
                report.save()
    except Stopped:
        sections[plan.name] = part("was stopped")
        raise
    if code == 0:
        status = "done"
    elif code is None:
        status = f"was stopped at its time limit of {seconds:.0f} s"
    else:
        status = f"ended with exit code {code}"
    sections[plan.name] = part(status)
    if code != 0 or failures(sections[plan.name]):
        sections[plan.name]["log"] = last_lines(log.read_text(errors="replace"))
    report.save()
    return sections[plan.name]


def run_all(args: argparse.Namespace, work: Path) -> int:
    """Run all sections and write the report; return the exit code."""
    began = time.monotonic()
    environment = environment_for(work, args.device)
    card = find_card(work, args.device, environment)
    name = "rehearsal-" + args.device if args.rehearsal else card["name"]
    stem = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    report = Report(
        writable_folder(args.out),
        stem,
        {
            "gpu": None if args.rehearsal else card["name"],
            "rehearsal": args.rehearsal,
            "complete": False,
            "command": "python benchmarks/gpu_check.py",
            "started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": 0.0,
            "card": card,
            "sections": {},
        },
    )
    plans = [plan for plan in PLANS if plan.name in args.only]
    longer = REHEARSAL_LIMITS if args.rehearsal else 1
    minutes = longer * TOTAL_SECONDS / 60
    print(f"{card['name']}: {len(plans)} sections, at most {minutes:.0f} minutes", flush=True)
    failed = 0
    for number, plan in enumerate(plans, 1):
        left = longer * TOTAL_SECONDS - (time.monotonic() - began)
        seconds = max(1.0, min(longer * plan.seconds, left))
        print(f"[{number:>2}/{len(plans)}] {plan.title} … ", end="", flush=True)
        section = run_section(plan, report, args, work, environment, seconds)
        bad = failures(section) + (section["status"] != "done")
        failed += bad
        rows, skipped = len(section["rows"]), len(section["skipped"])
        status = "" if section["status"] == "done" else f", {section['status']}"
        print(
            f"{rows} rows, {bad} failed, {skipped} skipped, "
            f"{section['seconds']:.0f} s{status}",
            flush=True,
        )
        report.content["seconds"] = time.monotonic() - began
    if len(plans) == len(PLANS):
        page = report.finish()
    else:
        report.save()
        page = report.folder / f"{stem}.partial.md"
    print(f"{failed} failed; report: {page} and {page.with_suffix('.json').name}")
    return 1 if failed else 0


def main() -> int:
    args = parse()
    if importlib.util.find_spec("torch") is None:
        print(
            "error: torch is not installed: gpu-check needs torch 2.11 or later, scikit-learn "
            "and matplotlib.",
            file=sys.stderr,
        )
        return 1

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        # After a signal, processes that are ending may still write there.
        with tempfile.TemporaryDirectory(
            prefix="gpu-check-", ignore_cleanup_errors=True
        ) as work:
            return run_all(args, Path(work))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print("\nstopped: the partial report has what was found", file=sys.stderr)
        return 128 + stopped.number


if __name__ == "__main__":
    sys.exit(main())
