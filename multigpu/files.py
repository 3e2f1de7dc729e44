"""The files of a run: written whole or not at all, and set aside when the next run begins."""

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from multigpu.errors import UserError

# The disk is full, the user's quota is used up, or the file reaches the limit of `ulimit -f`.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# torch.save's error when a write fails begins with the name of its source file.
TORCH_WRITER = ("inline_container", "PytorchStreamWriter")
# What a finished run leaves in --out. A checkpoint is not among them: --resume needs it.
RESULTS = ("metrics.json", "training.png", "model.pt", "model.keras")


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` unless the block raises.

    A rename within one folder is atomic on POSIX: a reader sees the old file or the new one.
    The data is on the disk before the rename, so a power cut cannot leave an empty file at
    `path`. Raises UserError if there is no space for the file.
    """
    path = Path(path)
    with report_full_disk(path):
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
        except Exception as error:
            if any(words in str(error) for words in TORCH_WRITER):
                _raise_cause(temporary)
            raise
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def report_full_disk(path: str | Path) -> Iterator[None]:
    """Raise UserError instead of the OSError that says that there is no space for `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        problem = f"no space left on the disk of {Path(path).parent}"
        if error.errno != errno.ENOSPC:
            problem += f" for this user ({error.strerror})"
        raise UserError(
            f"cannot write {path}: {problem}. Delete what is not needed there, or write to "
            f"a folder on another disk."
        ) from None


def _raise_cause(path: Path) -> None:
    """Raise the OSError with which a write to `path` fails now; return if it succeeds.

    torch.save reports that its file is too short, but not why.
    """
    with open(path, "ab", buffering=0) as file:
        for _ in range(16):
            file.write(bytes(2**16))
        os.fsync(file.fileno())


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
        raise _not_writable(folder, error) from None
    return folder


def _not_writable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write to the folder {folder} ({error.strerror}): give another one with --out."
    )


def set_aside_results(path: str | Path) -> None:
    """Move the RESULTS of the last finished run from the folder into its folder `earlier`.

    So what is in the folder afterwards was written by the run that begins now, or it is a
    checkpoint. `earlier` keeps one run. Raises UserError if a file cannot be moved.
    """
    folder = Path(path)
    names = [name for name in RESULTS if (folder / name).is_file()]
    try:
        for name in names:
            (folder / "earlier").mkdir(exist_ok=True)
            # FileNotFoundError: another run that begins now has moved it.
            with suppress(FileNotFoundError):
                (folder / name).replace(folder / "earlier" / name)
    except OSError as error:
        raise _not_writable(folder, error) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
