"""All reports of a grading, in a folder.

gradebook.csv, canvas.csv, moodle.csv    points (gradebook.py)
results.json                             all marks; what regrading compares with
junit.xml                                all checks (junit.py), for the instructor
statistics.txt, statistics.json          per question (question_statistics.py)
similarity.txt, similarity.json          answers that are alike (similarity.py)
feedback/STUDENT.html, feedback/index.csv  for the students; which page is whose (feedback.py)
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from multigpu.errors import UserError
from multigpu.files import atomic, write_json
from multigpu.grading import feedback, question_statistics, similarity
from multigpu.grading.gradebook import canvas, gradebook, moodle
from multigpu.grading.junit import junit
from multigpu.grading.marks import Marked, from_json


def write(
    marks: Sequence[Marked],
    folder: Path,
    lesson: str,
    title: str,
    released: Mapping[str, str],
    assignment: str = "",
) -> list[Path]:
    """Write all reports; returns their paths.

    lesson       such as 05-ddp-cluster
    title        the lesson's, for the pages
    released     each question's answer cell as students got it
    assignment   the column's name in Canvas; the title, if it is empty
    """
    (folder / "feedback").mkdir(parents=True, exist_ok=True)
    alike = similarity.pairs(marks, released)
    texts = {
        # With the byte order mark, Excel reads UTF-8.
        "gradebook.csv": "\ufeff" + gradebook(marks),
        "feedback/index.csv": "\ufeff" + feedback.index(marks),
        "canvas.csv": canvas(marks, assignment or title),
        "moodle.csv": moodle(marks),
        "junit.xml": junit(marks, lesson),
        "statistics.txt": question_statistics.text(marks),
        "similarity.txt": similarity.text(alike),
    }
    written = []
    for name, text in texts.items():
        with atomic(folder / name) as temporary:
            # newline="": a quoted cell keeps its line ends.
            temporary.write_text(text, encoding="utf-8", newline="")
        written.append(folder / name)
    statistics = question_statistics.to_json(marks)
    written.append(write_json(folder / "statistics.json", statistics))
    pairs = [pair.to_json() for pair in alike]
    written.append(write_json(folder / "similarity.json", pairs))
    written.append(write_results(marks, folder / "results.json"))
    return written + feedback.write(marks, folder / "feedback", lesson, title)


def write_results(marks: Sequence[Marked], path: Path) -> Path:
    """Write the marks as JSON."""
    return write_json(path, [one.to_json() for one in marks])


def read_results(path: Path) -> list[Marked]:
    """The marks of a results.json. Raises UserError if it cannot be read."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is no results.json of this version ({error!r}): grade again."
        ) from None
