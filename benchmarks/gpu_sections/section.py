"""What all sections share: flags, the file of results, and the virtual side's process.

A section is a program: `python benchmarks/gpu_sections/NAME.py --device cuda --card CARD --out
FILE`. benchmarks/gpu_check.py starts it, with a time limit. Whatever ends it, the rows that it
has found so far are in FILE.

Virtual GPUs run in a process of their own, without CUDA: `section.virtual()` starts the same
program with --virtual, and returns its rows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from card import simulated

from multigpu.files import write_json
from multigpu.virtual import options

# A program that a section starts is ended after this many seconds; rehearsed, on a busy CPU.
LIMIT, REHEARSAL_LIMIT = 75.0, 300.0


class Section:
    """The results of one section.

    device     where the section's tensors are: cuda:0, or the CPU in its place
    quick      whether sizes are tiny, to exercise the code
    card       card.py's JSON; `gpu` is the Gpu that simulates it
    rows       dicts that have a "case"; one with ok=False is a check that failed
    """

    def __init__(self, args: argparse.Namespace, says: str, units: dict[str, str]):
        self.device = torch.device("cuda:0" if args.device == "cuda" else "cpu")
        self.quick: bool = args.quick
        self.card = json.loads(args.card.read_text())
        self.gpu = simulated(self.card["gpu"], self.card["memory"])
        self.path: Path = args.out
        self.results: dict = {"says": says, "units": units}
        self.results |= {"rows": [], "skipped": [], "failed": []}
        # Threads of a section add rows, and an older file must not replace a newer one.
        self._saving = threading.Lock()
        self.save()

    def save(self) -> None:
        """Write the results so far, atomically."""
        with self._saving:
            write_json(self.path, self.results)

    def row(self, **values: object) -> None:
        self.results["rows"].append(values)
        self.save()

    def skip(self, what: str, why: str) -> None:
        """Report that `what` was not tried, because the machine lacks something."""
        self.results["skipped"].append({"what": what, "why": why})
        self.save()

    def fail(self, what: str, why: str, log: str = "") -> None:
        """Report that `what` failed, with the end of its output."""
        self.results["failed"].append({"what": what, "why": why, "log": log})
        self.save()

    @contextmanager
    def item(self, what: str) -> Iterator[None]:
        """Report an exception in the block as the failure of `what`, and continue after it.

        A GPU with too little memory for an item is no failure: the item is skipped.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.skip(what, f"out of memory: {str(error).split(' If ')[0]}")
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            text = str(error).strip().split("\n")[0]
            self.fail(what, f"{type(error).__name__}: {text} ({where})")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, command: Sequence[object], **environment: str) -> tuple[int | None, str]:
        """Run a command; return its exit code, None if it took too long, and its output.

        What it leaves running ends with the section (gpu_check.py).
        """
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            try:
                code = subprocess.run(
                    [str(word) for word in command],
                    env=os.environ | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=REHEARSAL_LIMIT if self.quick else LIMIT,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
            output.seek(0)
            return code, output.read()

    def virtual(self) -> dict[str, dict]:
        """Run the virtual side of this program; return its rows by their "case".

        A failure is reported, and the rows that were found before it are returned.
        """
        out = self.path.with_suffix(".virtual.json")
        # Without CUDA, so that the virtual side is the same on all machines; and not on the
        # virtual GPUs on which `multigpu virtual` can rehearse the real side.
        os.environ.pop(options.VARIABLE, None)
        command = [sys.executable, *sys.argv, "--virtual", "--out", out]
        code, output = self.run(command, CUDA_VISIBLE_DEVICES="")
        if code != 0:
            self.fail("the virtual side", f"exit code {code}", last_lines(output))
        found = json.loads(out.read_text()) if out.exists() else {"rows": [], "failed": []}
        for one in found["failed"]:
            self.fail(f"virtual: {one['what']}", one["why"])
        return {row["case"]: row for row in found["rows"]}


def last_lines(text: str) -> str:
    """The end of a program's output, for a report."""
    return "\n".join(text.strip().splitlines()[-15:])


def main(
    says: str,
    units: dict[str, str],
    real: Callable[[Section], None],
    virtual: Callable[[Section], None] | None = None,
) -> None:
    """Run a section's program: its real side, or its virtual side with --virtual.

    `says` is the page's sentence of what the tables compare. `units` has the fields of a row
    that the page shows, with the unit in which it shows them (page.py).
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--card", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    side = virtual if args.virtual and virtual else real
    side(Section(args, says, {"case": ""} | units))
