"""Make a lesson's notebooks from its script: `multigpu exercise run LESSON`."""

from multigpu.course import find_root
from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.grading import temporary
from multigpu.grading.grade import Runner
from multigpu.grading.pool import Pool
from multigpu.grading.release import EXERCISE, student_notebook
from multigpu.grading.solution import SOLUTION, Solution, dumps, read, slug_of
from multigpu.notebooks.running import run_script

SCRIPT = "solution.py"


def run(lesson: str) -> Solution:
    """Execute solution.py; write solution.ipynb, and exercise.ipynb for the students.

    Raises CellFailed if a cell fails, and UserError if a check does not pass or the notebook
    cannot be graded with. Then nothing is written.
    """
    root = find_root()
    folder = root / "lessons" / slug_of(lesson)
    script = folder / SCRIPT
    if not script.exists():
        raise UserError(f"there is no {script.relative_to(root)}: write it first.")
    made = folder / f".{SOLUTION}"
    try:
        run_script(script, made, root)
        solution = read(made, folder.name)
        # As for a student: without a secret, hidden checks have the stored inputs.
        with Pool(1, solution.seconds) as pool, temporary.folder() as work:
            Runner(solution, pool, work, "visible", None).check_solution(times=1)
        made.replace(folder / SOLUTION)
    finally:
        made.unlink(missing_ok=True)
    with atomic(folder / EXERCISE) as file:
        file.write_text(dumps(student_notebook(solution)), encoding="utf-8")
    return solution
