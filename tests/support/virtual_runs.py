"""Run programs under `multigpu virtual`, as forks of the warm process."""

import json
import subprocess
from pathlib import Path
from typing import Any

import warm
from commands import clean_environment

TORCHRUN = ("torchrun", "--standalone", "--local-addr=127.0.0.1")
# The test run hides real GPUs with the same variable.
VISIBLE = ",".join(map(str, range(8)))


def start(folder: Path, *words: object, real: bool = False, **environment: object):
    """Start `multigpu virtual words…` in `folder`, in a session of its own, as a Popen.

    Standard output and the report are in .stdout. With `real` Python really starts.
    """
    multigpu = ["multigpu"] if real else [warm.python(), "-m", "multigpu.cli"]
    command = [*multigpu, "virtual", *words]
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=clean_environment(**{"CUDA_VISIBLE_DEVICES": VISIBLE, **environment}),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def virtual(
    folder: Path, *words: object, stdin: str = "", timeout: float = 120, **more: Any
) -> subprocess.CompletedProcess:
    """Run `multigpu virtual words…` in `folder` to its end; .stdout has the report, too."""
    with start(folder, *words, **more) as process:
        try:
            text, _ = process.communicate(stdin, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, text)


def reported(folder: Path, *words: object, **more: Any) -> tuple[str, dict]:
    """What a run prints, and its report as numbers (--json n.json); it must succeed."""
    done = virtual(folder, "--json", "n.json", *words, **more)
    assert done.returncode == 0, done.stdout
    return done.stdout, json.loads((folder / "n.json").read_text())


def write(folder: Path, program: str, name: str = "program.py") -> str:
    """Write a program into the folder; return its name."""
    (folder / name).write_text(program)
    return name
