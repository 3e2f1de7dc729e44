"""Temporary folders of a grading, which hold answers, solutions and the secret.

A run removes its folders when it ends, also by a signal. The next run removes what a killed
run, or a process that was just starting, has left.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "grading-"
LAST_SECONDS = 5.0  # a kernel that was starting when its job was killed ends by itself
YOUNG_SECONDS = 60.0  # A younger folder stays: its run may not have locked it yet.


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that only its owner can read, until the block ends."""
    _remove_left()
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # NFS has no lock for a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(descriptor)
        deadline = time.monotonic() + LAST_SECONDS
        while path.exists() and time.monotonic() < deadline:
            shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.1)


def _remove_left() -> None:
    """Remove this user's folders that no process holds."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
                old = time.time() - status.st_mtime > YOUNG_SECONDS
                if old and status.st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
