"""What comes back from ranks that trained a copy? The weights, the metrics, the callbacks' states, and what a checkpoint holds."""

from typing import Any

from multigpu.checkpoint import random_states, set_random_states
from multigpu.devices import on_the_cpu
from multigpu.trainer.checkpointing import checkpoint_io
from multigpu.trainer.loops import run

NAMES = (
    "current_epoch",
    "global_step",
    "_logged_step",
    "should_stop",
    "_callback_metrics",
    "logged_metrics",
)


def run_stage(
    trainer: Any, stage: str, model: Any, datamodule: Any, ckpt_path: Any, loaders: dict
) -> Any:
    """A stage in new processes (ddp_spawn); afterwards `trainer` and `model` are as if it had run here."""
    kept = (
        None if stage == "fit" else trainer.checkpoint
    )  # an evaluation changes nothing that a checkpoint holds
    trainer.lightning_module = trainer.checkpoint = None
    told = trainer.strategy.launch(
        _rank, trainer, stage, model, datamodule, ckpt_path, loaders, random_states()
    )
    model.load_state_dict(told.pop("weights"))
    states = told.pop("callbacks")
    for callback in trainer.callbacks:
        if state := states.get(callback.state_key):
            callback.__dict__.update(
                {"dirpath": state["dirpath"]} if "dirpath" in state else {}
            )
            callback.load_state_dict(state)
    result = told.pop("result")
    trainer.__dict__.update(told)
    trainer.lightning_module = model
    trainer.checkpoint = trainer.checkpoint or kept
    model.trainer = trainer
    return result


def _rank(
    trainer: Any,
    stage: str,
    model: Any,
    datamodule: Any,
    ckpt_path: Any,
    loaders: dict,
    states: dict,
) -> dict[str, Any]:
    """In a spawned process: the run, and what the parent gets of it from rank 0."""
    set_random_states(states)
    result = run.run_stage(trainer, stage, model, datamodule, ckpt_path, loaders)
    content = checkpoint_io.compose(trainer, weights_only=False) if stage == "fit" else None
    return {
        "result": result,
        "weights": on_the_cpu(dict(model.state_dict())),
        "callbacks": {
            callback.state_key: callback.state_dict() for callback in trainer.callbacks
        },
        "checkpoint": content and on_the_cpu(content),
        **{name: on_the_cpu(getattr(trainer, name)) for name in NAMES},
    }
