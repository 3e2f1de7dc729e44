"""Answers with known scores: which checks of their question must be wrong."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from multigpu import sandbox
from multigpu.grading import grade, release
from multigpu.grading import solution as solutions
from multigpu.grading.pool import Pool
from multigpu.grading.results import Result
from multigpu.grading.solution import Solution, dumps
from multigpu.grading.submissions import Submission


@dataclass(frozen=True)
class Known:
    """An answer to one question.

    name    what is right or wrong about it, a few words
    source  the text of the answer cell
    wrong   the titles of the checks that must be wrong; all others must be right
    """

    name: str
    question: str
    source: str
    wrong: tuple[str, ...] = ()


def changed(source: str, *changes: tuple[str, str]) -> str:
    """The source with texts replaced, each of which is in it once."""
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def solved(lesson: str, question: str) -> str:
    """The course's solution of a question, without what a student has to mend."""
    source = answer_cell(lesson, question)
    begin, end, *_ = solutions.MARK.finditer(source)
    if begin[0].startswith("#"):
        return f"# answer: {question}{source[begin.end() : end.start()]}"
    return solutions.MARK.sub("", source)


def broken(lesson: str, question: str) -> str:
    """The program that a student has to mend, with a change that mends nothing.

    Without a change it would count as no answer.
    """
    source = answer_cell(lesson, question)
    begin = solutions.MARK.search(source)
    assert begin[0].startswith("#"), f"{question} has no program that is to be mended"
    return f"{source[: begin.start()].rstrip()}\n\npass\n"


@cache
def answer_cell(lesson: str, question: str) -> str:
    """The text of a question's answer cell in the lesson's solution."""
    solution = solutions.find(lesson)
    (found,) = (each for each in solution.questions if each.name == question)
    return solution.answer(found)


def notebook(solution: Solution, answers: dict[str, str]) -> bytes:
    """The released notebook with these answers."""
    made = release.student_notebook(solution)
    for cell in made.cells:
        if cell.metadata.get("grade_id") in answers:
            cell.source = answers[cell.metadata["grade_id"]]
    return dumps(made).encode()


def reference(solution: Solution) -> dict[str, str]:
    """The solution's answers."""
    return {question.name: solution.answer(question) for question in solution.questions}


def graded(
    solution: Solution, submissions: dict[str, bytes], folder: Path, pool: Pool | None = None
) -> dict[str, Result]:
    """The results by student, graded in the sandbox, or beside it where there is none.

    pool   jobs that are in use for several gradings; None for one new job
    """
    found = sandbox.probe()
    settings = grade.Settings(folder, found.program if found.works else None, 1)
    given = [Submission(name, f"{name}.ipynb", data) for name, data in submissions.items()]
    results = grade.grade(solution, given, settings, lambda done, of: None, pool)
    return {result.student: result for result in results}


def surprises(
    solution: Solution, known: Sequence[Known], folder: Path, pool: Pool | None = None
) -> list[str]:
    """What differs from the known scores, one sentence each.

    Graded are a blank notebook, the reference, and each known answer alone.
    """
    right = reference(solution)
    submissions = {"blank": notebook(solution, {}), "reference": notebook(solution, right)}
    for each in known:
        submissions[each.name] = notebook(solution, {each.question: each.source})
    assert len(submissions) == len(known) + 2, "two known answers have the same name"
    results = graded(solution, submissions, folder, pool)
    found = []
    if results["blank"].earned:
        found.append(f"a blank notebook earns {results['blank'].earned:g} points")
    found += _differences("reference", results["reference"], {})
    for each in known:
        found += _differences(each.name, results[each.name], {each.question: each.wrong})
    return found


def _differences(
    name: str, result: Result, wrong: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """What differs from the checks that must be wrong, by question; no question means all."""
    for question in result.questions:
        if wrong and question.name not in wrong:
            continue
        for part in question.parts:
            expected = "wrong" if part.title in wrong.get(question.name, ()) else "right"
            if part.status != expected:
                yield (
                    f"{name}: {question.name}, {part.title!r} is {part.status}, "
                    f"expected {expected}: {json.dumps(part.lines)}"
                )


def untested(solution: Solution, known: Sequence[Known]) -> list[str]:
    """Checks that no known wrong answer fails, and hidden ones that catch nothing alone.

    Take such a check away, and every wrong answer still gets the score it deserves: the check
    tests nothing.
    """
    found = []
    for question in solution.questions:
        for part in question.parts:
            caught = [
                k for k in known if k.question == question.name and part.title in k.wrong
            ]
            alone = [each for each in caught if each.wrong == (part.title,)]
            if not caught or (part.hidden and not alone):
                found.append(f"{question.name}: {part.title!r}")
    return found
