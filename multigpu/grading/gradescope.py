"""results.json of Gradescope's autograder, which grades one submission in a container.

https://gradescope-autograders.readthedocs.io/en/latest/specs/
"""

from typing import Any

from multigpu.grading.results import PartResult, QuestionResult, Result
from multigpu.grading.texts import visible


def results(result: Result) -> dict[str, Any]:
    """A dict for json.dump. Students see a hidden check when the grades are published.

    They never see the lines of a hidden check, which could have its inputs. A blocked
    submission has no score, and so Gradescope says that the autograder failed.
    """
    said = [result.problem, *(note.text for note in result.notes)]
    report: dict[str, Any] = {"output": visible("\n".join(filter(None, said)))}
    if result.blocked:
        return report
    tests = [_test(question, part) for question in result.questions for part in question.parts]
    return report | {"score": result.earned, "tests": tests}


def _test(question: QuestionResult, part: PartResult) -> dict[str, Any]:
    return {
        "name": f"{question.name}: {part.title}",
        "score": part.earned,
        "max_score": part.points,
        "status": "passed" if part.status == "right" else "failed",
        "output": "" if part.hidden else visible("\n".join(part.lines)),
        "visibility": "after_published" if part.hidden else "visible",
    }
