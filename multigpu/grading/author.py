"""Make a lesson's notebooks from its script: `multigpu exercise run LESSON`.

lessons/SLUG/solution.py is the source. Executed, it is solution.ipynb; without solutions and
hidden checks, that is exercise.ipynb.
"""

from multigpu.course import find_root
from multigpu.errors import UserError
from multigpu.exercise.exercise import PRINTED
from multigpu.files import atomic
from multigpu.grading.release import EXERCISE, student_notebook
from multigpu.grading.solution import SOLUTION, Solution, dumps, read, slug_of
from multigpu.notebooks.running import run_script

SCRIPT = "solution.py"


def lessons() -> list[str]:
    """The slugs of all lessons that have an exercise."""
    return sorted(path.parent.name for path in find_root().glob(f"lessons/*/{SCRIPT}"))


def run(lesson: str) -> Solution:
    """Execute the script, and write both notebooks.

    Raises CellFailed if a cell fails, and UserError if a check does not pass or the notebook
    cannot be graded with. Then nothing is written.
    """
    root = find_root()
    folder = root / "lessons" / slug_of(lesson)
    script = folder / SCRIPT
    if not script.exists():
        raise UserError(f"there is no {script.relative_to(root)}: write it first.")
    temporary = folder / f".{SOLUTION}"
    try:
        run_script(script, temporary, root)
        solution = read(temporary, folder.name)
        _check_verdicts(solution)
        temporary.replace(folder / SOLUTION)
    finally:
        temporary.unlink(missing_ok=True)
    with atomic(folder / EXERCISE) as file:
        file.write_text(dumps(student_notebook(solution)), encoding="utf-8")
    return solution


def _check_verdicts(solution: Solution) -> None:
    for question in solution.questions:
        for part in question.parts:
            lines = printed(solution, part.cell)
            wrong = [line for line in lines if not line.startswith("right: ")]
            if PRINTED in wrong:
                raise UserError(
                    f"In [{part.number}], {part.title!r}: the solution's answer prints text, "
                    f"which is not a verdict: take the print out."
                )
            if wrong or not lines:
                raise UserError(
                    f"In [{part.number}], {part.title!r}: the solution does not pass its own "
                    f"check: {wrong[0] if wrong else 'it made no statement'}."
                )


def printed(solution: Solution, cell: int) -> list[str]:
    """The lines that a cell's stored output has."""
    outputs = solution.notebook.cells[cell].outputs
    return "".join(output.get("text", "") for output in outputs).splitlines()
