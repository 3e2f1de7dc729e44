"""A page of feedback per student: one HTML file that loads nothing and runs nothing.

Of a hidden check it has the title and the verdict, never its lines. All text is escaped.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from multigpu.files import atomic
from multigpu.grading.csv_cells import number, table
from multigpu.grading.feedback_style import STYLE
from multigpu.grading.results import PartResult, QuestionResult, Result
from multigpu.grading.texts import visible, without_colours
from multigpu.grading.times import Standing

HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
# The browser ignores all scripts and all styles but the one with this hash.
POLICY = f"default-src 'none'; style-src 'sha256-{HASH}'; base-uri 'none'; form-action 'none'"
VERDICTS = {"right": "✓ right", "wrong": "✗ wrong", "blocked": "– not graded"}
NO_ANSWER = "✗ no answer"
GENERATOR = '<meta name="generator" content="multigpu grade">'
SAFE = re.compile(r"[a-z0-9_-]{1,64}")


def write(
    results: Sequence[Result], folder: Path, lesson: str, title: str, standing: Standing
) -> None:
    """Write a page per student into the folder; delete those of students who are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {page_name(result.student): result for result in results}
    for name, result in pages.items():
        with atomic(folder / name) as temporary:
            text = page(result, lesson, title, standing)
            temporary.write_text(text, encoding="utf-8")
    for path in folder.glob("*.html"):
        if path.name not in pages and GENERATOR in path.read_text(errors="replace"):
            path.unlink()


def index(results: Sequence[Result], standing: Standing) -> str:
    """CSV: each student, the file of the page, and the pseudonym."""
    names = [result.student for result in results]
    rows = [(name, page_name(name), standing.pseudonym(name)) for name in names]
    return table([("student", "page", "pseudonym"), *rows])


def page_name(student: str) -> str:
    """The page's file name: a login as it is; other names cleaned, with a hash.

    Two students never have one name, also where case does not count. The ~ is in no login that
    stays as it is, so no login can be another student's cleaned name.
    """
    if SAFE.fullmatch(student):
        return f"{student}.html"
    cleaned = re.sub(r"[^A-Za-z0-9_-]+", "-", student).strip("-")[:48]
    digest = hashlib.sha256(student.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{cleaned or 'student'}~{digest}.html"


def page(result: Result, lesson: str, title: str, standing: Standing) -> str:
    """The page's HTML."""
    body = [
        "<header>",
        f"<h1>{_text(title)}</h1>",
        f'<span class="score">{_score(result.earned, result.points)}</span>',
        "</header>",
        f'<p class="student"><bdi>{_text(result.student)}</bdi> · {_text(lesson)}</p>',
    ]
    if result.blocked:
        body.append(_note("The machine could not grade all of this: it will be graded again."))
    if result.problem:
        body.append(
            _note(
                f"Your file could not be graded: {result.problem}. Ask your "
                f"instructor whether you can hand it in again."
            )
        )
    body += [_note(note.text) for note in result.notes]
    for question in result.questions:
        body += _question(question, standing.text(result.student, question))
    if any(part.hidden for question in result.questions for part in question.parts):
        body.append(
            "<footer>A hidden check is one that your notebook does not have: "
            "other shapes, other seeds.</footer>"
        )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            GENERATOR,
            f"<title>{_text(title)}: {_text(result.student)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            *body,
            "</body>",
            "</html>",
            "",
        ]
    )


def _question(question: QuestionResult, standing: str) -> list[str]:
    lines = [
        "<section>",
        f'<div class="head"><h2>{_heading(question.title)}</h2>'
        f'<span class="score">{_score(question.earned, question.points)}</span></div>',
    ]
    lines += [_note(note) for note in question.notes]
    lines += [_note(standing)] if standing else []
    lines += ["<ul>", *(_check(part, question.blank) for part in question.parts), "</ul>"]
    for heading, text in (("Your answer", question.answer), ("It printed", question.printed)):
        if text.strip():
            lines += [f"<h3>{heading}</h3>", _pre(text)]
    return [*lines, "</section>"]


def _check(part: PartResult, is_blank: bool) -> str:
    no_answer = is_blank and part.status == "wrong"
    verdict = NO_ANSWER if no_answer else VERDICTS[part.status]
    hidden = ' <span class="tag">hidden</span>' if part.hidden else ""
    line = (
        f'<li><div class="check"><span class="verdict {part.status}">'
        f"{verdict}</span>"
        f'<span class="title">{_text(part.title)}{hidden}</span>'
        f'<span class="score">{_score(part.earned, part.points)}</span></div>'
    )
    if part.lines and part.status != "blocked" and not part.hidden and not no_answer:
        line += _pre("\n".join(part.lines))
    return f"{line}</li>"


def _score(earned: float | None, points: float) -> str:
    return f"{number(earned) or '–'} / {number(points)}"


def _heading(text: str) -> str:
    """A heading's HTML, in which Markdown's `name` is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text))


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>'


def _pre(text: str) -> str:
    # A browser drops the first newline in <pre>.
    return f'<pre dir="ltr">\n{_text(text)}</pre>'


def _text(text: str) -> str:
    return escape(visible(without_colours(text)))
