"""The checkpoints of one run: each a whole file, the newest by its step, the last ones kept.

A file is named after its step and the checksum of its content, step-00000120-1f2e3d4c.pt, so
one rename makes both valid at once. A file whose content has another checksum is damaged.
"""

import contextlib
import errno
import fcntl
import io
import os
import re
import socket
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from multigpu import files
from multigpu.elastic.checkpoint_file import read
from multigpu.errors import UserError, pluralize, warn
from multigpu.launch.world import World

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{8})\.pt")
# What files.atomic leaves of such a file if its process is killed.
ORPHAN = re.compile(rf"\.{NAME.pattern}\..*")
# Errors of a file system that has no locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# Seconds for the processes of an earlier start to end: they hold the lock until then.
LOCK_WAIT = 10.0
# Seconds in which a rank can see files late: an NFS client keeps a folder's listing for up to
# 60 s (acdirmax in nfs(5)).
LISTING_WAIT = 65.0
LISTING_PAUSE = 1.0


def checkpoint_name(step: int, content: bytes) -> str:
    """The name of the checkpoint file with this step and content."""
    return f"step-{step:08d}-{zlib.crc32(content):08x}.pt"


class CheckpointFolder:
    """The folder of one run's checkpoints. One process uses it at a time: rank 0.

    path    the folder
    keep    the number of newest checkpoints that `write` leaves in it
    """

    def __init__(self, path: Path, keep: int = 2):
        self.path = path
        self.keep = keep
        self.lock: int | None = None
        self.warned = False

    def open(self, wait: float = LOCK_WAIT) -> None:
        """Make the folder, lock it for this process, remove what a killed process left.

        The lock ends with the process. Raises UserError if the folder is not writable, or if
        another process still holds the lock after `wait` seconds.
        """
        files.writable_folder(self.path)
        try:
            self.lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            self._lock(time.monotonic() + wait)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warn(
                f"the file system of {self.path} has no locks ({error.strerror}): "
                f"start no second run with this folder."
            )
        for orphan in self._matching(ORPHAN):
            orphan.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def newest_step(self) -> int:
        """The step of the newest checkpoint, damaged or not; -1 if there is none."""
        return max((step for step, _ in self._checkpoints()), default=-1)

    def newest(self) -> tuple[Path, dict] | None:
        """The path and the content of the newest good checkpoint; None if there is none yet.

        Newest is the highest step, because clocks of nodes differ and can be set back. A
        damaged file is renamed to NAME.damaged, a warning says so, and the one before it is
        tried. Raises UserError if all are damaged, or if one cannot be read for another reason
        than a bad disk.
        """
        checkpoints = sorted(self._checkpoints(), reverse=True)
        for index, (_, path) in enumerate(checkpoints):
            content = self._content(path)
            if content is not None:
                return path, content
            path.replace(path.with_name(f"{path.name}.damaged"))
            rest = "there is none before it"
            if index + 1 < len(checkpoints):
                rest = f"the one before it, {checkpoints[index + 1][1].name}, is tried"
            # Two lines: a notebook breaks a longer one within words.
            warn(f"{path} is damaged or cut short:\n    {rest}.")
        if checkpoints:
            count = pluralize(len(checkpoints), "checkpoint")
            raise UserError(
                f"{count} in {self.path}, and none is good: "
                f"give another --out to start a new run, or put back a copy of one."
            )
        return None

    def require_shared(self, world: World, wait: float = LISTING_WAIT) -> None:
        """Raise UserError, on all ranks, if another rank sees a newer checkpoint than rank 0.

        Then the folder is on each node's own disk, and rank 0 is on another node than before.
        A network's file system can show a node an old listing, so the ranks look again for
        `wait` seconds. Call it before `newest`: rank 0 loads only files that it sees. And
        `newest` renames damaged files, which another node can still see under their old names.
        """
        deadline = time.monotonic() + wait
        waiting = False
        while True:
            # Rank 0's clock decides for all, so that all leave the loop together.
            seen: list[tuple[int, bool]] = [(-1, False)] * world.size
            dist.all_gather_object(seen, (self.newest_step(), time.monotonic() >= deadline))
            steps = [step for step, _ in seen]
            newest = max(steps)
            if steps[0] == newest:
                return
            rank = steps.index(newest)
            sees = (
                f"rank {rank} sees a checkpoint of step {newest} in {self.path}, and rank 0 "
                f"does not"
            )
            if seen[0][1]:
                raise UserError(
                    f"{sees}: give an --out on a file system that all nodes share.",
                    already_reported=world.rank != 0,
                )
            if world.rank == 0 and not waiting:
                print(f"{sees} yet: the ranks look again for {wait:.0f} s", flush=True)
            waiting = True
            time.sleep(LISTING_PAUSE)

    def write(self, step: int, content: dict) -> Path:
        """Write `content` as the checkpoint of `step`; then remove all but the newest `keep`.

        Raises UserError if it cannot be written; the earlier checkpoints are kept then. If one
        of them cannot be removed, a warning says so, the first time.
        """
        # Listed first: if that fails, nothing is written.
        before = self._checkpoints()
        buffer = io.BytesIO()
        torch.save(content, buffer)
        data = buffer.getbuffer()
        path = self.path / checkpoint_name(step, data)
        try:
            with files.atomic(path) as temporary:
                temporary.write_bytes(data)
            self._sync()
        except OSError as error:
            raise UserError(
                f"cannot write {path} ({error.strerror}): look at the disk, or give another "
                f"folder with --out."
            ) from None
        self._remove_old(step, [(at, other) for at, other in before if other != path])
        return path

    def _remove_old(self, step: int, others: list[tuple[int, Path]]) -> None:
        # A step can have two files, from before and after the epoch's evaluation.
        older = sorted((at, other) for at, other in others if at < step)
        same = [other for at, other in others if at == step]
        for old in [other for _, other in older[: max(0, len(older) - self.keep + 1)]] + same:
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                if not self.warned:
                    warn(
                        f"cannot remove the old checkpoint {old} ({error.strerror}): "
                        f"remove such files yourself before the disk is full."
                    )
                self.warned = True

    def _content(self, path: Path) -> dict[str, Any] | None:
        """The content of a checkpoint file, or None if it is damaged."""
        expected = NAME.fullmatch(path.name)[2]
        try:
            data = path.read_bytes()
        except OSError as error:
            if error.errno == errno.EIO:
                return None
            raise UserError(
                f"cannot read {path} ({error.strerror}): make it readable, or move it away "
                f"to go on from the one before it."
            ) from None
        if f"{zlib.crc32(data):08x}" != expected:
            return None
        with contextlib.suppress(UserError):
            return read(path)
        return None

    def _checkpoints(self) -> list[tuple[int, Path]]:
        return [(int(NAME.fullmatch(path.name)[1]), path) for path in self._matching(NAME)]

    def _matching(self, pattern: re.Pattern) -> list[Path]:
        try:
            return [path for path in self.path.iterdir() if pattern.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(
                f"cannot list the folder {self.path} ({error.strerror}): make it readable, or "
                f"give another one with --out."
            ) from None

    def _sync(self) -> None:
        """Put the renamed file's name on the disk before an older checkpoint is removed."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _lock(self, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    owner = os.pread(self.lock, 200, 0).decode(errors="replace").strip()
                    self.close()
                    raise UserError(
                        f"{self.path} belongs to a run that still trains ({owner}): wait for "
                        f"its end, or give this run another folder with --out."
                    ) from None
                time.sleep(0.1)
        job = os.environ.get("SLURM_JOB_ID")
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        # The lock holds on a full disk, too. Only its owner's name is then missing.
        with contextlib.suppress(OSError):
            os.ftruncate(self.lock, 0)
            os.pwrite(self.lock, f"{owner}{f', job {job}' if job else ''}\n".encode(), 0)
