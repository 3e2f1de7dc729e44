"""Sends logged values to the Trainer's loggers."""

from typing import TYPE_CHECKING

from multigpu.trainer.loops.results import Reported

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


def send_to_loggers(
    trainer: "Trainer", reported: Reported | None, offset: int = 0, batch: int | None = None
) -> None:
    """Write the values, as in Lightning, at Progress.batches_that_stepped + `offset`.

    A logged value with the name "step" replaces this number; otherwise "epoch" is added.

    batch   the values are those of this batch of an evaluation, and it is the x axis
    """
    if reported is None or not reported.logger or not trainer.loggers:
        return
    progress = trainer.state.progress
    values = {name: float(value) for name, value in reported.logger.items()}
    if batch is not None:
        step = batch
    elif "step" in values:
        step = int(values.pop("step"))
    else:
        step = progress.batches_that_stepped + offset
        values = {"epoch": progress.current_epoch} | values
    for logger in trainer.loggers:
        logger.log_metrics(metrics=dict(values), step=step)
