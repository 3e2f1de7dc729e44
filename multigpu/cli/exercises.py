"""The commands of exercises and grading: exercise, release, grade."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from multigpu.errors import UserError, pluralize, warn
from multigpu.launch.terminal import announce, is_terminal

exercise = typer.Typer(no_args_is_help=True, help="Check your answers, or make exercises.")
Lessons = Annotated[
    list[str], typer.Argument(metavar="LESSON...", help="As in lessons/LESSON, or its number.")
]
Solutions = Annotated[
    Path | None,
    typer.Option(help="A folder with your own solutions, SLUG.ipynb; default: the course's."),
]


@exercise.command("check")
def exercise_check(
    notebook: Annotated[Path, typer.Argument(help="Your notebook, as you would hand it in.")],
) -> None:
    """Run the visible checks on a notebook's answers; exit code 1 if one is wrong."""
    from multigpu.exercise.exercise import PRINTED
    from multigpu.grading import grade as grading

    announce("checking, which takes some seconds")
    results = grading.check_own(notebook)
    for question in results:
        score = "not checked," if question.earned is None else f"{question.earned:g} of"
        print(f"{question.title}: {score} {question.points:g} points")
        for part in question.parts:
            for line in part.lines:
                print(f"    {line}")
        if question.printed:
            print(f"    {PRINTED}")
            print("\n".join(f"        {line}" for line in question.printed.splitlines()))
    if any(question.earned is None for question in results):
        raise UserError("this machine could not run all checks: the lines above say why.")
    earned = sum(question.earned for question in results)
    points = sum(question.points for question in results)
    print(f"{earned:g} of {points:g} points for the visible checks.")
    print("Hidden checks, which try other values, give further points when it is graded.")
    if earned < points:
        raise SystemExit(1)


@exercise.command("run")
def exercise_run(lessons: Lessons) -> None:
    """Execute lessons/LESSON/solution.py; write solution.ipynb and exercise.ipynb."""
    from multigpu.grading import author
    from multigpu.notebooks import CellFailed

    for lesson in lessons:
        started = time.perf_counter()
        try:
            solution = author.run(lesson)
        except CellFailed as error:
            raise UserError(str(error)) from None
        seconds = time.perf_counter() - started
        print(
            f"{solution.lesson}: {pluralize(len(solution.questions), 'question')}, "
            f"{solution.points:g} points, written after {seconds:.0f} s"
        )


def release(
    lessons: Lessons,
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write to.")],
    solutions: Solutions = None,
) -> None:
    """Write the students' notebooks, which have neither solutions nor hidden checks."""
    from multigpu.grading import release, solution

    originals = [solution.find(lesson, solutions) for lesson in lessons]
    for original in originals:
        try:
            path = release.release(original, output)
        except OSError as error:
            raise UserError(f"cannot write to {output}: {error.strerror}.") from None
        print(f"{original.lesson}: {path}")


def grade(
    lesson: Annotated[str, typer.Argument(help="Such as lessons/02-data-parallel, or 02.")],
    submissions: Annotated[
        Path,
        typer.Argument(
            help="A folder of notebooks, nbgrader's submitted, or a zip from Canvas or Moodle."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder of the results.")],
    solutions: Solutions = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="How many submissions at a time; default: one a core.")
    ] = os.cpu_count() or 1,
    roster: Annotated[
        Path | None,
        typer.Option(
            help="Who is in the class: a CSV file with the column student, Canvas's export "
            "of its gradebook, or Moodle's grading worksheet."
        ),
    ] = None,
    assignment: Annotated[
        str,
        typer.Option(help="The assignment's column in Canvas; default: the lesson's title."),
    ] = "",
    regrade: Annotated[
        bool, typer.Option("--regrade", help="Print what has changed since the last run.")
    ] = False,
    gradescope: Annotated[
        Path | None,
        typer.Option(help="Write Gradescope's results.json, for one submission."),
    ] = None,
    unsafe_no_sandbox: Annotated[
        bool,
        typer.Option(
            "--unsafe-no-sandbox", help="Run students' code with all rights of your user."
        ),
    ] = False,
) -> None:
    """Grade what students handed in; write gradebooks, feedback and statistics.

    An interrupted run goes on where it stopped.
    """
    from multigpu.grading import batch

    options = batch.Options(
        lesson,
        submissions,
        output,
        None if unsafe_no_sandbox else _sandbox(),
        jobs,
        solutions,
        roster,
        assignment,
        regrade,
        gradescope,
    )
    if unsafe_no_sandbox:
        warn("no sandbox: a submission can read, change and delete all your files.")
    announce("the solution runs first, unless it has been checked already")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _interrupt)
    with _Progress() as progress:
        try:
            lines = batch.run(options, progress.show)
        except KeyboardInterrupt as error:
            progress.close()
            _say_what_is_kept(progress.done, output)
            number = error.args[0] if error.args else signal.SIGINT
            raise SystemExit(128 + number) from None
    for line in lines:
        print(line)


def _interrupt(number: int, frame: object) -> None:
    """End as Ctrl-C does, whose way out ends all processes and removes temporary files."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def _say_what_is_kept(done: int, output: Path) -> None:
    print(
        f"interrupted: {pluralize(done, 'submission')} graded and kept in {output}; the same "
        f"command goes on from there.",
        file=sys.stderr,
    )


def _sandbox() -> str:
    """The path of bubblewrap. Raises UserError if it does not work here."""
    from multigpu.launch import sandbox

    probe = sandbox.probe()
    if probe.works and probe.program:
        return probe.program
    fix = (
        "lessons/INSTRUCTORS.md says what to do"
        if probe.program
        else "sudo apt-get install bubblewrap"
    )
    raise UserError(
        f"no sandbox, because {probe.problem}: {fix}; --unsafe-no-sandbox runs students' code "
        f"with all rights of your user."
    )


class _Progress:
    """A bar on a terminal, with the time left; in a log, a line for each tenth."""

    def __enter__(self) -> "_Progress":
        from tqdm import tqdm

        self.bar: tqdm | None = None
        self.done = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()

    def show(self, done: int, of: int) -> None:
        """`done` of `of` submissions are graded."""
        from tqdm import tqdm

        self.done = done
        if self.bar is None:
            seconds = 0.1 if is_terminal() else 10.0
            self.bar = tqdm(total=of, initial=done, unit="submission", mininterval=seconds)
        self.bar.update(done - self.bar.n)
