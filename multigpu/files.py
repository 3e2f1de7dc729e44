"""How is a file written so that nobody ever sees half of it? Under a temporary name, then renamed."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multigpu.errors import UserError


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; rename it to `path` if the block ends well, delete it otherwise.

    A rename within one folder is atomic on POSIX: a reader sees the old file or the new one.
    The data reach the disk before the rename, so that a power cut cannot leave an empty file under the good name.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix
    )
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(
            0o666 & ~_umask()
        )  # mkstemp makes files that only their owner may read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value: object) -> Path:
    """Write `value` as indented JSON, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n")
    return Path(path)


def writable_folder(path: str | Path) -> Path:
    """Make the folder if it is not there, and try to write into it.

    Raises UserError if that fails: better now than after an hour of training.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"cannot write to the folder {folder} ({error.strerror}): give another one with --out."
        ) from None
    return folder


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
