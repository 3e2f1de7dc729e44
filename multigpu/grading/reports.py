"""All reports of a grading, in a folder; lessons/INSTRUCTORS.md says what each of them is."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from multigpu.errors import UserError
from multigpu.files import atomic, write_json
from multigpu.grading import feedback, question_statistics
from multigpu.grading.csv_cells import table
from multigpu.grading.gradebook import canvas, gradebook, moodle
from multigpu.grading.results import Result
from multigpu.grading.times import Standing

RESULTS = "results.json"


def write(
    results: Sequence[Result],
    absent: Sequence[str],
    folder: Path,
    lesson: str,
    title: str,
    assignment: str,
    secret: str,
) -> None:
    """Write all reports.

    absent       who is on the roster and has handed in nothing
    assignment   the column's name in Canvas
    secret       the key of the pseudonyms in the table of times
    """
    standing = Standing(results, secret)
    feedback.write(results, folder / "feedback", lesson, title, standing)
    texts = {
        # With the byte order mark, Excel reads UTF-8.
        "gradebook.csv": "\ufeff" + gradebook(results, absent),
        "feedback/index.csv": "\ufeff" + feedback.index(results, standing),
        "canvas.csv": canvas(results, assignment),
        "moodle.csv": moodle(results),
        "statistics.txt": question_statistics.text(results),
    }
    if len(standing.rows) > 1:
        texts["times.csv"] = table(standing.rows)
    for name, text in texts.items():
        with atomic(folder / name) as temporary:
            # newline="": a quoted cell keeps its line ends.
            temporary.write_text(text, encoding="utf-8", newline="")
    write_json(folder / RESULTS, [asdict(result) for result in results])


def read_results(path: Path) -> list[Result]:
    """The results of a results.json. Raises UserError if it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if type(data) is not list:
            raise TypeError("expected a list")
        return [Result.from_json(entry) for entry in data]
    except Exception as error:
        raise UserError(
            f"{path} is no results.json of this version ({error!r}): grade again."
        ) from None
