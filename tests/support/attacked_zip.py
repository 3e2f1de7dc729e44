"""A zip and a folder of submissions in which entries attack the one who reads them."""

import os
import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path

from attack import MARK

BOMB = 256 << 20  # bytes, of 256 KB in the zip
FILE = "attacks.ipynb"


@dataclass(frozen=True)
class Entry:
    """An entry.

    student   whose score is looked at; "" if the entry must not be anybody's
    deserved  the score
    """

    name: str
    tries: str
    held_by: str
    student: str
    deserved: float


# By the attack's name: the folder in the zip.
NAMES = {
    "a formula as a name": '=HYPERLINK("example.org","10")',
    "a formula with a minus": "-2+3",
    "a formula with an at sign": "@SUM(A1)",
    "HTML as a name": "<img src=x onerror=alert(1)>",
    "quotes in a name": 'o\'brien, "x",10',
    "line ends in a name": "eve\r\nanna,10",
    "a name from right to left": "\u202eannA",
    "a name of 200 characters": "n" * 200,
}
# A student's key has no control characters.
KEYS = {"eve\r\nanna,10": r"eve\x0aanna,10", "\u202eannA": r"\u202eannA"}
WRITTEN = "reports quote and escape names; a formula is written as text"
NOT_UNPACKED = "a zip is not unpacked: its entries are read, and nothing is written"
ENTRIES = [
    *(
        Entry(name, "to change a report", WRITTEN, KEYS.get(text, text), 10)
        for name, text in NAMES.items()
    ),
    Entry("a symlink in the zip", "the solution's text", NOT_UNPACKED, "link", 0),
    Entry(".. in the zip", "a file outside", NOT_UNPACKED, "", 0),
    Entry("an absolute path in the zip", "a file outside", NOT_UNPACKED, "", 0),
    Entry("a zip bomb", "256 MB from 256 KB", "at most 8 MiB are read of a file", "bomb", 0),
    Entry(
        "an entry twice",
        "two submissions",
        "one of them counts, and a note says so",
        "two",
        10,
    ),
]
FOLDER_ENTRIES = [
    Entry(
        "a symlink in the folder", "the solution's text", "links are not followed", "link", 0
    ),
    Entry(
        "a folder that is a symlink", "the solution's text", "links are not followed", "", 0
    ),
    Entry("a pipe in the folder", "to let the reader wait", "only files are read", "pipe", 0),
    Entry(
        "a device in the folder", "to read without end", "links are not followed", "zero", 0
    ),
]


def write_zip(path: Path, honest: dict[str, bytes], right: bytes, solution: Path) -> Path:
    """The zip: honest submissions by student, and the entries of ENTRIES.

    right   a notebook that deserves all points
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for student, data in honest.items():
            archive.writestr(f"{student}/{FILE}", data)
        for text in NAMES.values():
            archive.writestr(f"{text}/{FILE}", right)
        link = zipfile.ZipInfo(f"link/{FILE}")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, str(solution))
        archive.writestr(f"../{MARK}/{FILE}", right)
        archive.writestr(f"/tmp/{MARK}/{FILE}", right)
        with archive.open(f"bomb/{FILE}", "w", force_zip64=True) as file:
            for _ in range(BOMB >> 24):
                file.write(b" " * (1 << 24))
        archive.writestr(f"two/{FILE}", right)
        archive.writestr(f"two/{FILE[:-6]} (1).ipynb", right)
    return path


def write_folder(path: Path, honest: dict[str, bytes], solution: Path) -> Path:
    """The folder: honest submissions by student, and the entries of FOLDER_ENTRIES."""
    for student, data in honest.items():
        (path / student).mkdir(parents=True)
        (path / student / FILE).write_bytes(data)
    for name in ("link", "pipe", "zero"):
        (path / name).mkdir()
    (path / "link" / FILE).symlink_to(solution)
    (path / "linked").symlink_to(solution.parent)
    os.mkfifo(path / "pipe" / FILE)
    (path / "zero" / FILE).symlink_to("/dev/zero")
    return path
