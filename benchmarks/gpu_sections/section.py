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
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from card import Card
from processes import last_lines, run_limited

from multigpu.files import write_json

# A virtual side that takes longer is reported as failed; gpu_check.py's limits are above it.
VIRTUAL_SECONDS = 75.0
REHEARSAL_SECONDS = 300.0


class Section:
    """The results of one section: `rows`, what was skipped, what failed, and notes.

    device   where the section's tensors are: cuda:0, or the CPU in its place
    quick    whether sizes are tiny, to exercise the code
    card     the GPU, and what simulates it
    """

    def __init__(self, device: torch.device, quick: bool, card: Card, path: Path):
        self.device = device
        self.quick = quick
        self.card = card
        self.path = path
        self.rows: list[dict] = []
        self.skipped: list[dict] = []
        self.failed: list[dict] = []
        self.notes: list[str] = []

    def row(self, **values: object) -> None:
        """Add a row, and write the file. A row with ok=False is a check that failed."""
        self.rows.append(values)
        self.save()

    def skip(self, what: str, why: str) -> None:
        """Report that `what` was not tried, because the machine lacks something."""
        self.skipped.append({"what": what, "why": why})
        self.save()

    def note(self, text: str) -> None:
        """Add a sentence for the page."""
        self.notes.append(text)
        self.save()

    @contextmanager
    def item(self, what: str) -> Iterator[None]:
        """Report an exception in the block as the failure of `what`, and continue after it.

        A GPU with too little memory for an item is no failure: the item is skipped.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.skip(what, f"out of memory: {str(error).split(' If ')[0]}")
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            text = str(error).strip().split("\n")[0]
            self.fail(what, f"{type(error).__name__}: {text} ({where})")

    def fail(self, what: str, error: str, log: str = "") -> None:
        """Report that `what` failed, with the end of its output."""
        self.failed.append({"what": what, "error": error} | ({"log": log} if log else {}))
        self.save()

    def save(self) -> None:
        """Write the results so far, atomically."""
        names = ("rows", "skipped", "failed", "notes")
        write_json(self.path, {name: getattr(self, name) for name in names})

    def virtual(self) -> dict[str, dict]:
        """Run the virtual side of this program; return its rows by their "case".

        A failure is reported, and the rows that were found before it are returned.
        """
        path = self.path.with_suffix(".virtual.json")
        card = self.path.with_suffix(".card.json")
        write_json(card, self.card.as_dict())
        command = [sys.executable, sys.argv[0], "--virtual", "--device", self.device.type]
        command += ["--card", card, "--out", path, *(["--quick"] if self.quick else [])]
        # Without CUDA, so that the virtual side is the same on all machines.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        seconds = REHEARSAL_SECONDS if self.quick else VIRTUAL_SECONDS
        code, output = run_limited(command, seconds, environment)
        found = json.loads(path.read_text()) if path.exists() else {"rows": [], "failed": []}
        self.failed += [{**one, "what": f"virtual: {one['what']}"} for one in found["failed"]]
        if code != 0:
            why = "took too long" if code is None else f"ended with exit code {code}"
            self.fail("the virtual side", f"it {why}", last_lines(output))
        return {row["case"]: row for row in found["rows"]}


def main(
    real: Callable[[Section], None], virtual: Callable[[Section], None] | None = None
) -> None:
    """Run a section's program: its real side, or its virtual side with --virtual."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--card", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    card = Card.from_dict(json.loads(args.card.read_text()))
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    section = Section(device, args.quick, card, args.out)
    section.save()
    side = virtual if args.virtual else real
    side(section)
    section.save()
