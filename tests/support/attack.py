"""Attacks on grading: submissions that try to gain points, or to disturb."""

import ctypes
import importlib.util
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from known import notebook, reference

from multigpu.grading import grade
from multigpu.grading.pool import Pool
from multigpu.grading.results import Result
from multigpu.grading.solution import Solution
from multigpu.grading.submissions import Submission
from multigpu.launch import sandbox

FOLDER = Path(__file__).parents[1] / "grading" / "attacks"
PR_SET_CHILD_SUBREAPER = 36
MARK = "mark-of-an-attack"  # in the name and the text of each file that an attack writes

Notebook = dict[str, Any]


@dataclass(frozen=True)
class Attack:
    """A submission.

    name      a few words
    tries     what it would gain or break
    held_by   what stops it
    deserved  its score; all questions that it leaves alone are answered well
    answers   texts of answer cells, in which @NAME@ stands for a text of Target.texts
    change    changes the notebook
    data      makes the file from its text
    """

    name: str
    tries: str
    held_by: str
    deserved: float
    answers: dict[str, str] = field(default_factory=dict)
    change: Callable[[Notebook], None] | None = None
    data: Callable[[str], bytes] | None = None

    def file(self, solution: Solution, texts: dict[str, str]) -> bytes:
        """The file that is handed in."""
        answers = {question: self.text(question, texts) for question in self.answers}
        data = notebook(solution, reference(solution) | answers)
        if self.change is not None:
            made = json.loads(data)
            self.change(made)
            data = json.dumps(made).encode()
        return self.data(data.decode()) if self.data is not None else data

    def text(self, question: str, texts: dict[str, str]) -> str:
        """The answer to a question."""
        text = self.answers[question]
        for name, value in texts.items():
            text = text.replace(f"@{name}@", value)
        return text


def load(files: str = "on_*.py") -> list[Attack]:
    """The attacks of tests/grading/attacks: ATTACKS of each of these files."""
    attacks: list[Attack] = []
    for path in sorted(FOLDER.glob(files)):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        attacks += module.ATTACKS
    assert len({each.name for each in attacks}) == len(attacks), "two have the same name"
    return attacks


def graded(
    solution: Solution, submissions: Sequence[Submission], folder: Path
) -> dict[str, Result]:
    """The results by student, graded in the sandbox by two jobs."""
    program = sandbox.probe().program
    with Pool(2, solution.seconds) as pool:
        results = grade.grade(
            solution, submissions, folder, program, pool, lambda done, of: None
        )
    return {result.student: result for result in results}


@dataclass
class Target:
    """What attacks look for on this machine, and what would show that they found it.

    texts     by name: SECRET, SOLUTION, OTHER, GRADES (paths), PORT, ABSTRACT, CHECKOUT, MARK
    reached   one entry for each connection that was opened from the sandbox
    """

    texts: dict[str, str]
    reached: list[str] = field(default_factory=list)


@contextmanager
def target(folder: Path, solution: Solution) -> Iterator[Target]:
    """A listener on a port, one on an abstract socket, and files that hold secrets."""
    other = folder / "handed-in" / "other.ipynb"
    other.parent.mkdir()
    other.write_text("the submission of another student")
    port = socket.create_server(("127.0.0.1", 0))
    local = socket.socket(socket.AF_UNIX)
    abstract = f"attack-{os.getpid()}"
    local.bind(f"\0{abstract}")
    local.listen()
    made = Target(
        {
            "SECRET": str(folder / "out" / "secret.txt"),
            "SOLUTION": str(solution.path),
            "OTHER": str(other),
            "GRADES": str(folder / "out"),
            "PORT": str(port.getsockname()[1]),
            "ABSTRACT": abstract,
            "CHECKOUT": str(FOLDER.parents[2]),
            "MARK": MARK,
        }
    )

    def listen(server: socket.socket, name: str) -> None:
        while True:
            try:
                server.accept()
            except OSError:
                return
            made.reached.append(name)

    for server, name in ((port, "port"), (local, "abstract socket")):
        threading.Thread(target=listen, args=(server, name), daemon=True).start()
    try:
        yield made
    finally:
        for server in (port, local):
            server.shutdown(socket.SHUT_RDWR)
            server.close()


@contextmanager
def no_process_escapes(left: list[str]) -> Iterator[None]:
    """Note in `left` what the processes started in the block leave running.

    A process whose parent has ended becomes a child of this one.
    """
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
        new = [each for each in me.children(recursive=True) if each.pid not in before]
        # A kernel looks once a second whether its parent has ended.
        _, alive = psutil.wait_procs(new, timeout=10)
        for each in alive:
            if each.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(each.cmdline())[:200] or each.name())
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def marked_files(checkout: Path) -> list[str]:
    """Files with MARK in their names in the folders that an attack may reach, and changes."""
    found = []
    for folder in (
        Path("/tmp"),
        Path("/dev/shm"),
        Path("/dev"),
        Path("/"),
        Path.home(),
        checkout,
    ):
        found += [str(path) for path in folder.glob(f"{MARK}*")]
    found += [str(path) for path in checkout.glob(f"multigpu/**/{MARK}*")]
    return found


def fingerprint(checkout: Path) -> str:
    """What git says of the checkout: changed and new files, ignored ones too."""
    words = ["git", "status", "--porcelain", "--ignored", "--", "multigpu", "lessons", "tests"]
    status = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=True)
    changed = subprocess.run(
        ["git", "diff", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    )
    lines = [line for line in status.stdout.splitlines() if "__pycache__" not in line]
    return "\n".join(lines) + changed.stdout
