"""The commands of exercises and grading: exercise, release."""

import time
from pathlib import Path
from typing import Annotated

import typer

from multigpu.errors import UserError, pluralize
from multigpu.terminal import announce

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
    from multigpu.grading import selfcheck

    announce("checking, which takes some seconds")
    results = selfcheck.check(notebook)
    for question in results:
        print(f"{question.title}: {question.earned:g} of {question.points:g} points")
        for part in question.parts:
            for line in part.lines:
                print(f"    {line}")
        if question.printed:
            print("    Your code printed:")
            print("\n".join(f"        {line}" for line in question.printed.splitlines()))
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
    """Write the students' notebooks, and a zip of each for a learning platform.

    They have neither solutions nor hidden checks.
    """
    from multigpu.grading import release, solution

    found = [solution.find(lesson, solutions) for lesson in lessons]
    for each in found:
        try:
            paths = release.release(each, output)
        except OSError as error:
            raise UserError(f"cannot write to {output}: {error.strerror}.") from None
        print(f"{each.lesson}: {', '.join(str(path) for path in paths)}")
