"""GradientAccumulationScheduler: another number of batches per step in each epoch."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero
from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.module import LightningModule

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Set the batches per optimizer step: {0: 1, 4: 2} takes two from the fifth epoch on.

    scheduling   epoch, from 0 → number of batches; it is 1 before the first of these epochs

    Raises UserError for other keys or values, in manual optimization, and if the Trainer also
    has accumulate_grad_batches.
    """

    def __init__(self, scheduling: dict[int, int]):
        if not scheduling:
            raise UserError(
                "GradientAccumulationScheduler needs a dict {epoch: number of batches}."
            )
        for name, least, values in (
            ("an epoch", 0, scheduling.keys()),
            ("a number of batches", 1, scheduling.values()),
        ):
            for value in values:
                if type(value) is not int or value < least:
                    raise UserError(
                        f"GradientAccumulationScheduler({scheduling}): {name} is {value!r}, "
                        f"expected a whole number from {least} up."
                    )
        self.scheduling = {0: 1} | scheduling
        self.epochs = sorted(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether any epoch takes more than one batch per step."""
        return max(self.scheduling.values()) > 1

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """The number of batches per step in this epoch."""
        return self.scheduling[max(start for start in self.epochs if start <= epoch)]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.going_to_accumulate_grad_batches():
            warn_of_overrides(pl_module)
        if not pl_module.automatic_optimization:
            raise UserError(
                "GradientAccumulationScheduler is for automatic optimization: call "
                "optimizer.step() only after every n-th batch."
            )
        if trainer.accumulate_grad_batches != 1:
            raise UserError(
                f"GradientAccumulationScheduler contradicts Trainer(accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches}): give one of them only."
            )
        if trainer.strategy.name == "horovod" and self.going_to_accumulate_grad_batches():
            raise UserError(
                "horovod's optimizer is built for one number of batches per step: give "
                "Trainer(accumulate_grad_batches=…) instead of GradientAccumulationScheduler."
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(epoch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.accumulate_grad_batches = 1  # as it was before this fit


def warn_of_overrides(module: LightningModule) -> None:
    """Warn if the module has hooks that are called once per step, and not for each batch."""
    names = ("optimizer_step", "optimizer_zero_grad")
    own = [name for name in names if is_overridden(name, module, LightningModule)]
    if own and is_rank_zero():
        warnings.warn(
            f"several batches make one optimizer step, so the hooks will not be called on "
            f"every batch: {type(module).__name__} overrides {' and '.join(own)}.",
            stacklevel=2,
        )
