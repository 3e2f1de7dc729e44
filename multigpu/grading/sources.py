"""The files of a folder or of a zip: listed and read, never written, no link followed.

Students named these files and made what is in them.
"""

import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from multigpu.errors import UserError
from multigpu.grading.texts import one_line
from multigpu.grading.transplant import MAX_BYTES

LINK = "it is a symbolic link, which is not followed"
SPECIAL = "it is not a regular file"
NO_NAME = "(no name)"
SKIPPED = (".", "__MACOSX", "__pycache__")
MAX_READ = MAX_BYTES + 1  # bytes of a file: one more shows that it is too long
MAX_ENTRIES = 20_000  # in a zip; in a student's folder; and at the top of a folder
MAX_DEPTH = 8  # folders within folders
DEEP = f"was ignored: it is more than {MAX_DEPTH} folders deep"
# What is in a folder: the names that lead to it, from the top, and itself.
Entry = tuple[tuple[bytes, ...], os.DirEntry[bytes]]


@dataclass(frozen=True)
class File:
    """A file that was found.

    parts      its path below what was given
    size       bytes, as the folder or the zip says
    modified   seconds; only to be compared, as a zip does not say the time zone
    problem    why it is not read; "" if it can be
    """

    parts: tuple[str, ...]
    size: int
    modified: float
    problem: str
    open_bytes: Callable[[int], bytes] = field(repr=False)

    @property
    def path(self) -> str:
        return "/".join(self.parts)

    def read(self) -> tuple[bytes, str]:
        """At most MAX_READ bytes, and the problem, "" if there is none. Never raises."""
        if self.problem:
            return b"", self.problem
        try:
            return self.open_bytes(MAX_READ), ""
        except Exception as error:
            # zipfile: a password is needed, an unknown version, a damaged header
            return b"", f"it cannot be read: {getattr(error, 'strerror', None) or error}"


# All files, in the order of their paths, and what is to be said about others.
Files = tuple[list[File], list[str]]


@contextmanager
def opened(path: Path) -> Iterator[Files]:
    """The files of a folder or a zip, which can be read within the block.

    Raises UserError if it is neither, or has more entries than the limit.
    """
    if path.is_dir():
        yield _of_folder(path)
    elif path.is_file() and path.suffix.lower() == ".ipynb":
        raise UserError(
            f"{path} is one notebook: put it into a folder, and give the folder; the file's "
            f"name is the student's."
        )
    elif path.is_file():
        try:
            archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            # UnicodeDecodeError, a ValueError, for a name that is not in its encoding
            raise UserError(
                f"{path} cannot be read as a zip ({error}): give the zip of the learning "
                f"platform as it was downloaded, or a folder."
            ) from None
        with archive:
            yield _of_zip(archive, path)
    else:
        raise UserError(
            f"there is no folder and no zip {path}: give what the students handed in."
        )


def _of_folder(path: Path) -> Files:
    files: list[File] = []
    notes: list[str] = []
    root = os.path.realpath(os.fsencode(path))

    def note(names: tuple[bytes, ...], text: str) -> None:
        notes.append(f"{'/'.join(map(_readable, names))} {text}")

    def listed(names: tuple[bytes, ...]) -> list[Entry]:
        """What is in a folder, by name; nothing if it cannot be read."""
        try:
            with os.scandir(os.path.join(root, *names)) as entries:
                several = sorted(
                    islice(entries, MAX_ENTRIES + 1), key=lambda entry: entry.name
                )
        except OSError as error:
            if not names:
                raise UserError(f"{path} cannot be read: {error.strerror}.") from None
            note(names, f"was ignored: {error.strerror}")
            return []
        if len(several) > MAX_ENTRIES and not names:
            raise UserError(
                f"{path} has more than {MAX_ENTRIES:,} entries: give the folder that holds "
                f"the submissions alone."
            )
        skipped = tuple(map(os.fsencode, SKIPPED))
        kept = [entry for entry in several if not entry.name.startswith(skipped)]
        return [((*names, entry.name), entry) for entry in kept]

    def below(names: tuple[bytes, ...]) -> Iterator[Entry]:
        for entry_names, entry in listed(names):
            yield entry_names, entry
            if entry.is_dir(follow_symlinks=False):
                if len(entry_names) <= MAX_DEPTH:
                    yield from below(entry_names)
                else:
                    note(entry_names, DEEP)

    # Each student's folder has a limit of its own: one student cannot hide the others.
    students: list[Entry] = []
    for names, entry in listed(()):
        is_submitted = entry.name == b"submitted" and entry.is_dir(follow_symlinks=False)
        students += listed(names) if is_submitted else [(names, entry)]
    for names, entry in students:
        contents = [(names, entry)]
        if entry.is_dir(follow_symlinks=False):
            contents = list(islice(below(names), MAX_ENTRIES + 1))
        if len(contents) > MAX_ENTRIES:
            note(names, f"has more than {MAX_ENTRIES:,} files: not all were read")
        for entry_names, item in contents:
            if item.is_dir(follow_symlinks=False):
                continue
            try:
                files.append(_in_folder(item, entry_names))
            except OSError as error:
                note(entry_names, f"was ignored: {error.strerror}")
    return sorted(files, key=lambda file: file.parts), notes


def _in_folder(entry: os.DirEntry[bytes], names: tuple[bytes, ...]) -> File:
    status = entry.stat(follow_symlinks=False)

    def read(most: int) -> bytes:
        # O_NONBLOCK: to open a FIFO would wait for its writer.
        with open(
            os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb"
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(SPECIAL)
            # A part of the path can have become a link since it was listed.
            if os.readlink(b"/proc/self/fd/%d" % file.fileno()) != entry.path:
                raise ValueError(LINK)
            return file.read(most)

    problem = "" if stat.S_ISREG(status.st_mode) else SPECIAL
    if entry.is_symlink():
        problem = LINK
    parts = tuple(map(_readable, names))
    return File(parts, status.st_size, status.st_mtime, problem, read)


def _of_zip(archive: zipfile.ZipFile, path: Path) -> Files:
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise UserError(
            f"{path} has {len(entries):,} entries, more than {MAX_ENTRIES:,}: unpack it "
            f"and give the folder."
        )
    files: list[File] = []
    notes: list[str] = []
    for entry in entries:
        name = _zip_name(entry)
        raw = name.replace("\\", "/")
        parts = tuple(
            _readable(part.encode()) for part in raw.split("/") if part not in ("", ".")
        )
        if raw.startswith("/") or ".." in parts or raw[1:2] == ":" or not parts:
            notes.append(f"{one_line(name)} was ignored: its path leads out of the zip")
        elif raw.endswith("/") or any(part.startswith(SKIPPED) for part in parts):
            continue
        elif len(parts) > MAX_DEPTH + 1:
            notes.append(f"{'/'.join(parts)} {DEEP}")
        else:
            files.append(_in_zip(archive, entry, parts))
    # Stable: of two entries with one name, the second is the later one.
    return sorted(files, key=lambda file: file.parts), notes


def _in_zip(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, parts: tuple[str, ...]) -> File:
    mode = entry.external_attr >> 16
    problem = ""
    if stat.S_ISLNK(mode):
        problem = LINK
    elif stat.S_IFMT(mode) and not stat.S_ISREG(mode):
        problem = SPECIAL
    elif entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        problem = f"its compression (method {entry.compress_type}) is not read here"

    def read(most: int) -> bytes:
        with archive.open(entry) as file:
            return file.read(most)

    modified = 0.0
    with suppress(ValueError):
        modified = datetime(*entry.date_time, tzinfo=UTC).timestamp()
    return File(parts, entry.file_size, modified, problem, read)


def _zip_name(entry: zipfile.ZipInfo) -> str:
    """The name. Many programs write UTF-8 and do not set the flag that says so."""
    if entry.flag_bits & 0x800:
        return entry.filename
    try:
        return entry.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return entry.filename


def _readable(name: bytes) -> str:
    """The name as text, whatever the locale is; bytes that are not UTF-8 as \\xe9."""
    return one_line(name.decode("utf-8", "backslashreplace")) or NO_NAME
