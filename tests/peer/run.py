"""Run Lightning's own tests on this Trainer, and count which pass.

    python tests/peer/run.py FOLDER         all of files.txt; writes benchmarks/peer.json
    python tests/peer/run.py FOLDER FILE…   these files alone; writes nothing

FOLDER is a checkout of Lightning-AI/pytorch-lightning, of the version that is installed here.
shim.py gives its tests this library's names in place of Lightning's. A test that fails is run
again with Lightning itself: if it fails there, too, this machine is the reason. reasons.toml
sorts the other failures; what no entry of it matches is a difference. `make
test-peer FROM=FOLDER` calls this; it is not part of `make test`.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from outcomes import Outcome, classify, read_outcomes, read_reasons, report, table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REPORT = ROOT / "benchmarks" / "peer.json"
# A test that hangs fails after this many seconds.
SECONDS = 40
# Ranks in new processes import Lightning without the shim: these tests say nothing here.
DESELECT = "not spawn and not fork"
# The peer's settings that its tests rely on; rootdir and the rest are those of this run.
SETTINGS = """[pytest]
xfail_strict = true
markers =
    cloud: Run the cloud tests for example
"""


def main() -> None:
    arguments = _arguments()
    checkout = Path(arguments.folder).resolve()
    tests = checkout / "tests" / "tests_pytorch"
    if not (tests / "conftest.py").exists():
        sys.exit(
            f"error: {arguments.folder or 'FROM='} holds no tests/tests_pytorch: expected a "
            f"checkout of Lightning-AI/pytorch-lightning; run make test-peer FROM=FOLDER."
        )
    listed = arguments.files or (HERE / "files.txt").read_text().split()
    missing = [name for name in listed if not (tests / name.partition("::")[0]).exists()]
    if missing:
        sys.exit(f"error: {tests} has no {missing[0]}: give the version that is installed.")
    add_ons = _install_add_ons()
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        run = _Run(Path(folder), checkout, add_ons, arguments.workers)
        outcomes = run.pytest("multigpu", [str(tests / name) for name in listed])
        failed = [outcome.test for outcome in outcomes if outcome.failed]
        again = run.pytest("lightning", [str(checkout / "tests" / test) for test in failed])
    version = importlib.metadata.version("lightning")
    for outcome in again:
        if outcome.failed and "::" not in outcome.test:
            sys.exit(
                f"error: Lightning {version} is installed, and {outcome.test} cannot be "
                f"imported with it: give a checkout of this version."
            )
    of_machine = {outcome.test for outcome in again if outcome.failed}
    classified = classify(outcomes, of_machine, read_reasons(HERE / "reasons.toml"))
    content = {"lightning": version, **report(classified)}
    print(table(classified, content))
    if arguments.report or not arguments.files:
        Path(arguments.report or REPORT).write_text(json.dumps(content, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="a checkout of Lightning-AI/pytorch-lightning")
    parser.add_argument("files", nargs="*", help="test files below tests/tests_pytorch")
    parser.add_argument("--workers", type=int, default=2, help="tests that run at once")
    parser.add_argument("--report", help="the JSON file to write")
    return parser.parse_args()


def _install_add_ons() -> Path:
    """Install the packages that the peer's tests import, once, in a folder of their own."""
    folder = Path(sys.prefix) / "peer"
    required = HERE / "requirements.txt"
    installed = folder / required.name
    if not installed.exists() or installed.read_text() != required.read_text():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade"]
        subprocess.run(
            [*command, "--no-deps", "--target", folder, "--requirement", required], check=True
        )
        installed.write_text(required.read_text())
    return folder


class _Run:
    """Runs pytest on the peer's tests, in a temporary folder that is the working folder."""

    def __init__(self, folder: Path, checkout: Path, add_ons: Path, workers: int):
        self.folder = folder
        self.tests = checkout / "tests"
        self.add_ons = add_ons
        self.workers = workers
        (folder / "pytest.ini").write_text(SETTINGS)

    def pytest(self, library: str, tests: Iterable[str]) -> list[Outcome]:
        """Run `tests` with the names of `library`, and return their outcomes."""
        listed = self.folder / f"{library}.txt"
        listed.write_text("\n".join(tests))
        if not listed.read_text():
            return []
        outcomes = self.folder / library
        working = self.folder / f"{library}-cwd"
        outcomes.mkdir()
        working.mkdir()
        places = [self.add_ons, HERE, self.tests, ROOT, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PEER_LIBRARY": library,
            "PEER_OUTCOMES": str(outcomes),
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, places))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no"]
        command += ["-p", "shim", "-p", "no:cacheprovider", f"--timeout={SECONDS}"]
        command += ["-k", DESELECT]
        command += [f"--numprocesses={self.workers}", "--dist=worksteal"]
        command += ["-c", str(self.folder / "pytest.ini"), f"--rootdir={self.tests}"]
        command += [f"--basetemp={self.folder / library}-tmp", f"@{listed}"]
        log = self.folder / f"{library}.log"
        with log.open("w") as file:
            code = subprocess.run(
                command, cwd=working, env=environment, stdout=file, stderr=subprocess.STDOUT
            ).returncode
        if code not in (0, 1, 5):  # 5: there was nothing to run
            sys.exit(f"{log.read_text()[-4000:]}\nerror: pytest ended with exit code {code}.")
        return read_outcomes(outcomes)


if __name__ == "__main__":
    main()
