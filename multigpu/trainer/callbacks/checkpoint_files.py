"""Where do checkpoints lie, what are they called, and which of them may be deleted?"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from multigpu.errors import UserError


def folder(trainer: Any) -> str:
    """The checkpoints' folder where the user named none: beside the first logger's files, or in default_root_dir."""
    if not trainer.loggers:
        return os.path.join(trainer.default_root_dir, "checkpoints")
    logger = trainer.loggers[0]
    version = (
        logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    )
    return os.path.join(
        logger.save_dir or trainer.default_root_dir, str(logger.name), version, "checkpoints"
    )


def filled(template: str, metrics: Mapping[str, Any], equals: str | None) -> str:
    """`template` with its {name:format} filled; one that is missing counts as 0.

    With `equals` "=" a field becomes "name=value", with None just the value. Raises UserError for a wrong format.
    """

    def text(field: re.Match) -> str:
        value, how = metrics.get(field[1], 0), field[2] or ""
        try:
            return (f"{field[1]}{equals}" if equals is not None else "") + format(value, how)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"ModelCheckpoint(filename={template!r}): {field[0]} cannot be filled: {error}."
            ) from None

    return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", text, template)


def unused(name: Callable[[int | None], str], start: int, ours: str) -> str:
    """The first of name(None), name(start), name(start + 1), ... that no file has, or that is `ours`."""
    path, version = name(None), start
    while os.path.exists(path) and path != ours:
        path, version = name(version), version + 1
    return path


def remove(trainer: Any, path: str, newer: str, dirpath: str) -> None:
    """Delete `path` on rank 0, unless `newer` replaced it, the run began with it, or it lies outside `dirpath`."""
    resumed = getattr(trainer, "ckpt_path", None)
    keep = {os.path.abspath(newer)} | ({os.path.abspath(resumed)} if resumed else set())
    old = Path(os.path.abspath(path))
    if (
        not path
        or str(old) in keep
        or Path(os.path.abspath(dirpath)) not in old.parents
        or not trainer.is_global_zero
    ):
        return
    _unlink(old)


def link(trainer: Any, path: str, name: str) -> None:
    """Make `name` a symbolic link to `path`; the ranks wait for it. Where links are not allowed it is a copy."""
    if trainer.is_global_zero and os.path.abspath(path) != os.path.abspath(name):
        _unlink(Path(name))
        try:
            os.symlink(os.path.relpath(path, os.path.dirname(name)), name)
        except OSError:
            shutil.copy(path, name)
    trainer.strategy.barrier()


def _unlink(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():  # a sharded checkpoint is a folder
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
