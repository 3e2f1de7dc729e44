"""Grading through nbval: scores, order, jobs, interruptions, and refusals."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import small_exercise
from known import graded, notebook, reference

from multigpu.cli import exercises
from multigpu.errors import UserError
from multigpu.exercise import budget
from multigpu.grading import batch, grade, marking, temporary
from multigpu.grading.marking import Outcome
from multigpu.grading.pool import Pool
from multigpu.grading.submissions import Submission
from multigpu.launch import sandbox

pytestmark = pytest.mark.slow
RIGHT = small_exercise.RIGHT
WARNS = "import sys, warnings\nwarnings.warn('old')\nprint('x', file=sys.stderr)\n"
PARTLY = RIGHT["mean"].replace("dist.get_world_size()", "2")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1, 5) as jobs:
        yield jobs


@pytest.fixture
def small(tmp_path):
    (tmp_path / "solutions").mkdir()
    return small_exercise.solution(tmp_path / "solutions")


def points(result) -> list[float]:
    return [question.earned for question in result.questions]


def test_scores_do_not_depend_on_order_or_jobs(small, tmp_path, pool):
    submissions = {
        "reference": notebook(small, reference(small)),
        "blank": notebook(small, {}),
        "partly": notebook(small, RIGHT | {"mean": PARTLY}),
        "other words": notebook(small, RIGHT),
        "warns": notebook(small, RIGHT | {"mean": WARNS + RIGHT["mean"]}),
        "raises": notebook(small, RIGHT | {"twice": "def twice(tensor):\n    return 1 / 0"}),
        "damaged": b'{"cells": [',
    }
    backwards = dict(reversed(submissions.items()))
    some = {name: submissions[name] for name in ("raises", "partly", "reference")}

    one = graded(small, submissions, tmp_path / "one", pool)
    with Pool(2, 5) as two_jobs:
        two = graded(small, some, tmp_path / "two", two_jobs)

    assert {name: points(result) for name, result in one.items()} == {
        "reference": [4, 3, 2],
        "blank": [0, 0, 0],
        # The question that needs `mean` is graded with the solution's.
        "partly": [1, 3, 2],
        "other words": [4, 3, 2],
        "warns": [4, 3, 2],
        "raises": [4, 0, 2],
        "damaged": [0, 0, 0],
    }
    # Hidden checks draw other numbers for each secret.
    for name, result in two.items():
        assert points(result) == points(one[name])
    again = graded(small, backwards, tmp_path / "one", pool)
    assert again == one
    assert one["damaged"].problem
    assert "ZeroDivisionError" in " ".join(one["raises"].questions[1].parts[0].lines)
    assert one["warns"].questions[0].printed.count("old") >= 1


class Interrupt(Exception):
    pass


def test_an_interrupted_run_goes_on_where_it_stopped(small, tmp_path, pool):
    answers = [RIGHT | {"guess_bytes": f"guess_bytes = {n}"} for n in range(4)]
    given = [Submission(f"s{n}", "", notebook(small, each)) for n, each in enumerate(answers)]
    where = (tmp_path / "out", sandbox.probe().program, pool)

    def stop(done: int, of: int) -> None:
        if done == 2:
            raise Interrupt

    with pytest.raises(Interrupt):
        grade.grade(small, given, *where, stop)

    seen: list[int] = []
    results = grade.grade(small, given, *where, lambda done, of: seen.append(done))
    assert seen == [2, 3, 4]
    assert [points(result) for result in results] == [[4, 3, 0]] * 4


def test_a_solution_that_does_not_reproduce_grades_nobody(small, tmp_path, pool):
    cells = small_exercise.cells()
    for cell in cells:
        cell.source = cell.source.replace("4 * 1000", "8 * 1000")
    small = replace(small, notebook=replace_cells(small.notebook, cells))

    with pytest.raises(UserError) as caught:
        graded(small, {"a": notebook(small, RIGHT)}, tmp_path / "out", pool)

    for word in ("In [", "1,000 floats", "stored 'right: 4 bytes each'", "expected 8000"):
        assert word in str(caught.value)
    assert not list((tmp_path / "out").glob("outcomes/*"))


def replace_cells(original, cells):
    copy = type(original)(original)
    copy.cells = cells
    return copy


def test_what_the_machine_could_not_grade_is_blocked_not_zero(small, tmp_path, monkeypatch):
    class DeadJob:
        def __init__(self, seconds):
            pass

        def run(self, path):
            if not path.name.startswith("solution"):
                return None
            data = json.loads(path.read_text())
            parts = [cell["metadata"].get("part") for cell in data["cells"]]
            return [{"part": part, "status": "right", "lines": []} for part in parts]

        def close(self, now=False):
            pass

    monkeypatch.setattr("multigpu.grading.pool.Job", DeadJob)
    answers = {"mean": RIGHT["mean"], "guess_bytes": RIGHT["guess_bytes"]}
    result = graded(small, {"a": notebook(small, answers)}, tmp_path / "out")["a"]

    assert result.blocked
    statuses = [[part.status for part in question.parts] for question in result.questions]
    assert statuses == [["blocked", "blocked"], ["wrong"], ["blocked"]]
    assert not list((tmp_path / "out").glob("outcomes/*")), "it is tried again next time"


def test_a_job_that_cannot_be_started_ends_the_run(tmp_path, monkeypatch):
    def no_space(seconds):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multigpu.grading.pool.Job", no_space)
    said: list[str] = []

    def work() -> None:
        with Pool(2, 5) as jobs, pytest.raises(UserError) as caught:
            list(jobs.run([(name, tmp_path / name) for name in "abc"]))
        said.append(str(caught.value))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert "No space left on device" in "".join(said)


def test_a_stored_outcome_that_is_damaged_is_made_again(small, tmp_path, pool):
    submissions = {"a": notebook(small, {"guess_bytes": "guess_bytes = 4000"})}
    first = graded(small, submissions, tmp_path / "out", pool)
    for path in (tmp_path / "out" / grade.CACHE).iterdir():
        path.write_text("{")

    assert graded(small, submissions, tmp_path / "out", pool)["a"] == first["a"]


@pytest.mark.parametrize(
    ("by_nbval", "by_record", "stored", "expected"),
    [
        ("right", True, True, "right"),
        ("right", False, True, "wrong"),
        ("wrong", True, True, "wrong"),
        ("wrong", True, False, "right"),
        ("blocked", True, False, "blocked"),
    ],
)
def test_a_status_needs_the_record(tmp_path, by_nbval, by_record, stored, expected):
    """nbval compares text, which a student's text could be made to equal."""
    said = {"question": "mean", "title": "t", "right": by_record}
    record = tmp_path / "record.json"
    record.write_text(json.dumps([said | {"starved": False, "printed": "", "seconds": None}]))
    cells = [{"part": ["mean", "t"], "status": by_nbval, "lines": ["right: it is"]}]
    found = marking.outcome(cells, record, stored)
    assert found.parts == {"mean": {"t": [expected, ["right: it is"]]}}


def test_what_had_no_core_runs_again_alone(small, tmp_path, monkeypatch):
    """The second run of b is right; its first one was late while a ran."""
    runs = []

    class Jobs:
        jobs = 2

        def run(self, tasks):
            runs.append([id for id, _ in tasks])
            yield from ((id, []) for id, _ in tasks)

    outcomes = {
        "a": [Outcome()],
        "b": [Outcome(starved=True), Outcome(printed={"mean": "again"})],
        "c": [Outcome(problem="the job ended"), Outcome(problem="the job ended")],
    }
    monkeypatch.setattr(grade.Runner, "_record", lambda runner, id: Path(id))
    monkeypatch.setattr(
        marking, "outcome", lambda cells, path, stored: outcomes[str(path)].pop(0)
    )
    runner = grade.Runner(small, Jobs(), tmp_path, "secret", None)
    found = dict(runner.run({id: {} for id in outcomes}))

    assert runs == [["a", "b", "c"], ["b"], ["c"]]
    assert found["b"].printed and not found["b"].starved
    assert found["c"].blocked


def test_an_exercise_says_how_long_a_check_may_take(small):
    assert small.seconds == 5
    setup = next(cell for cell in small.notebook.cells if cell.source.startswith("# setup"))
    setup.source = setup.source.replace(", seconds=5", "")
    assert small.seconds == budget.SECONDS


# ---- the whole command ----------------------------------------------------------------------


@pytest.fixture
def class_of_three(small, tmp_path) -> Path:
    folder = tmp_path / "handed in"
    folder.mkdir()
    (folder / "anna.ipynb").write_bytes(notebook(small, RIGHT))
    (folder / "ben.ipynb").write_bytes(notebook(small, RIGHT | {"mean": PARTLY}))
    (folder / "carl.ipynb").write_bytes(notebook(small, {}))
    return folder


def options(class_of_three: Path, tmp_path: Path, **more) -> batch.Options:
    defaults = {"solutions": tmp_path / "solutions", "jobs": 2}
    program = sandbox.probe().program
    return batch.Options(
        lesson="05",
        handed_in=class_of_three,
        output=tmp_path / "out",
        sandbox=program,
        **(defaults | more),
    )


def totals(folder: Path) -> dict[str, str]:
    import csv

    with open(folder / "gradebook.csv", encoding="utf-8-sig", newline="") as file:
        return {row["student"]: row["total"] for row in csv.DictReader(file)}


@pytest.fixture
def run(pool, monkeypatch):
    """Run the command's work in the jobs that run already."""
    monkeypatch.setattr(batch, "Pool", lambda jobs, seconds: nullcontext(pool))
    return lambda given: batch.run(given, lambda done, of: None)


def test_all_reports_and_a_regrading(class_of_three, tmp_path, small, run, monkeypatch):
    given = options(class_of_three, tmp_path)
    with pytest.raises(UserError, match="without --regrade first"):
        run(replace(given, regrade=True))

    run(given)

    assert totals(given.output) == {"anna": "9", "ben": "6", "carl": "0"}
    for name in ("canvas.csv", "moodle.csv", "results.json", "feedback/ben.html"):
        assert (given.output / name).stat().st_size
    page = (given.output / "feedback" / "ben.html").read_text()
    assert "other sizes" in page and "values differ" not in page, "hidden lines stay hidden"

    new = RIGHT | {"mean": RIGHT["mean"] + "\n# carl"}
    (class_of_three / "carl.ipynb").write_bytes(notebook(small, new))
    checks = []
    monkeypatch.setattr(grade.Runner, "check_solution", lambda *_, times: checks.append(times))
    lines = run(replace(given, regrade=True))
    assert not checks, "the solution has been checked already"
    assert any("carl" in line for line in lines)
    assert not any("ben" in line for line in lines)
    assert sorted(totals(given.output).values()) == ["6", "9", "9"]


def test_only_the_owner_can_read_the_results(class_of_three, tmp_path, run):
    given = options(class_of_three, tmp_path)
    run(given)

    assert stat.S_IMODE(given.output.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["handed_in", "solutions", "output"])
def test_what_the_sandbox_shows_is_refused(class_of_three, tmp_path, run, monkeypatch, name):
    given = options(class_of_three, tmp_path)
    path = getattr(given, name)
    monkeypatch.setattr(sandbox, "shown", lambda: [path])

    with pytest.raises(UserError, match="students' code could read"):
        run(given)
    assert not given.output.exists()


def test_bad_input_changes_nothing(class_of_three, tmp_path, run):
    given = options(class_of_three, tmp_path)
    (tmp_path / "empty").mkdir()
    for wrong, words in (
        (replace(given, lesson="77"), "no lesson"),
        (replace(given, handed_in=tmp_path / "empty"), "no notebook"),
        (replace(given, handed_in=tmp_path / "missing"), "missing"),
        (replace(given, roster=tmp_path / "missing"), "cannot be read"),
        (replace(given, solutions=tmp_path / "empty"), "no solution"),
    ):
        with pytest.raises(UserError, match=words):
            run(wrong)
    assert not given.output.exists()


def test_without_a_sandbox_the_command_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sandbox, "probe", lambda: sandbox.Sandbox(None, "it is not installed"))

    with pytest.raises(UserError) as caught:
        exercises._sandbox()

    for word in ("not installed", "apt-get install bubblewrap", "--unsafe-no-sandbox"):
        assert word in str(caught.value)


ENDLESS = "def mean(tensor):\n    while True: pass"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process_and_no_file(class_of_three, tmp_path, small, number):
    for name in ("dora", "emil"):
        (class_of_three / f"{name}.ipynb").write_bytes(notebook(small, {"mean": ENDLESS}))
    left = tmp_path / "tmp"
    left.mkdir()
    command = ["-m", "multigpu.cli", "grade", "05", class_of_three, "-o", tmp_path / "out"]
    command += ["--solutions", tmp_path / "solutions", "--jobs", "2"]
    words = [str(word) for word in (sys.executable, *command)]
    with subprocess.Popen(words, env=os.environ | {"TMPDIR": str(left)}) as grader:
        wait_for(lambda: list(left.glob("grading-*/*.ipynb")) and in_sandbox(grader.pid))
        family = psutil.Process(grader.pid).children(recursive=True)
        grader.send_signal(number)
    assert len(family) > 4
    wait_for(lambda: not any(each.is_running() for each in family), "processes are left")
    answers = list(left.glob("grading-*/*.ipynb"))
    if number == signal.SIGKILL:
        assert answers, "a killed run removes nothing"
    else:
        assert grader.returncode == 128 + number
        assert not answers
    # A kernel that was starting can leave its own settings; the next run removes them, too.
    for path in left.iterdir():
        os.utime(path, (1, 1))
    with patch("tempfile.tempdir", str(left)), temporary.folder():
        pass
    assert not list(left.glob("grading-*"))


def in_sandbox(pid: int) -> bool:
    """Whether a student's process runs, under the process of a grading."""
    return sum("fork_server" in " ".join(each.cmdline()) for each in descendants(pid)) > 2


def descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def wait_for(condition: Callable[[], object], problem: str = "waited in vain") -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, problem
        time.sleep(0.2)


def test_what_is_run_leaves_blank_answers_out(small):
    from multigpu.grading.transplant import take

    answers = take(notebook(small, {"mean": RIGHT["mean"]}), small)

    assert set(marking.to_run(small, answers)) == {"mean"}


@pytest.fixture(autouse=True)
def has_sandbox() -> Iterator[None]:
    if not sandbox.probe().works:
        pytest.skip(sandbox.probe().problem)
    yield
