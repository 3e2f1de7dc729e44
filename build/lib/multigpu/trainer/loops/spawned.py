"""Runs a stage in spawned processes (ddp_spawn).

The processes train copies of the module; rank 0 returns the result.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from multigpu.checkpoint import random_states, set_random_states
from multigpu.devices import to_cpu
from multigpu.trainer.checkpointing.contents import compose_checkpoint
from multigpu.trainer.datamodule import LightningDataModule
from multigpu.trainer.loops import run
from multigpu.trainer.loops.state import Metrics, Progress
from multigpu.trainer.module import LightningModule

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
    progress: Progress
    metrics: Metrics
    should_stop: bool
    callbacks: dict[str, dict[str, Any]]
    checkpoint: dict[str, Any] | None


def run_stage(
    trainer: "Trainer",
    stage: str,
    model: LightningModule,
    datamodule: LightningDataModule | None,
    ckpt_path: str | Path | None,
    loaders: dict[str, Any],
) -> Any:
    """Call run.run_stage in new processes, and copy the result to `trainer` and `model`."""
    state = trainer.state
    # An evaluation changes nothing that a checkpoint holds, so the last checkpoint
    # stays valid.
    checkpoint = None if stage == "fit" else state.spawned_checkpoint
    # Do not pickle these for the ranks.
    state.lightning_module = None
    state.spawned_checkpoint = None
    try:
        spawned: SpawnedRun = trainer.strategy.launch(
            _run_rank, trainer, stage, model, datamodule, ckpt_path, loaders, random_states()
        )
    finally:
        state.lightning_module = model
        state.spawned_checkpoint = checkpoint
    # The ranks' copies of the module have made their layers, this one has not.
    run.configure_model(model)
    model.load_state_dict(spawned.weights)
    for callback in trainer.callbacks:
        callback_state = spawned.callbacks.get(callback.state_key)
        if callback_state:
            # ModelCheckpoint ignores a state with another folder than its own, so set the
            # folder that the rank has chosen.
            if "dirpath" in callback_state:
                callback.dirpath = callback_state["dirpath"]
            callback.load_state_dict(callback_state)
    state.progress = spawned.progress
    state.metrics = spawned.metrics
    state.should_stop = spawned.should_stop
    state.spawned_checkpoint = spawned.checkpoint or checkpoint
    run.attach(trainer, model)
    return spawned.returned


def _run_rank(
    trainer: "Trainer",
    stage: str,
    model: LightningModule,
    datamodule: LightningDataModule | None,
    ckpt_path: str | Path | None,
    loaders: dict[str, Any],
    states: dict[str, Any],
) -> SpawnedRun:
    """Run the stage in a spawned process. All ranks call it; only rank 0's result is used."""
    set_random_states(states)
    returned = run.run_stage(trainer, stage, model, datamodule, ckpt_path, loaders)
    checkpoint = None
    if stage == "fit":
        checkpoint = to_cpu(compose_checkpoint(trainer, weights_only=False))
    state = trainer.state
    return SpawnedRun(
        returned=returned,
        weights=to_cpu(dict(model.state_dict())),
        progress=state.progress,
        metrics=state.metrics.copy_to_cpu(),
        should_stop=state.should_stop,
        callbacks={
            callback.state_key: callback.state_dict() for callback in trainer.callbacks
        },
        checkpoint=checkpoint,
    )
