"""Whose a file is: the names that Canvas, Moodle and nbgrader give, and plain folders.

Canvas   `doejane_LATE_12345_67890_Name.ipynb`: sortable name, user, upload (canvas-lms,
         lib/content_zipper.rb). A later upload has a higher number; Canvas appends -1, -2 to a
         name that the student has used before. Anonymous: `anon_x7Ky2_67890_Name.ipynb`.
Moodle   `Jane Doe_12345_assignsubmission_file/Name.ipynb`, before version 4 with `file_`; or
         `Jane Doe_12345_assignsubmission_file_Name.ipynb`, if "Download submissions in
         folders" is off (mod/assign/classes/downloader.php).
nbgrader STUDENT/ASSIGNMENT/Name.ipynb in `submitted`, as in any folder of students.

A student chooses Name, so a file has the form that most notebooks have, or none.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from multigpu.grading.results import Account
from multigpu.grading.sources import NO_NAME, File

# The platform's part is at the left; the student's own may look like it, and follows.
CANVAS = re.compile(
    r"(?:LATE_)?"
    r"(?:(?P<anon>anon_[0-9A-Za-z]+)|(?P<user>.*?)_(?:(?:LATE|late)_)?(?P<id>\d+))"
    r"_(?:(?P<upload>\d+)_(?P<name>.+)|(?P<page>(?:text|link)\.html))",
    re.DOTALL,
)
MOODLE = re.compile(
    r"(?P<user>.*?)_(?P<id>\d+)_assignsubmission_(?P<kind>file|onlinetext)_?(?P<name>.*)",
    re.DOTALL,
)
# A path below the folder of the submissions, and its file.
Below = tuple[tuple[str, ...], File]


@dataclass(frozen=True)
class HandedIn:
    """A file and whose it is.

    student   the key: a folder's or a file's name, or `Jane Doe (Moodle 12345)`
    name      the student's own name of the file
    upload    the platform's number, higher for a later upload; 0 if it gives none
    account   the student's on the platform; None for another source
    """

    student: str
    name: str
    file: File
    upload: int = 0
    account: Account | None = None


def whose(files: list[File], path: Path) -> tuple[list[HandedIn], list[str]]:
    """Each file with its student, and notes on files that are nobody's."""
    below = _without_wrapper([(file.parts, file) for file in files], path)
    form = _form([parts for parts, _ in below])
    handed_in = []
    notes = []
    for parts, file in below:
        entry = form(parts, file) or _plain(parts, file)
        if entry is None:
            notes.append(f"{file.path} was ignored: {file.problem or 'it is not a notebook'}")
        else:
            handed_in.append(entry)
    return handed_in, notes


def _form(below: list[tuple[str, ...]]) -> Callable[[tuple[str, ...], File], HandedIn | None]:
    """How the platform of most notebooks names them: _moodle, _canvas or _plain."""
    counts = Counter()
    for parts in below:
        canvas = CANVAS.fullmatch(parts[0]) if len(parts) == 1 else None
        moodle = MOODLE.fullmatch(parts[0])
        # A name of one platform can go on in the form of the other. -1: Canvas, anonymous.
        if moodle and (canvas is None or moodle.start("id") <= canvas.start("id")):
            counts[_moodle] += is_notebook(parts[-1])
        elif canvas:
            counts[_canvas] += is_notebook(parts[-1])
        else:
            counts[_plain] += is_notebook(parts[-1])
    return max((_plain, _moodle, _canvas), key=lambda form: counts[form])


def _without_wrapper(below: list[Below], path: Path) -> list[Below]:
    """The paths without the folder that all are in, unless it is a student's.

    Programs that make and unpack zips add a folder of the zip's name. In a zip, a folder with
    several notebooks holds students, too.
    """
    tops = {parts[0] for parts, _ in below}
    inside = [(parts[1:], file) for parts, file in below if len(parts) > 1]
    top = tops.pop() if len(tops) == 1 else ""
    if not top or MOODLE.fullmatch(top) or len(inside) < len(below):
        return below
    is_zip = not path.is_dir()
    named = path.stem if is_zip else path.resolve().name
    same_name = top in ("submitted", re.sub(r" ?\(\d+\)$", "", named))
    notebooks = sum(is_notebook(parts[-1]) for parts, _ in below)
    return inside if same_name or (is_zip and notebooks > 1) else below


def is_notebook(name: str) -> bool:
    return name.lower().endswith(".ipynb")


def _moodle(parts: tuple[str, ...], file: File) -> HandedIn | None:
    # Only the first part is Moodle's; what is in the folder is the student's own.
    match = MOODLE.fullmatch(parts[0])
    if match is None:
        return None
    student = f"{match['user']} (Moodle {match['id']})"
    name = "/".join(parts[1:]) or match["name"] or parts[0]
    return HandedIn(student, name, file, account=Account("Moodle", match["id"]))


def _canvas(parts: tuple[str, ...], file: File) -> HandedIn | None:
    match = CANVAS.fullmatch(parts[-1]) if len(parts) == 1 else None
    if match is None:
        return None
    number = match["id"] or match["anon"]
    student = f"{match['user'] or 'anonymous'} (Canvas {number})"
    upload = int((match["upload"] or "0")[:30])
    name = match["name"] or match["page"]
    return HandedIn(student, name, file, upload, Account("Canvas", number))


def _plain(parts: tuple[str, ...], file: File) -> HandedIn | None:
    """STUDENT.ipynb, or any file in the folder STUDENT."""
    if len(parts) > 1:
        return HandedIn(_without_account(parts[0]), "/".join(parts[1:]), file)
    if is_notebook(parts[0]):
        student = parts[0][: -len(".ipynb")].strip() or NO_NAME
        return HandedIn(_without_account(student), parts[0], file)
    return None


def _without_account(student: str) -> str:
    """The name, which must not look like the key of a platform's student."""
    return re.sub(r"\((Canvas|Moodle) (\w+)\)", r"[\1 \2]", student)
