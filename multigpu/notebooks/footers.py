"""The links at the end of pages, and the tables of lessons, from multigpu.course.LESSONS.

source.py makes a notebook's last cell.
"""

import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from multigpu.course import LESSONS, Lesson, find_root
from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.notebooks import pairing, source

PAGE_FOOTER = "<!-- footer: written by `multigpu notebooks footers` -->"
TABLE = "<!-- lessons: written by `multigpu notebooks footers` -->"
TABLE_END = "<!-- end of the lessons -->"


def write(root: Path | None = None) -> list[str]:
    """Write all footers and tables; return the files that have changed, relative to the root.

    Notebooks take over the text of their sources (`pairing.update_text`). Raises UserError,
    with all files written, if a notebook cannot, and if a table's place is missing.
    """
    root = root or find_root()
    changed = []
    problems = []
    for path, text in expected(root):
        if path.read_text(encoding="utf-8") != text:
            with atomic(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
            changed.append(str(path.relative_to(root)))
    for stem in sorted(source.stems(root)):
        try:
            pairing.update_text(stem, root)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return changed


def expected(root: Path) -> Iterator[tuple[Path, str]]:
    """Each file that has a footer or a table, and the text that it should have."""
    yield _with_table(root / "README.md", _front_page_table())
    yield _with_table(root / "lessons" / "README.md", _syllabus_table(root))
    for place, lesson in enumerate(LESSONS):
        page = root / "lessons" / lesson.slug / "README.md"
        body = page.read_text(encoding="utf-8").partition(PAGE_FOOTER)[0].rstrip()
        yield page, f"{body}\n\n{PAGE_FOOTER}\n{_page_footer(LESSONS, place)}\n"


def _page_footer(lessons: list[Lesson], place: int) -> str:
    """Links from a page: to the previous page, the syllabus, the notebooks, the next page."""
    lesson = lessons[place]
    links = []
    if place:
        before = lessons[place - 1]
        links.append(f"[← {before.name}](../{before.slug}/README.md)")
    links.append("[syllabus](../README.md)")
    for notebook in lesson.notebooks:
        links.append(f"[notebook {notebook.stem}](../../notebooks/{notebook.stem}.ipynb)")
    if place + 1 < len(lessons):
        after = lessons[place + 1]
        links.append(f"[{after.name} →](../{after.slug}/README.md)")
    return " · ".join(links)


def _front_page_table() -> str:
    """Two lessons a row: the first half of the course at the left, the second at the right."""
    cells = []
    for lesson in LESSONS:
        page = f"[{lesson.title}](lessons/{lesson.slug}/README.md)"
        cells.append(f"{lesson.number} {page}, {lesson.minutes} min")
    rows = -(-len(cells) // 2)
    pairs = zip_longest(cells[:rows], cells[rows:], fillvalue="")
    return "\n".join(["| Lessons | |", "|---|---|", *(f"| {a} | {b} |" for a, b in pairs)])


def _syllabus_table(root: Path) -> str:
    """Each lesson with its notebooks; an exercise is linked if there is one."""
    rows = [
        "| # | Lesson | Time | Stem | Notebook, script, job, exercise |",
        "|---|---|---|---|---|",
    ]
    for lesson in LESSONS:
        for notebook in lesson.notebooks:
            stem = notebook.stem
            files = (
                f"[{notebook.name}](../notebooks/{stem}.ipynb), "
                f"[script](../scripts/{stem}.py), [job](../slurm/{stem}.slurm)"
            )
            if notebook.continued:
                rows.append(f"| | continued: {notebook.continued} | | {stem} | {files} |")
            else:
                page = f"[{lesson.title}]({lesson.slug}/README.md)"
                exercise = f"{lesson.slug}/exercise.ipynb"
                if (root / "lessons" / exercise).exists():
                    files += f", [exercise]({exercise})"
                time = f"{lesson.minutes} min"
                rows.append(f"| {lesson.number} | {page} | {time} | {stem} | {files} |")
    return "\n".join(rows)


def _with_table(path: Path, table: str) -> tuple[Path, str]:
    text = path.read_text(encoding="utf-8")
    if text.count(TABLE) != 1 or text.count(TABLE_END) != 1:
        raise UserError(
            f"{path} has no place for the table of lessons: write the two lines {TABLE} and "
            f"{TABLE_END}."
        )
    place = re.compile(f"{re.escape(TABLE)}.*{re.escape(TABLE_END)}", re.DOTALL)
    return path, place.sub(lambda _: f"{TABLE}\n{table}\n{TABLE_END}", text)
