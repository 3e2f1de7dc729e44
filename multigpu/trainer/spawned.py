"""Runs a stage in spawned processes (ddp_spawn).

The processes train copies of the module; rank 0 returns the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from multigpu.devices import to_cpu
from multigpu.elastic.checkpoint_file import random_states, set_random_states
from multigpu.trainer import checkpoints
from multigpu.trainer.run import Task
from multigpu.trainer.state import State

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


@dataclass(frozen=True)
class SpawnedRun:
    """What rank 0 returns, with its tensors on the CPU.

    returned      what fit, validate, test or predict returned
    callbacks     the callbacks' states by state_key
    checkpoint    the content of a checkpoint after "fit"; None after an evaluation
    """

    returned: Any
    weights: dict[str, torch.Tensor]
    state: State
    callbacks: dict[str, dict[str, Any]]
    checkpoint: dict[str, Any] | None


def run_in_processes(
    trainer: "Trainer", on_rank: "Callable[[Trainer, Task], Any]", task: Task
) -> Any:
    """Call on_rank(trainer, task) in new processes; copy the result to the Trainer and the
    task's module.
    """
    model = task.module
    # An evaluation changes nothing that a checkpoint holds, so the last one stays valid.
    checkpoint = None if task.stage == "fit" else trainer.spawned_checkpoint
    try:
        spawned: SpawnedRun = trainer.strategy.launch(
            _run_rank, trainer, on_rank, task, random_states()
        )
    finally:
        trainer.remember(model, checkpoint)
    # The ranks' copies of the module have made their layers, this one has not.
    model.configure_model()
    model.load_state_dict(spawned.weights)
    for callback in trainer.callbacks:
        callback_state = spawned.callbacks.get(callback.state_key)
        if callback_state:
            callback.load_state_dict(callback_state)
    trainer.state = spawned.state
    trainer.remember(model, spawned.checkpoint or checkpoint)
    return spawned.returned


def _run_rank(
    trainer: "Trainer", on_rank: "Callable[[Trainer, Task], Any]", task: Task, states: dict
) -> SpawnedRun:
    """Run the task in a spawned process. All ranks call it; only rank 0's result is used."""
    set_random_states(states)
    returned = on_rank(trainer, task)
    result = SpawnedRun(
        returned=returned,
        weights=dict(task.module.state_dict()),
        state=trainer.state,
        callbacks={
            callback.state_key: callback.state_dict() for callback in trainer.callbacks
        },
        checkpoint=checkpoints.compose(trainer.run) if task.stage == "fit" else None,
    )
    return to_cpu(result)
