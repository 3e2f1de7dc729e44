"""Check the course on a real GPU: `make gpu-check`, or `python benchmarks/gpu_check.py`.

It needs an NVIDIA GPU, torch 2.11 or later, scikit-learn and matplotlib; no network, and no
installation of the course. It stops after 9 minutes at most (a rehearsal after 36), and writes
benchmarks/gpu/GPU-NAME.json and a page beside it. Until a run is complete, both names contain
"partial". A stopped run and a run with --only leave these partial files.

    python benchmarks/gpu_check.py --only steps memory     some sections only
    python benchmarks/gpu_check.py --device cpu            a rehearsal: the CPU in its place

A rehearsal executes the sections on tiny sizes, and measures nothing. Its report is in
results/gpu-check, and says on its first line that it is a rehearsal.

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
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu_sections"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from page import failures, page_of

from multigpu.errors import UserError
from multigpu.files import atomic, writable_folder, write_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SECTIONS = HERE / "gpu_sections"
REPORTS = HERE / "gpu"
TOTAL_SECONDS = 540.0
# A rehearsal can share its machine with other programs: its limits are longer.
REHEARSAL_LIMITS = 4


@dataclass(frozen=True)
class Plan:
    """A section's file in gpu_sections/, its title on the page, and its time limit."""

    name: str
    title: str
    seconds: float


CARD = Plan("card", "The GPU", 60)
# What can only be learnt on a GPU comes first, in case the time is short.
PLANS = (
    Plan("steps", "Steps and kernels: simulated against measured", 180),
    Plan("memory", "Peak memory", 45),
    Plan("allocator", "Workspaces, segments and copies", 30),
    Plan("same", "Errors, autocast and losses", 60),
    Plan("prove", "multigpu prove on this GPU", 150),
    Plan("lessons", "The lessons' scripts", 150),
)


class Stopped(BaseException):
    """A signal has asked this program to end; its number is the argument."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    names = [plan.name for plan in PLANS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a rehearsal")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SECTION")
    parser.add_argument("--gpu", help="the preset or the file that simulates another GPU")
    parser.add_argument("--out", type=Path, help="folder for the report")
    args = parser.parse_args(arguments)
    args.quick |= args.device == "cpu"
    args.out = args.out or (ROOT / "results" / "gpu-check" if args.quick else REPORTS)
    if args.quick and args.out.resolve() == REPORTS:
        parser.error("a rehearsal's figures are no GPU's: give another folder with --out")
    return args


def environment_for(work: Path, device: str) -> dict[str, str]:
    """The sections' environment: they find the course, and write into `work`."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    more = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MPLBACKEND": "agg",
        "TMPDIR": str(work),
    }
    try:
        writable_folder(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except (UserError, RuntimeError):
        # The lessons' digits are kept there.
        more["XDG_CACHE_HOME"] = str(work / "cache")
    if device == "cpu":
        # With several threads, tiny operations wait for the busiest core.
        more |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **more}


def kill_session(session: int) -> None:
    """Kill all processes of a session, whatever their process groups are: ranks, too."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            # After the name, which can have spaces: state, parent, group, session.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(folder.name), signal.SIGKILL)


class Run:
    """A run of the check: `content` is its report, which `save` writes as JSON and as a page.

    work   a folder for the sections' files, which is deleted at the end
    """

    def __init__(self, args: argparse.Namespace, work: Path):
        self.args, self.work = args, work
        self.began = time.monotonic()
        self.environment = environment_for(work, args.device)
        self.content: dict[str, Any] = {}
        self.stem = ""

    def save(self, stem: str) -> Path:
        """Write the report; return the page's path."""
        self.content["seconds"] = time.monotonic() - self.began
        write_json(self.args.out / f"{stem}.json", self.content)
        page = self.args.out / f"{stem}.md"
        with atomic(page) as temporary:
            temporary.write_text(page_of(self.content))
        return page

    def execute(self, plan: Plan, flags: list[object], seconds: float) -> tuple[str, str]:
        """Run a section's program; return how it ended, and the end of its output.

        While it runs, the report on the disk gets its rows. At the end, all that it has
        started is killed.
        """
        log = self.work / f"{plan.name}.log"
        command = [sys.executable, SECTIONS / f"{plan.name}.py", "--device", self.args.device]
        command += [*flags, "--out", self.work / f"{plan.name}.json"]
        until = time.monotonic() + seconds
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        code = None
        try:
            while code is None and time.monotonic() < until:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(1)
                if plan is not CARD:
                    self.note(plan, "was stopped")
        finally:
            kill_session(process.pid)
            process.wait()
        status = "done" if code == 0 else f"ended with exit code {code}"
        if code is None:
            status = f"was stopped at its time limit of {seconds:.0f} s"
        return status, log.read_text(errors="replace").strip()

    def note(self, plan: Plan, status: str, **more: object) -> dict[str, Any]:
        """Put what a section has found so far into the report, and write it."""
        section: dict[str, Any] = {"says": "", "units": {}, "rows": [], "skipped": []}
        section |= {"failed": [], "title": plan.title, "status": status, "seconds": 0.0}
        path = self.work / f"{plan.name}.json"
        if path.exists():
            section |= json.loads(path.read_text())
        self.content["sections"][plan.name] = section | more
        self.save(f"{self.stem}.partial")
        return section

    def find_card(self) -> dict[str, Any]:
        """The machine's GPU, as gpu_sections/card.py finds it; UserError if there is none."""
        flags = ["--gpu", self.args.gpu] if self.args.gpu else []
        status, log = self.execute(CARD, flags, CARD.seconds)
        if status != "done":
            raise UserError(log or f"the search for the GPU {status}: look at nvidia-smi.")
        return json.loads((self.work / "card.json").read_text())

    def all(self) -> int:
        """Run the sections and write the report; return the exit code."""
        args = self.args
        card = self.find_card()
        writable_folder(args.out)
        name = "rehearsal-" + args.device if args.quick else card["name"]
        self.stem = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
        self.content = {
            "gpu": None if args.quick else card["name"],
            "rehearsal": args.quick,
            "complete": False,
            "command": "python benchmarks/gpu_check.py",
            "started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "card": card,
            "sections": {},
        }
        longer = REHEARSAL_LIMITS if args.quick else 1
        plans = [plan for plan in PLANS if plan.name in args.only]
        minutes = longer * TOTAL_SECONDS / 60
        print(f"{card['name']}: {len(plans)} sections, at most {minutes:.0f} minutes")
        flags = ["--card", self.work / "card.json", *(["--quick"] if args.quick else [])]
        failed = 0
        for plan in plans:
            print(f"{plan.title} … ", end="", flush=True)
            began = time.monotonic()
            left = longer * TOTAL_SECONDS - (began - self.began)
            seconds = max(1.0, min(longer * plan.seconds, left))
            status, log = self.execute(plan, flags, seconds)
            taken = time.monotonic() - began
            log = "" if status == "done" else "\n".join(log.splitlines()[-15:])
            section = self.note(plan, status, seconds=taken, log=log)
            bad = failures(section) + (status != "done")
            failed += bad
            rows, skipped = len(section["rows"]), len(section["skipped"])
            print(f"{rows} rows, {bad} failed, {skipped} skipped, {taken:.0f} s, {status}")
        page = self.save(f"{self.stem}.partial")
        if len(plans) == len(PLANS):
            self.content["complete"] = True
            page = self.save(self.stem)
            for suffix in ("json", "md"):
                (args.out / f"{self.stem}.partial.{suffix}").unlink()
        print(f"{failed} failed; report: {page} and {page.with_suffix('.json').name}")
        return 1 if failed else 0


def main() -> int:
    args = parse()
    if importlib.util.find_spec("torch") is None:
        sys.exit("error: gpu-check needs torch 2.11 or later, scikit-learn and matplotlib.")

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        # After a signal, processes that are ending may still write there.
        with tempfile.TemporaryDirectory(
            prefix="gpu-check-", ignore_cleanup_errors=True
        ) as work:
            return Run(args, Path(work)).all()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print("\nstopped: the partial report has what was found", file=sys.stderr)
        return 128 + stopped.args[0]


if __name__ == "__main__":
    sys.exit(main())
