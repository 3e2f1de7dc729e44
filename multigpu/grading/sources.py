"""The files of a folder or of a zip: listed and read, never written, no link followed.

Students named these files and made what is in them.
"""

import os
import stat
import zipfile
import zlib
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


@dataclass(frozen=True)
class Limits:
    """How much is read.

    file_bytes    of one file: one byte more shows that it is too long
    entries       in a zip; in a student's folder; and at the top of a folder
    ratio         bytes of a file in a zip, per byte of the zip, if longer than file_bytes
    depth         folders within folders
    """

    file_bytes: int = MAX_BYTES + 1
    total_bytes: int = 2 << 30
    entries: int = 20_000
    ratio: float = 200.0
    depth: int = 8


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

    def read(self, most: int) -> tuple[bytes, str]:
        """At most so many bytes, and the problem, "" if there is none. Never raises."""
        if self.problem:
            return b"", self.problem
        try:
            return self.open_bytes(most), ""
        except (
            OSError,
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            RuntimeError,
            ValueError,
        ) as e:
            # zipfile: a password is needed, an unknown version, a damaged header
            return b"", f"it cannot be read: {getattr(e, 'strerror', None) or e}"


@dataclass
class Files:
    """All files, in the order of their paths, and what is to be said about others."""

    files: list[File] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@contextmanager
def opened(path: Path, limits: Limits) -> Iterator[Files]:
    """The files of a folder or a zip, which can be read within the block.

    Raises UserError if it is neither, or has more entries than the limit.
    """
    if path.is_dir():
        yield _of_folder(path, limits)
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
            yield _of_zip(archive, path, limits)
    else:
        raise UserError(
            f"there is no folder and no zip {path}: give what the students handed in."
        )


def _of_folder(path: Path, limits: Limits) -> Files:
    found = Files()
    root = os.path.realpath(os.fsencode(path))

    def note(names: tuple[bytes, ...], text: str) -> None:
        found.notes.append(f"{'/'.join(map(_readable, names))} {text}")

    def enter(names: tuple[bytes, ...], left: int) -> int:
        """List the folder; returns how many entries are still allowed."""
        if len(names) > limits.depth:
            note(names, f"was ignored: it is more than {limits.depth} folders deep")
            return left
        # Each student's folder has a limit of its own: one student cannot hide the others.
        own_limit = len(names) <= (2 if names[:1] == (b"submitted",) else 1)
        allowed = limits.entries if own_limit else left
        try:
            with os.scandir(os.path.join(root, *names)) as entries:
                listed = sorted(islice(entries, allowed + 1), key=lambda each: each.name)
        except OSError as error:
            if not names:
                raise UserError(f"{path} cannot be read: {error.strerror}.") from None
            note(names, f"was ignored: {error.strerror}")
            return left
        if len(listed) > allowed:
            if not names:
                raise UserError(
                    f"{path} has more than {allowed:,} entries: give the folder that holds "
                    f"the submissions alone."
                )
            note(names, f"has more than {limits.entries:,} files: not all were read")
        listed = listed[:allowed]
        allowed -= len(listed)
        for entry in listed:
            below = (*names, entry.name)
            if entry.name.startswith(tuple(map(os.fsencode, SKIPPED))):
                continue
            if entry.is_dir(follow_symlinks=False):
                allowed = enter(below, allowed)
                continue
            try:
                found.files.append(_in_folder(entry, below))
            except OSError as error:
                note(below, f"was ignored: {error.strerror}")
        return left if own_limit else allowed

    enter((), limits.entries)
    found.files.sort(key=lambda file: file.parts)
    return found


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


def _of_zip(archive: zipfile.ZipFile, path: Path, limits: Limits) -> Files:
    entries = archive.infolist()
    if len(entries) > limits.entries:
        raise UserError(
            f"{path} has {len(entries):,} entries, more than {limits.entries:,}: unpack it "
            f"and give the folder."
        )
    found = Files()
    for entry in entries:
        name = _zip_name(entry)
        raw = name.replace("\\", "/")
        parts = tuple(
            _readable(part.encode()) for part in raw.split("/") if part not in ("", ".")
        )
        if raw.startswith("/") or ".." in parts or raw[1:2] == ":" or not parts:
            found.notes.append(f"{one_line(name)} was ignored: its path leads out of the zip")
        elif raw.endswith("/") or any(part.startswith(SKIPPED) for part in parts):
            continue
        elif len(parts) > limits.depth + 1:
            deep = f"it is more than {limits.depth} folders deep"
            found.notes.append(f"{'/'.join(parts)} was ignored: {deep}")
        else:
            found.files.append(_in_zip(archive, entry, parts, limits))
    # Stable: of two entries with one name, the second is the later one.
    found.files.sort(key=lambda file: file.parts)
    return found


def _in_zip(
    archive: zipfile.ZipFile, entry: zipfile.ZipInfo, parts: tuple[str, ...], limits: Limits
) -> File:
    mode = entry.external_attr >> 16
    problem = ""
    if stat.S_ISLNK(mode):
        problem = LINK
    elif stat.S_IFMT(mode) and not stat.S_ISREG(mode):
        problem = SPECIAL
    elif entry.flag_bits & 1:
        problem = "it is encrypted"
    elif entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        problem = f"its compression (method {entry.compress_type}) is not read here"
    elif entry.file_size > max(limits.file_bytes, limits.ratio * entry.compress_size):
        problem = (
            f"{entry.compress_size:,} bytes of the zip would become {entry.file_size:,} "
            f"bytes: this looks like a zip bomb"
        )

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
