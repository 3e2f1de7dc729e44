"""Answers with known scores: which checks of their question must be wrong.

tests/grading/known/lessonNN.txt has those of a lesson, one after the other:

    === QUESTION: what is right or wrong about it
    wrong: TITLE; TITLE
    like: NAME
    - lines of the answer that it is like
    + lines in their place

`wrong:` names the checks that must be wrong, `all`, or `all but TITLE`; without it all must be
right. The answer follows, whole or as changes. `like:` names an answer above it, or `given`,
the program that a student has to mend; without it, changes are of the lesson's solution.
Docstrings, comments and empty lines of what is changed are left out before.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from multigpu.grading import grade, release
from multigpu.grading import solution as solutions
from multigpu.grading.pool import Pool
from multigpu.grading.results import Result
from multigpu.grading.solution import Solution, dumps
from multigpu.grading.submissions import Submission
from multigpu.launch import sandbox

FOLDER = Path(__file__).parents[1] / "grading" / "known"


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


def read(lesson: str) -> list[Known]:
    """The known answers of a lesson."""
    text = (FOLDER / f"lesson{lesson[:2]}.txt").read_text(encoding="utf-8")
    titles = {
        question.name: [part.title for part in question.parts]
        for question in solutions.find(lesson).questions
    }
    found: dict[tuple[str, str], Known] = {}
    for record in text.split("\n=== ")[1:]:
        head, *lines = record.rstrip().split("\n")
        question, _, name = head.partition(": ")
        fields = {"wrong": "", "like": "solution"}
        while (key := lines[0].partition(": ")[0]) in fields:
            fields[key] = lines.pop(0).partition(": ")[2]
        if lines[0][:2] in ("- ", "+ "):
            base = _base(lesson, question, fields["like"], found)
            lines = _changed(base, lines, f"lesson {lesson[:2]}, {head}")
        source = "\n".join([f"# answer: {question}", *lines])
        wrong = _titles(fields["wrong"], titles[question])
        assert (question, name) not in found, f"two answers of lesson {lesson[:2]}: {head}"
        found[question, name] = Known(name, question, source, wrong)
    return list(found.values())


def _titles(words: str, titles: list[str]) -> tuple[str, ...]:
    """The titles that the line `wrong:` names."""
    if words.startswith("all"):
        return tuple(title for title in titles if title != words.removeprefix("all but "))
    wrong = tuple(words.split("; ")) if words else ()
    assert set(wrong) <= set(titles), f"expected checks of {titles}, got {wrong}"
    return wrong


def _base(lesson: str, question: str, like: str, found: Mapping) -> list[str]:
    """The lines that are changed, without docstrings, comments and empty lines."""
    if like not in ("solution", "given"):
        source = found[question, like].source
    else:
        source = answer_cell(lesson, question)
        mends = (begin := solutions.MARK.search(source))[0].startswith("#")
        if like == "given":
            assert mends, f"{question} has no program that is to be mended"
            source = source[: begin.start()]
        elif mends:
            source = source[begin.end() : list(solutions.MARK.finditer(source))[1].start()]
        else:
            source = solutions.MARK.sub("", source)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    numbered = enumerate(source.split("\n"), 1)
    lines = [line for number, line in numbered if number not in docstrings]
    return [line for line in lines if line.strip() and not line.strip().startswith("#")]


def _changed(base: list[str], changes: list[str], where: str) -> list[str]:
    """The lines with each run of `-` lines replaced by the `+` lines after it, in order.

    A run must be once in the lines that follow the change before it.
    """
    made, rest = [], base
    while changes:
        old, new = [], []
        while changes and changes[0].startswith("- "):
            old.append(changes.pop(0)[2:])
        while changes and changes[0].startswith("+ "):
            new.append(changes.pop(0)[2:])
        places = [at for at in range(len(rest)) if rest[at : at + len(old)] == old]
        assert old and len(places) == 1, f"{where}: {len(places)} times in {rest}: {old}"
        made += rest[: places[0]] + new
        rest = rest[places[0] + len(old) :]
    return made + rest


@cache
def answer_cell(lesson: str, question: str) -> str:
    """The text of a question's answer cell in the lesson's solution."""
    solution = solutions.find(lesson)
    (found,) = (each for each in solution.questions if each.name == question)
    return found.answer


def notebook(solution: Solution, answers: dict[str, str]) -> bytes:
    """The released notebook with these answers."""
    made = release.student_notebook(solution)
    for cell in made.cells:
        if cell.metadata.get("grade_id") in answers:
            cell.source = answers[cell.metadata["grade_id"]]
    return dumps(made).encode()


def reference(solution: Solution) -> dict[str, str]:
    """The solution's answers."""
    return {question.name: question.answer for question in solution.questions}


def graded(
    solution: Solution, submissions: dict[str, bytes], folder: Path, pool: Pool | None = None
) -> dict[str, Result]:
    """The results by student, graded in the sandbox, or beside it where there is none.

    pool   jobs that are in use for several gradings; None for one new job
    """
    found = sandbox.probe()
    program = found.program if found.works else None
    given = [Submission(name, f"{name}.ipynb", data) for name, data in submissions.items()]
    with nullcontext(pool) if pool else Pool(1, solution.seconds) as jobs:
        results = grade.grade(solution, given, folder, program, jobs, lambda done, of: None)
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
        name = f"{each.question}: {each.name}"
        submissions[name] = notebook(solution, {each.question: each.source})
    results = graded(solution, submissions, folder, pool)
    found = []
    if results["blank"].earned:
        found.append(f"a blank notebook earns {results['blank'].earned:g} points")
    found += _differences("reference", results["reference"], {})
    for each in known:
        name = f"{each.question}: {each.name}"
        found += _differences(name, results[name], {each.question: each.wrong})
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
