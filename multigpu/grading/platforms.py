"""Whose a file is: the names that Canvas, Moodle and nbgrader give, and plain folders.

Canvas   `doejane_LATE_12345_67890_Name.ipynb`: sortable name, user, upload (canvas-lms,
         lib/content_zipper.rb). A later upload has a higher number; Canvas appends -1, -2 to a
         name that the student has used before. Anonymous: `anon_x7Ky2_67890_Name.ipynb`.
Moodle   `Jane Doe_12345_assignsubmission_file/Name.ipynb`, before version 4 with `file_`; or
         `Jane Doe_12345_assignsubmission_file_Name.ipynb`, if "Download submissions in
         folders" is off (mod/assign/classes/downloader.php).
nbgrader `submitted/STUDENT/ASSIGNMENT/Name.ipynb`.

A student chooses Name, so a file has the form that most notebooks have, or none.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from multigpu.errors import UserError, pluralize
from multigpu.grading.results import Account
from multigpu.grading.sources import NO_NAME, File

# The platform's part is at the left; the student's own may look like it, and follows.
CANVAS = re.compile(
    r"(?:(?P<late2>LATE)_)?"
    r"(?:(?P<anon>anon_[0-9A-Za-z]+)|(?P<user>.*?)_(?:(?P<late>LATE|late)_)?(?P<id>\d+))"
    r"_(?:(?P<upload>\d+)_(?P<name>.+)|(?P<page>(?:text|link)\.html))",
    re.DOTALL,
)
MOODLE = re.compile(
    r"(?P<user>.*?)_(?P<id>\d+)_assignsubmission_(?P<kind>file|onlinetext)_?(?P<name>.*)",
    re.DOTALL,
)
# The folders that nbgrader makes beside `submitted`; they may hold notebooks.
NBGRADER = ("submitted", "source", "release", "autograded", "feedback")
# A path below the folder of the submissions, and its file.
Below = tuple[tuple[str, ...], File]


@dataclass(frozen=True)
class HandedIn:
    """A file and whose it is.

    student   the key: a folder's or a file's name, or `Jane Doe (Moodle 12345)`
    name      the student's own name of the file
    upload    the platform's number, higher for a later upload; 0 if it gives none
    late      whether Canvas marks it as late
    account   the student's on the platform; None for another source
    """

    student: str
    name: str
    file: File
    upload: int = 0
    late: bool = False
    account: Account | None = None

    @property
    def shown(self) -> str:
        """The student's own name of the file, with the platform's number, if it gives one."""
        return f"{self.name} (upload {self.upload})" if self.upload else self.name

    @property
    def is_notebook(self) -> bool:
        return _is_notebook(self.name)


def whose(files: list[File], path: Path, lesson: str) -> tuple[list[HandedIn], list[str]]:
    """Each file with its student, and notes on files that are nobody's."""
    below = _without_wrapper([(file.parts, file) for file in files], path)
    submitted = [(parts, file) for parts, file in below if parts[0] == "submitted"]
    submitted = _inside(submitted, "submitted") or []
    if _is_nbgrader(submitted, lesson, named=True):
        found, notes = _nbgrader(submitted, path, lesson)
        return found, notes + _beside(below)
    if _is_nbgrader(below, lesson, named=path.resolve().name == "submitted"):
        return _nbgrader(below, path, lesson)
    form = _form([parts for parts, _ in below])
    found = []
    notes = []
    for parts, file in below:
        one = form(parts, file) or _plain(parts, file)
        if one is None:
            notes.append(f"{file.path} was ignored: {file.problem or 'it is not a notebook'}")
        else:
            found.append(one)
    return found, notes


def _form(below: list[tuple[str, ...]]) -> Callable[[tuple[str, ...], File], HandedIn | None]:
    """How the platform of most notebooks names them: _moodle, _canvas or _plain."""
    counts = Counter()
    for parts in below:
        canvas = CANVAS.fullmatch(parts[0]) if len(parts) == 1 else None
        moodle = MOODLE.fullmatch(parts[0])
        # A name of one platform can go on in the form of the other.
        if moodle and (canvas is None or moodle.start("id") <= _number_at(canvas)):
            counts[_moodle] += _is_notebook(parts[-1])
        elif canvas:
            counts[_canvas] += _is_notebook(parts[-1])
        else:
            counts[_plain] += _is_notebook(parts[-1])
    return max((_plain, _moodle, _canvas), key=lambda form: counts[form])


def _number_at(canvas: re.Match[str]) -> int:
    return canvas.start("anon" if canvas["anon"] else "id")


def _without_wrapper(below: list[Below], path: Path) -> list[Below]:
    """The paths without the folder that all are in, unless it is a student's.

    Programs that make and unpack zips add a folder of the zip's name. In a zip, a folder with
    several notebooks holds students, too.
    """
    tops = {parts[0] for parts, _ in below}
    top = tops.pop() if len(tops) == 1 else "submitted"
    if top == "submitted" or MOODLE.fullmatch(top):
        return below
    notebooks = sum(_is_notebook(parts[-1]) for parts, _ in below)
    is_zip = not path.is_dir()
    same_name = top == re.sub(r" ?\(\d+\)$", "", path.stem if is_zip else path.resolve().name)
    return (_inside(below, top) or below) if same_name or (is_zip and notebooks > 1) else below


def _is_notebook(name: str) -> bool:
    return name.lower().endswith(".ipynb")


def _inside(below: list[Below], folder: str) -> list[Below] | None:
    """The paths within a folder, if all are; None if not."""
    if not below or any(len(parts) < 2 or parts[0] != folder for parts, _ in below):
        return None
    return [(parts[1:], file) for parts, file in below]


def _is_nbgrader(below: list[Below], lesson: str, named: bool) -> bool:
    """Whether these are STUDENT/ASSIGNMENT/…: no notebook is higher.

    So a student whose own folder looks like this does not change how the others' are read.
    """
    notebooks = [parts for parts, _ in below if _is_notebook(parts[-1])]
    deep = bool(notebooks) and all(len(parts) >= 3 for parts in notebooks)
    marked = any(
        len(parts) >= 3 and (parts[1] == lesson or parts[2:] == ("timestamp.txt",))
        for parts, _ in below
    )
    return deep and (named or marked)


def _beside(below: list[Below]) -> list[str]:
    """Notes on the notebooks beside `submitted`, those of nbgrader's own folders aside."""
    counts = Counter(parts[0] for parts, _ in below if _is_notebook(parts[-1]))
    return [
        f"{name} ({pluralize(count, 'notebook')}) was ignored: it is beside the folder "
        f"submitted; give the folder of the submissions alone"
        for name, count in counts.items()
        if name not in NBGRADER
    ]


def _nbgrader(below: list[Below], path: Path, lesson: str) -> tuple[list[HandedIn], list[str]]:
    """The files STUDENT/ASSIGNMENT/… of the lesson's assignment, and notes on the others."""
    inside = [(parts, file) for parts, file in below if len(parts) >= 3]
    assignments = {parts[1] for parts, _ in inside}
    if len(assignments) > 1 and lesson not in assignments:
        raise UserError(
            f"{path} has the assignments {', '.join(sorted(assignments))}, and none is called "
            f"{lesson}: give the students' folders of one assignment."
        )
    wanted = lesson if lesson in assignments else next(iter(assignments), "")
    students = {parts[0] for parts, _ in below if len(parts) > 1}
    inside = [(parts, file) for parts, file in inside if parts[1] == wanted]
    without = sorted(students - {parts[0] for parts, _ in inside})
    notes = [f"{name} handed in nothing in a folder {wanted}" for name in without]
    found = [
        HandedIn(parts[0], "/".join(parts[2:]), file)
        for parts, file in inside
        if parts[2:] != ("timestamp.txt",)
    ]
    return found, notes


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
    late = bool(match["late"] or match["late2"])
    upload = int((match["upload"] or "0")[:30])
    name = match["name"] or match["page"]
    return HandedIn(student, name, file, upload, late, Account("Canvas", number))


def _plain(parts: tuple[str, ...], file: File) -> HandedIn | None:
    """STUDENT.ipynb, or any file in the folder STUDENT."""
    if len(parts) > 1:
        return HandedIn(_without_account(parts[0]), "/".join(parts[1:]), file)
    if _is_notebook(parts[0]):
        student = parts[0][: -len(".ipynb")].strip() or NO_NAME
        return HandedIn(_without_account(student), parts[0], file)
    return None


def _without_account(student: str) -> str:
    """The name, which must not look like the key of a platform's student."""
    return re.sub(r"\((Canvas|Moodle) (\w+)\)", r"[\1 \2]", student)
