"""Run `multigpu prove` on public programs, before and after the fix of a bug of theirs.

    python tests/prove/public/run.py FOLDER         all cases; updates benchmarks/prove.json
    python tests/prove/public/run.py FOLDER NAME…   these alone
    … --plain                                       the programs alone, without prove

FOLDER holds checkouts/NAME-before and checkouts/NAME-after, as README.md says. A case that is
not there is left out. The first run installs what the repositories import into
FOLDER/packages/.
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
from pathlib import Path

from cases import CASES, PACKAGES, Case

from multigpu.files import write_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OUTSIDE = ROOT / "tests" / "outside"
REPORT = ROOT / "benchmarks" / "prove.json"
SECONDS = 1200  # a run that hangs is ended after them
BEFORE, AFTER = "before", "after"
# They are of this process's own run.
NOT_PASSED_ON = ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE")

sys.path.append(str(OUTSIDE))
import stand_in  # noqa: E402
from case import replace_texts  # noqa: E402


def main() -> None:
    # So that a run that is ended ends its program, too.
    signal.signal(signal.SIGTERM, lambda *given: sys.exit(143))
    arguments = _arguments()
    folder = Path(arguments.folder).resolve()
    if not (folder / "checkouts").is_dir():
        sys.exit(
            f"error: {arguments.folder} holds no checkouts: expected a folder as "
            "tests/prove/public/README.md describes it."
        )
    cases = _chosen(arguments.names)
    with tempfile.TemporaryDirectory(prefix="prove-") as temporary:
        data = Path(temporary, "data")
        stand_in.make(data)
        for case in cases:
            checkouts = {
                side: folder / "checkouts" / f"{case.name}-{side}" for side in (BEFORE, AFTER)
            }
            if not all(checkout.is_dir() for checkout in checkouts.values()):
                print(f"{case.name:<24} is not in the folder")
                continue
            packages = install(folder / "packages", case.packages)
            sides = {}
            for side, checkout in checkouts.items():
                _check_commit(checkout, case, side)
                working = Path(temporary, f"{case.name}-{side}")
                run = Run(case, checkout, packages, data, working)
                sides[side] = run.plain() if arguments.plain else run.proved()
                print(line(case, side, sides[side]), flush=True)
                shutil.rmtree(working)
            if not arguments.plain:
                # After each case: a run that is stopped keeps what it has.
                update(REPORT, row(case, sides))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="a folder with checkouts/, see README.md")
    parser.add_argument("names", nargs="*", help="cases of cases.py")
    parser.add_argument(
        "--plain", action="store_true", help="run the programs alone, and write nothing"
    )
    return parser.parse_intermixed_args()


def _chosen(names: list[str]) -> list[Case]:
    known = {case.name: case for case in CASES}
    wrong = [name for name in names if name not in known]
    if wrong:
        sys.exit(f"error: there is no case {wrong[0]!r}: the cases are {', '.join(known)}.")
    return [known[name] for name in names] or list(known.values())


def _check_commit(checkout: Path, case: Case, side: str) -> None:
    """Ends the program if the checkout is of another commit than the table's."""
    expected = f"{case.repository} {case.before if side == BEFORE else case.after}"
    path = checkout / "COMMIT"
    found = path.read_text().strip() if path.exists() else "nothing"
    if found != expected:
        sys.exit(f"error: {path} says {found!r}, expected {expected!r}.")


def install(folder: Path, name: str) -> Path:
    """Install a case's packages, once, into a folder of their own."""
    place = folder / name
    if place.exists() or not PACKAGES[name]:
        return place
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    # A folder that holds only a part, after an interrupted run, has another name.
    part = place.with_name(f"{name}.part")
    shutil.rmtree(part, ignore_errors=True)
    subprocess.run([*command, "--target", part, *PACKAGES[name].split()], check=True)
    part.rename(place)
    return place


class Run:
    """One side of a case: the program in a folder of its own."""

    def __init__(self, case: Case, checkout: Path, packages: Path, data: Path, working: Path):
        self.case = case
        self.checkout = checkout
        self.packages = packages
        self.data = data
        self.working = working
        if case.script:
            shutil.copytree(checkout, working)
            replace_texts(working, case.smaller)
            for path, name in case.data.items():
                (working / path).symlink_to(data / name)
        else:
            working.mkdir()

    def proved(self) -> dict:
        """What `multigpu prove` says of it."""
        report = self.working / "proof.json"
        command = ["multigpu", "prove", *self.case.options.split(), "--json", str(report)]
        code, output, seconds = self._start([*command, *self._command()])
        found = json.loads(report.read_text()) if report.exists() else {}
        lines = [text for text in output.splitlines() if text.startswith("proof: ")]
        return {
            "commit": self._commit(),
            "exit": code,
            "verdict": found.get("verdict", "unknown"),
            "line": _without_paths(lines[-1] if lines else _last_line(output)),
            "cause": {
                name: _without_paths(value) if isinstance(value, str) else value
                for name, value in (found.get("cause") or {}).items()
            },
            "seconds": seconds,
        }

    def plain(self) -> dict:
        """How the program itself ends, with its two ranks."""
        options = self.case.options.split()
        virtual = ["multigpu", "virtual", *options] if options else []
        code, output, seconds = self._start([*virtual, *self._command()])
        text = _last_line(output)
        return {"commit": self._commit(), "exit": code, "line": text, "seconds": seconds}

    def _commit(self) -> str:
        return (self.checkout / "COMMIT").read_text().split()[1]

    def _command(self) -> list[str]:
        return self.case.command.replace("{drivers}", str(HERE / "drivers")).split()

    def _start(self, command: list[str]) -> tuple[int, str, float]:
        """Run a command in the program's folder; return its exit code, output and seconds."""
        # A checkout with its packages below src/, as those of Hugging Face have since 2021.
        places = [OUTSIDE / "site", self.checkout, self.checkout / "src", self.packages, ROOT]
        path = [*map(str, places), *filter(None, [os.environ.get("PYTHONPATH")])]
        programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        environment = {
            **{name: text for name, text in os.environ.items() if name not in NOT_PASSED_ON},
            "PATH": os.pathsep.join(programs),
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.working / "hf_home"),
            # transformers 4 would import TensorFlow, where the course has it.
            "USE_TF": "0",
        }
        log = self.working / "output.txt"
        started = time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=self.working,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                code = 124
                file.write(f"\nended after {SECONDS} s\n")
            finally:
                # What is left of its process group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = round(time.monotonic() - started, 1)
        return code, log.read_text(errors="replace"), seconds


def _without_paths(text: str) -> str:
    return re.sub(r"(/[\w.+-]+){2,}/", "…/", text)


def _last_line(output: str) -> str:
    """The last exception of the program, else its last line."""
    lines = [re.sub(r"^\[rank\d+\]: *", "", text.strip()) for text in output.splitlines()]
    lines = [text for text in lines if text]
    errors = [text for text in lines if re.match(r"[\w.]+(Error|Exception)\b", text)]
    errors = [text for text in errors if "ChildFailedError" not in text]
    return ((errors or lines)[-1] if lines else "no output")[:300]


def line(case: Case, side: str, found: dict) -> str:
    """A side's result as text, with what was expected."""
    expected = case.kind if side == BEFORE else case.then
    start = f"{case.name:<24} {side:<6} exit {found['exit']:<3} {found['seconds']:>6} s"
    return f"{start}  {found['line']}\n{'':<24} expected: {expected}"


def row(case: Case, sides: dict[str, dict]) -> dict:
    """The row of benchmarks/prove.json."""
    return {
        "name": case.name,
        "repository": case.repository,
        "issue": {"number": case.issue, "title": case.title},
        "fix": case.fix,
        "command": f"multigpu prove {case.options} {case.command}".replace("  ", " "),
        "reduced": case.reduced,
        "expected": {BEFORE: case.kind, AFTER: case.then},
        **sides,
    }


def update(report: Path, row: dict) -> None:
    """Put the row in the place of that of the same name; other keys of the file stay."""
    found = json.loads(report.read_text()) if report.exists() else {}
    earlier = found.get("public", {}).get("rows", [])
    by_name = {one["name"]: one for one in [*earlier, row]}
    found["public"] = {"rows": [by_name[case.name] for case in CASES if case.name in by_name]}
    write_json(report, found)


if __name__ == "__main__":
    main()
