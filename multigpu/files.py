"""Write files under a temporary name, then rename them, so no reader sees half a file."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multigpu.errors import UserError


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` unless the block raises.

    A rename within one folder is atomic on POSIX: a reader sees the old file or the new one.
    The data is on the disk before the rename, so a power cut cannot leave an empty file at
    `path`.
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
        # mkstemp makes files that only their owner can read.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value: object) -> Path:
    """Write `value` as indented JSON, atomically; return the path."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n")
    return Path(path)


def writable_folder(path: str | Path) -> Path:
    """Make the folder if it does not exist, and check that files can be written into it.

    Raises UserError if they cannot: an error now is better than after an hour of training.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"cannot write to the folder {folder} ({error.strerror}): "
            f"give another one with --out."
        ) from None
    return folder


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
