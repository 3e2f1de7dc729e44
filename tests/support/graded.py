"""Made-up results of grading, for the reports."""

from multigpu.grading.results import PartResult, QuestionResult, Result

ANSWER = "def average(values):\n    return sum(values) / len(values)\n"


def question(
    name: str,
    statuses: str,
    hidden: str = "",
    points: float = 2.0,
    **fields: object,
) -> QuestionResult:
    """A question with a check per letter of `statuses` and of `hidden`: r, w, b."""
    words = {"r": "right", "w": "wrong", "b": "blocked"}
    parts = []
    for number, letter in enumerate(statuses + hidden, 1):
        is_hidden = number > len(statuses)
        status = words[letter]
        lines = [] if status == "right" else [f"{name}: line of check {number}"]
        parts.append(PartResult(f"check {number}", points, is_hidden, status, lines))
    fields.setdefault("answer", ANSWER)
    return QuestionResult(name, name.replace("_", " ").capitalize(), parts, **fields)


def result(student: str, *questions: QuestionResult, **fields: object) -> Result:
    """A student's result."""
    return Result(student, f"{student}.ipynb", list(questions), **fields)
