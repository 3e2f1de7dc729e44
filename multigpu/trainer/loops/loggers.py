"""Sends logged values to the Trainer's loggers."""

from typing import TYPE_CHECKING

from multigpu.trainer.loops.results import Reported

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


def send_to_loggers(
    trainer: "Trainer", reported: Reported | None, step: int | None = None
) -> None:
    """Write the values at `step`; the default is Progress.batches_that_stepped.

    As in Lightning, a logged value with the name "step" replaces the step.
    """
    if reported is None or not reported.logger or not trainer.loggers:
        return
    progress = trainer.state.progress
    values = {name: float(value) for name, value in reported.logger.items()}
    values = {"epoch": progress.current_epoch} | values
    default = progress.batches_that_stepped if step is None else step
    x = int(values.pop("step", default))
    for logger in trainer.loggers:
        logger.log_metrics(metrics=dict(values), step=x)
