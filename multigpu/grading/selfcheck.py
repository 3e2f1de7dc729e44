"""A student's notebook checked by the student: `multigpu exercise check NOTEBOOK`."""

from pathlib import Path

from multigpu.grading import marking, temporary
from multigpu.grading.grade import Runner
from multigpu.grading.marking import Outcome, Task
from multigpu.grading.pool import Pool
from multigpu.grading.results import QuestionResult
from multigpu.grading.solution import read_released
from multigpu.grading.transplant import Answers


def check(path: Path) -> list[QuestionResult]:
    """The results of the visible checks, which the notebook itself has.

    Raises UserError if the notebook cannot be read.
    """
    notebook = read_released(path)
    texts = notebook.answers()
    answers = Answers(texts)
    with (
        Pool(1, notebook.seconds) as pool,
        temporary.folder() as folder,
    ):
        runner = Runner(notebook, pool, folder, "visible", None, own_needs=True)
        found: list[Outcome] = []
        runner.run([Task("notebook", texts)], lambda _, run: found.append(run))
    return marking.question_results(notebook, answers, found[0], texts)
