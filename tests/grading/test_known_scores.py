"""Submissions with known scores: blank, reference, wrong answers and other right ones."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from known import read, surprises, untested

from multigpu.course import LESSONS
from multigpu.exercise.budget import SECONDS
from multigpu.grading import solution
from multigpu.grading.pool import Pool

SLUGS = [lesson.slug for lesson in LESSONS]
# `make test` grades one question's answers, `make test-grading` all.
ALL = "ALL_LESSONS" in os.environ
GRADED = SLUGS if ALL else ["14-memory"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1, SECONDS) as jobs:
        yield jobs


@pytest.mark.slow
@pytest.mark.parametrize("slug", GRADED)
def test_each_answer_has_the_score_it_deserves(slug: str, tmp_path: Path, pool: Pool) -> None:
    answers = [each for each in read(slug) if ALL or each.question == "checkpoint"]
    assert surprises(solution.find(slug), answers, tmp_path, pool) == []


@pytest.mark.parametrize("slug", SLUGS)
def test_without_a_check_a_wrong_answer_passes(slug: str) -> None:
    assert untested(solution.find(slug), read(slug)) == []


@pytest.mark.parametrize("slug", SLUGS)
def test_other_right_answers_are_among_the_known_ones(slug: str) -> None:
    right = {each.question for each in read(slug) if not each.wrong}
    written = [
        q.name for q in solution.find(slug).questions if not q.name.startswith("guess_")
    ]
    assert right >= set(written)
