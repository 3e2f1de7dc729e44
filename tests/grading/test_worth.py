"""Each check is worth its points: no answer without work gets those of any check."""

import os
from pathlib import Path

import pytest
import worthless
from attack import FOLDER
from known import graded, notebook

from multigpu.course import LESSONS
from multigpu.grading import solution
from multigpu.grading.pool import Pool

# `make test` tries the exercise that is attacked, `make test-grading` those of all lessons.
TRIED = [each.slug for each in LESSONS] if "ALL_LESSONS" in os.environ else ["attacks"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("slug", TRIED)
def test_no_answer_without_work_gets_points(slug: str, tmp_path: Path) -> None:
    small = slug == "attacks"
    lesson = solution.read(FOLDER / "solution.ipynb", slug) if small else solution.find(slug)
    tried = worthless.submissions(lesson)
    assert len(tried) > 10
    files = {" / ".join(key): notebook(lesson, answers) for key, answers in tried.items()}
    with Pool(1, lesson.seconds) as pool:
        results = graded(lesson, files, tmp_path, pool)
    assert not any(result.blocked for result in results.values())
    found = [
        f"{name}: {part.title}"
        for name, result in results.items()
        for question in result.questions
        if question.name == name.partition(" / ")[0]
        for part in question.parts
        if part.earned
    ]
    assert found == []
