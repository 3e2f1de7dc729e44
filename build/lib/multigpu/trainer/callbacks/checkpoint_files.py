"""ModelCheckpoint's files: their folder, their names, links to them, their deletion."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multigpu.errors import UserError

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


def default_folder(trainer: Trainer) -> str:
    """The folder for checkpoints if the user gave none.

    It is "checkpoints" in the first logger's folder. Without a logger it is "checkpoints" in
    default_root_dir.
    """
    if not trainer.loggers:
        return os.path.join(trainer.default_root_dir, "checkpoints")
    logger = trainer.loggers[0]
    version = logger.version
    if not isinstance(version, str):
        version = f"version_{version}"
    root = logger.save_dir or trainer.default_root_dir
    return os.path.join(root, str(logger.name), version, "checkpoints")


def fill_template(template: str, metrics: Mapping[str, Any], equals: str | None) -> str:
    """`template` with each {name:format} replaced; a missing metric counts as 0.

    If `equals` is "=", a field becomes "name=value". If it is None, a field becomes the value.
    Raises UserError if a format does not fit its value.
    """

    def text_of(field: re.Match) -> str:
        name, spec = field[1], field[2] or ""
        try:
            value = format(metrics.get(name, 0), spec)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"ModelCheckpoint(filename={template!r}): "
                f"{field[0]} cannot be formatted: {error}."
            ) from None
        return value if equals is None else f"{name}{equals}{value}"

    return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", text_of, template)


def unused_path(path_of: Callable[[int | None], str], start: int, replaced: str) -> str:
    """Return the first free path of path_of(None), path_of(start), path_of(start + 1), ….

    A path is free if no file exists there, or if it is `replaced`.
    """
    path = path_of(None)
    version = start
    while os.path.exists(path) and path != replaced:
        path = path_of(version)
        version += 1
    return path


def remove_checkpoint(trainer: Trainer, path: str, newer: str, dirpath: str) -> None:
    """Delete the file `path`, on rank 0.

    The file is kept if `newer` is the same file, if the run resumed from it, or if it is
    outside `dirpath`.
    """
    if not path or not trainer.is_global_zero:
        return
    kept = {os.path.abspath(newer)}
    if trainer.ckpt_path:
        kept.add(os.path.abspath(trainer.ckpt_path))
    old = Path(os.path.abspath(path))
    if str(old) in kept or Path(os.path.abspath(dirpath)) not in old.parents:
        return
    _delete(old)


def link_checkpoint(trainer: Trainer, path: str, link: str) -> None:
    """Make `link` a symbolic link to `path`, or a copy if links are not allowed.

    Rank 0 makes the link or copy. The other ranks wait.
    """
    if trainer.is_global_zero and os.path.abspath(path) != os.path.abspath(link):
        _delete(Path(link))
        try:
            os.symlink(os.path.relpath(path, os.path.dirname(link)), link)
        except OSError:
            shutil.copy(path, link)
    trainer.strategy.barrier()


def _delete(path: Path) -> None:
    # Lightning writes a sharded checkpoint as a folder.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
