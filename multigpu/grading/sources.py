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
FOLDER = "it is a folder, not a file"
SPECIAL = "it is not a regular file"
NO_NAME = "(no name)"
SKIPPED = ("__MACOSX", "__pycache__")


@dataclass(frozen=True)
class Limits:
    """How much is read.

    file_bytes    of one file: one byte more shows that it is too long
    total_bytes   of all files that are read
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
    size: int = 0
    modified: float = 0.0
    problem: str = ""
    open_bytes: Callable[[int], bytes] = field(default=lambda most: b"", repr=False)

    @property
    def path(self) -> str:
        return "/".join(self.parts)

    def read(self, most: int) -> tuple[bytes, str]:
        """At most so many bytes, and the problem, "" if there is none. Never raises."""
        if self.problem:
            return b"", self.problem
        try:
            return self.open_bytes(most), ""
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            reason = getattr(error, "strerror", None) or error
            return b"", f"it cannot be read: {reason}"
        except (RuntimeError, NotImplementedError, ValueError) as error:
            # zipfile: a password is needed, an unknown version, a damaged header
            return b"", f"it cannot be read: {error}"


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
        try:
            root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"the folder {path} cannot be read: {error.strerror}.") from None
        try:
            walk = _Walk(root, path, limits)
            walk.enter(root, (), limits.entries)
            walk.found.files.sort(key=lambda file: file.parts)
            yield walk.found
        finally:
            os.close(root)
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
            yield _listed(archive, path, limits)
    else:
        raise UserError(
            f"there is no folder and no zip {path}: give what the students handed in."
        )


class _Walk:
    """Lists a folder. Each folder is opened by its name in the one above, never by a path."""

    def __init__(self, root: int, path: Path, limits: Limits):
        self.root = root
        self.path = path
        self.limits = limits
        self.found = Files()

    def enter(self, folder: int, names: tuple[bytes, ...], left: int) -> int:
        """List the folder; returns how many entries are still allowed."""
        with os.scandir(folder) as entries:
            listed = sorted(os.fsencode(entry.name) for entry in islice(entries, left + 1))
        if len(listed) > left:
            if not names:
                raise UserError(
                    f"{self.path} has more than {left:,} entries: give the folder that holds "
                    f"the submissions alone."
                )
            self.note(names, f"has more than {self.limits.entries:,} files: not all were read")
            listed = listed[:left]
        left -= len(listed)
        for name in listed:
            if not name.startswith((b".", *(skipped.encode() for skipped in SKIPPED))):
                left = self.see(folder, names, name, left)
        return left

    def see(self, folder: int, names: tuple[bytes, ...], name: bytes, left: int) -> int:
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            self.note((*names, name), f"was ignored: {error.strerror}")
            return left
        mode = status.st_mode
        is_notebook = name.lower().endswith(b".ipynb")
        if stat.S_ISDIR(mode) and not is_notebook:
            return self.descend(folder, (*names, name), left)
        problem = ""
        if stat.S_ISDIR(mode):
            problem = FOLDER
        elif stat.S_ISLNK(mode):
            problem = LINK
        elif not stat.S_ISREG(mode):
            problem = SPECIAL
        path = (*names, name)
        self.found.files.append(
            File(
                tuple(_readable(part) for part in path),
                status.st_size,
                status.st_mtime,
                problem,
                lambda most: _read_beneath(self.root, path, most),
            )
        )
        return left

    def descend(self, folder: int, names: tuple[bytes, ...], left: int) -> int:
        if len(names) > self.limits.depth:
            self.note(names, f"was ignored: it is more than {self.limits.depth} folders deep")
            return left
        # Each student's folder has a limit of its own: one student cannot hide the others.
        per_student = 2 if names[0] == b"submitted" else 1
        own_limit = len(names) <= per_student
        try:
            inner = os.open(
                names[-1],
                os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                dir_fd=folder,
            )
        except OSError as error:
            self.note(names, f"was ignored: {error.strerror}")
            return left
        try:
            rest = self.enter(inner, names, self.limits.entries if own_limit else left)
        finally:
            os.close(inner)
        return left if own_limit else rest

    def note(self, names: tuple[bytes, ...], text: str) -> None:
        path = "/".join(_readable(name) for name in names)
        self.found.notes.append(f"{path} {text}")


def _read_beneath(root: int, names: tuple[bytes, ...], most: int) -> bytes:
    """Read a regular file. No part of its path may be a link, also not one made since."""
    held = []
    try:
        folder = root
        for name in names[:-1]:
            folder = os.open(
                name,
                os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                dir_fd=folder,
            )
            held.append(folder)
        # O_NONBLOCK: to open a FIFO would wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(names[-1], flags, dir_fd=folder)
        held.append(handle)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(SPECIAL)
        data = bytearray()
        while len(data) < most:
            chunk = os.read(handle, min(most - len(data), 1 << 20))
            if not chunk:
                break
            data += chunk
        return bytes(data)
    finally:
        for handle in held:
            os.close(handle)


def _listed(archive: zipfile.ZipFile, path: Path, limits: Limits) -> Files:
    entries = archive.infolist()
    if len(entries) > limits.entries:
        raise UserError(
            f"{path} has {len(entries):,} entries, more than {limits.entries:,}: unpack it "
            f"and give the folder."
        )
    found = Files()
    seen_folders: set[tuple[str, ...]] = set()
    for entry in entries:
        name = _zip_name(entry)
        raw = name.replace("\\", "/")
        is_folder = raw.endswith("/")
        parts = tuple(
            _readable(part.encode()) for part in raw.split("/") if part not in ("", ".")
        )
        if raw.startswith("/") or ".." in parts or raw[1:2] == ":" or not parts:
            found.notes.append(f"{one_line(name)} was ignored: its path leads out of the zip")
            continue
        if any(part.startswith((".", *SKIPPED)) for part in parts):
            continue
        folders = parts if is_folder else parts[:-1]
        for depth, part in enumerate(folders, 1):
            if part.lower().endswith(".ipynb"):
                if parts[:depth] not in seen_folders:
                    seen_folders.add(parts[:depth])
                    found.files.append(File(parts[:depth], problem=FOLDER))
                break
        else:
            if len(parts) > limits.depth + 1:
                deep = f"it is more than {limits.depth} folders deep"
                found.notes.append(f"{'/'.join(parts)} was ignored: {deep}")
            elif not is_folder:
                found.files.append(_zipped(archive, entry, parts, limits))
    # Stable: of two entries with one name, the second is the later one.
    found.files.sort(key=lambda file: file.parts)
    return found


def _zipped(
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
