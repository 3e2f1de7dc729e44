"""Write a checkpoint file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.trainer.checkpointing.contents import TRAINING_KEYS, compose_checkpoint

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


def save_checkpoint(trainer: Trainer, path: str | Path, weights_only: bool = False) -> None:
    """Write a checkpoint file, atomically. All ranks must call this; only rank 0 writes.

    Raises UserError, on all ranks, if nothing was trained yet or the file cannot be written.
    """
    if trainer.lightning_module is None:
        raise UserError(
            "trainer.save_checkpoint was called before any training: "
            "call fit first, or save the weights with torch.save."
        )
    # Spawned ranks returned their checkpoint, because this process cannot compose it.
    content = trainer.state.spawned_checkpoint or compose_checkpoint(trainer, weights_only)
    problem = None
    if trainer.is_global_zero:
        if weights_only:
            content = {
                key: value for key, value in content.items() if key not in TRAINING_KEYS
            }
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with atomic(path) as temporary:
                torch.save(content, temporary)
        except UserError as error:
            problem = str(error)
        except (OSError, RuntimeError) as error:
            problem = (
                f"cannot write {path} ({error}): free some space there, "
                "or give another dirpath or default_root_dir."
            )
    # The broadcast is also a barrier: no rank reads the file before it is complete.
    problem = trainer.strategy.broadcast(problem)
    if problem:
        raise UserError(problem, already_reported=not trainer.is_global_zero)
