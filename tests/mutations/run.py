"""Break the code on purpose, one behaviour at a time; the tests that notice must turn red.

    python tests/mutations/run.py          all of them; writes benchmarks/mutations.json
    python tests/mutations/run.py NAME…    these alone; writes nothing

Each mutation in mutations.toml names a behaviour, the text that makes it so, a text that
breaks it, and tests. It is red if one of its tests fails or runs into the time limit. The
files are copied to a temporary folder and are never changed in place. `make test-mutations`
calls this; it is not part of `make test`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The time limit for the tests of one mutation; an endless loop is red, too.
SECONDS = 900


def copy(folder: Path) -> None:
    """Copy the files that git tracks, and new ones that it does not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def tests_pass(
    folder: Path, tests: list[str], limit: float | None = None, workers: int = 0
) -> tuple[bool, str]:
    """Run the tests in the copy. Returns whether all passed, and pytest's last lines."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        f"--numprocesses={workers}",
        "-rf",
        "-m",
        "",  # those that `make test` leaves out, too
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return False, f"no end within {limit} s"
    if process.returncode not in (0, 1):
        raise SystemExit(f"error: pytest ended with {process.returncode}:\n{output[-2000:]}")
    summary = [line for line in output.splitlines() if line.startswith("FAILED")]
    return process.returncode == 0, (summary or output.splitlines())[-1][:200]


def main() -> None:
    mutations = tomllib.loads((ROOT / "tests/mutations/mutations.toml").read_text())[
        "mutation"
    ]
    if wanted := sys.argv[1:]:
        if unknown := set(wanted) - {mutation["name"] for mutation in mutations}:
            raise SystemExit(f"error: mutations.toml has no {', '.join(sorted(unknown))}")
        mutations = [mutation for mutation in mutations if mutation["name"] in wanted]
    rows, survived = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "repository")
        copy(folder)
        tests = sorted({test for mutation in mutations for test in mutation["tests"]})
        passed, line = tests_pass(folder, tests, workers=3)
        if not passed:
            raise SystemExit(f"error: a test fails without a mutation: {line}")
        for mutation in mutations:
            path = folder / mutation["file"]
            text = path.read_text()
            if text.count(mutation["old"]) != 1:
                found = text.count(mutation["old"])
                raise SystemExit(
                    f"error: {mutation['name']}: "
                    f"its old text is {found} times in {mutation['file']}"
                )
            path.write_text(text.replace(mutation["old"], mutation["new"]))
            began = time.monotonic()
            passed, line = tests_pass(folder, mutation["tests"], SECONDS)
            seconds = time.monotonic() - began
            path.write_text(text)
            verdict = "GREEN: not noticed" if passed else "red"
            print(f"{mutation['name']:40} {verdict:18} {seconds:4.0f} s  {line}", flush=True)
            rows.append({**mutation, "red": not passed, "first failure": line})
            if passed:
                survived.append(mutation["name"])
    if not wanted:
        report = ROOT / "benchmarks" / "mutations.json"
        report.write_text(json.dumps({"mutations": rows}, indent=2) + "\n")
    if survived:
        raise SystemExit(f"error: no test noticed {', '.join(survived)}")


if __name__ == "__main__":
    main()
