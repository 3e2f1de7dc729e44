"""A run's own copy of the working folder, so that no run sees what another one writes.

A program that finds a checkpoint goes on from it, and two runs write the same files. So each
run works in a folder with the same entries: small files are copies, others are links. What the
program writes under relative paths goes with the proof.
"""

import os
import shutil
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

# Files up to this size are copied, in bytes.
SMALL = 2**20
# Files that programs write, and so would write through a link: they are always copied.
WRITTEN = (
    ".pt",
    ".pth",
    ".ckpt",
    ".bin",
    ".safetensors",
    ".h5",
    ".npz",
    ".pkl",
    ".db",
    ".log",
)
# A folder with more entries is a link, and so is all that comes after as many entries.
MOST_IN_FOLDER = 300
MOST = 3000
# How many folders around the working folder are seen.
LEVELS = 3
# Environments, repositories' data and caches, which programs do not write.
LINKED = ("site-packages", "node_modules", "__pycache__")


def make(source: Path, target: Path) -> Path:
    """Make a copy of the folder `source` below `target`, and return it.

    Around it are links to what is around `source`, so that "../data" is found.
    """
    folders = [folder for folder in (source, *source.parents)[: LEVELS + 1] if folder.name]
    for outer, inner in pairwise(reversed(folders)):
        target = target / outer.name
        target.mkdir(parents=True)
        _link_all(outer, target, without=inner.name)
    return _copy(source, target / source.name)


def _link_all(folder: Path, target: Path, without: str) -> None:
    entries = _entries(folder)
    for entry in entries if len(entries) <= MOST_IN_FOLDER else []:
        place = target / entry.name
        if Path(entry.name).suffix in WRITTEN and entry.is_file():
            _copy_file(entry, place)
        elif entry.name != without:
            place.symlink_to(entry.path)


def _copy(source: Path, target: Path) -> Path:
    left = MOST
    waiting = [(source, target)]
    while waiting:
        folder, destination = waiting.pop(0)
        destination.mkdir(parents=True)
        for entry in _entries(folder):
            if target.is_relative_to(entry.path):
                # Temporary files are in the working folder itself.
                continue
            left -= 1
            place = destination / entry.name
            if entry.is_dir(follow_symlinks=False) and left > 0 and _is_copied(entry):
                waiting.append((Path(entry.path), place))
            elif _is_small_file(entry):
                _copy_file(entry, place)
            else:
                place.symlink_to(os.path.join(folder, entry.name))
    return target


# Other programs can delete files and folders meanwhile, and what is around the working folder
# can be unreadable: the copy is then without it.
def _entries(folder: Path) -> list[os.DirEntry]:
    with suppress(OSError):
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    return []


def _copy_file(entry: os.DirEntry, place: Path) -> None:
    with suppress(FileNotFoundError, PermissionError):
        shutil.copy2(entry.path, place)


def _is_copied(folder: os.DirEntry) -> bool:
    if folder.name.startswith(".") or folder.name in LINKED:
        return False
    with suppress(OSError):
        return len(os.listdir(folder.path)) <= MOST_IN_FOLDER
    return False


def _is_small_file(entry: os.DirEntry) -> bool:
    with suppress(OSError):
        if entry.is_file(follow_symlinks=False) and os.access(entry.path, os.R_OK):
            return entry.stat().st_size <= SMALL or Path(entry.name).suffix in WRITTEN
    return False
