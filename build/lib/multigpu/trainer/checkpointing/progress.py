"""Write a run's counters to a checkpoint, and read them, in Lightning's nested format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


# The key of what only this Trainer reads, in the fit loop's state. Lightning ignores it.
OWN_KEY = "multigpu"


def loop_progress(trainer: Trainer, own: dict[str, Any]) -> dict[str, Any]:
    """The value of Lightning's key "loops"; {} if nothing was trained.

    own   what only this Trainer reads

    The checkpoint can be written at the end of an epoch or within it.
    """
    fit = trainer.state.fit_loop
    if fit is None:
        return {}
    zero = {"total": _steps(0), "current": _steps(0)}
    step = {"total": _steps(trainer.global_step), "current": _steps(0)}
    no_batches = {"total": _batches(0), "current": _batches(0)}
    automatic = trainer.lightning_module.automatic_optimization
    progress = trainer.state.progress
    epoch = progress.current_epoch
    started = epoch + int(fit.epoch_ended or fit.batches_done > 0)
    epochs = {
        "ready": started,
        "started": started,
        "processed": epoch + fit.epoch_ended,
        "completed": epoch,
    }
    return {
        "fit_loop": {
            "state_dict": {OWN_KEY: own},
            "epoch_loop.state_dict": {"_batches_that_stepped": progress.batches_that_stepped},
            "epoch_loop.batch_progress": {
                "total": _batches(fit.total_batches),
                "current": _batches(fit.batches_done or fit.data.batches),
                "is_last_batch": fit.batches_done == 0 or fit.last,
            },
            "epoch_loop.scheduler_progress": zero,
            "epoch_loop.automatic_optimization.state_dict": {},
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {"step": step if automatic else zero, "zero_grad": no_batches}
            },
            "epoch_loop.manual_optimization.state_dict": {},
            "epoch_loop.manual_optimization.optim_step_progress": zero if automatic else step,
            "epoch_loop.val_loop.state_dict": {},
            "epoch_loop.val_loop.batch_progress": {**no_batches, "is_last_batch": True},
            "epoch_progress": {"total": epochs, "current": epochs},
        }
    }


def _steps(number: int) -> dict[str, int]:
    return {"ready": number, "completed": number}


def _batches(number: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), number)


@dataclass(frozen=True)
class SavedProgress:
    """Where the run was when its checkpoint was written.

    batches_done           batches of the epoch that were trained; 0 at the epoch's end
    total_batches          batches of the whole run
    batches_that_stepped   batches that ended with an optimizer step; loggers use it as step
    epoch                  the epoch, from 0
    epoch_is_complete      True if a resumed run begins with the next epoch
    """

    batches_done: int
    total_batches: int
    batches_that_stepped: int
    epoch: int
    epoch_is_complete: bool


def own_progress(content: dict[str, Any]) -> dict[str, Any]:
    """What only this Trainer reads; {} if Lightning wrote the checkpoint."""
    loop = content.get("loops", {}).get("fit_loop", {})
    return loop.get("state_dict", {}).get(OWN_KEY, {})


def read_progress(content: dict[str, Any]) -> SavedProgress:
    """The counters in a checkpoint."""
    loop = content.get("loops", {}).get("fit_loop", {})
    own = own_progress(content)
    batches = loop.get("epoch_loop.batch_progress", {})
    epochs = loop.get("epoch_progress", {}).get("current", {})
    epoch_loop = loop.get("epoch_loop.state_dict", {})
    if own:
        batches_done = own["batches_done"]
    elif batches.get("is_last_batch", True):
        batches_done = 0
    else:
        batches_done = batches.get("current", {}).get("ready", 0)
    epoch = content["epoch"]
    return SavedProgress(
        batches_done=batches_done,
        total_batches=batches.get("total", {}).get("ready", 0),
        batches_that_stepped=epoch_loop.get("_batches_that_stepped", content["global_step"]),
        epoch=epoch,
        epoch_is_complete=batches_done == 0 and epochs.get("started", epoch + 1) > epoch,
    )
