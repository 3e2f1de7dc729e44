"""The data of a fit: requested from the user when it is first needed, as Lightning does.

configure_optimizers runs before the dataloaders are made, unless it asks for
trainer.estimated_stepping_batches. A sanity check makes the validation dataloaders first.
"""

import math
from typing import TYPE_CHECKING, Any

from multigpu.errors import UserError
from multigpu.rendezvous import same_everywhere
from multigpu.trainer import arguments
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.loops import advice, dataloaders
from multigpu.trainer.loops.evaluate import EvaluationLoop
from multigpu.trainer.module import LightningModule

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class FitData:
    """This rank's training batches, and the loop over the validation batches.

    All ranks must call each method equally often. Raises UserError if there is nothing to
    train on.

    loader       this rank's shard of the training dataloader; None before `load_training`
    length       the number of its batches; infinity if it has no length
    batches      the number of batches of an epoch, limited and equal on all ranks
    validation   the loop of validation; None before `load_validation`, or without validation
    validates    whether there is anything to validate with
    """

    def __init__(self, trainer: "Trainer", given: dict[str, Any]):
        self.trainer = trainer
        self.state = trainer.state
        self.strategy = trainer.strategy
        self.given = given
        self.loader: Any = None
        self.length: float = 0
        self.batches: float = 0
        self.validation: EvaluationLoop | None = None
        self._epoch_of_training = -math.inf
        self._epoch_of_validation = -math.inf
        if not dataloaders.has_loader(trainer, "train", given):
            raise UserError(
                "trainer.fit has no training data: pass train_dataloaders= or datamodule=, or "
                "define the method train_dataloader in the module."
            )
        module = self.state.lightning_module
        has_step = is_overridden("validation_step", module, LightningModule)
        has_loader = dataloaders.has_loader(trainer, "val", given)
        same_everywhere(
            self.strategy.world,
            "whether there are validation dataloaders",
            has_loader,
            self.strategy.gather_objects,
        )
        self.validates = has_step and has_loader and trainer.limit_val_batches != 0
        if has_step and not has_loader and trainer.limit_val_batches != 0:
            self.state.warn_once(
                "the module has a validation_step, but there are no validation dataloaders: "
                "nothing is validated."
            )
        if has_loader and not has_step:
            self.state.warn_once(
                "there are validation dataloaders, but the module has no validation_step: "
                "nothing is validated."
            )

    def load_training(self) -> None:
        """Make the training dataloader, unless it is there and need not be made again."""
        trainer = self.trainer
        if trainer.limit_train_batches == 0 or not self._is_due(
            self.loader, self._epoch_of_training
        ):
            return
        self._epoch_of_training = trainer.current_epoch
        train = dataloaders.one_loader(dataloaders.find_loader(trainer, "train", self.given))
        same_everywhere(
            self.strategy.world,
            "the kind of training dataloader (with a length, or without)",
            dataloaders.num_batches(train) < float("inf"),
            self.strategy.gather_objects,
        )
        advice.on_workers(trainer, "train", [train])
        self.loader = dataloaders.prepare_for_rank(trainer, train, training=True)
        self.length = dataloaders.num_batches(self.loader)
        name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"
        limited = dataloaders.limit_batches(self.length, trainer.limit_train_batches, name)
        self.batches = self._shortest_of_ranks(limited)
        if self.batches == 0:
            self.state.warn_once(
                "the training dataloader has no batches: nothing is learned in this fit."
            )
        advice.on_log_interval(trainer, self.batches)
        data = self.state.data
        data.train_dataloader = self.loader
        data.num_training_batches = self.batches
        data.val_check_batch = arguments.batches_between_validations(
            trainer, self.batches, self.validates
        )

    def load_validation(self) -> None:
        """Make the validation dataloaders, as `load_training` makes the training one."""
        trainer = self.trainer
        if not self.validates or not self._is_due(self.validation, self._epoch_of_validation):
            return
        # A sanity check does not count as this epoch's validation, if there will be none.
        if self.validates_in_epoch() or not self.state.sanity_checking:
            self._epoch_of_validation = trainer.current_epoch
        found = dataloaders.as_list(dataloaders.find_loader(trainer, "val", self.given))
        same_everywhere(
            self.strategy.world,
            "the number of validation dataloaders",
            len(found),
            self.strategy.gather_objects,
        )
        self.validation = EvaluationLoop(trainer, "validate", found)

    def validates_in_epoch(self) -> bool:
        """Whether there is a validation in this epoch."""
        every = self.trainer.check_val_every_n_epoch
        return self.validates and (
            every is None or (self.trainer.current_epoch + 1) % every == 0
        )

    def _is_due(self, loaded: Any, epoch: float) -> bool:
        """Whether there are no dataloaders, or reload_dataloaders_every_n_epochs is due."""
        every = self.trainer.reload_dataloaders_every_n_epochs
        return loaded is None or bool(every and self.trainer.current_epoch - epoch >= every)

    def _shortest_of_ranks(self, batches: float) -> float:
        """Return the smallest number of batches of any rank; unsharded loaders can differ."""
        if self.length == float("inf"):
            return batches
        longest, negative = self.strategy.all_reduce_max([int(batches), -int(batches)])
        shortest = -negative
        if shortest < longest:
            self.state.warn_once(
                f"the ranks' dataloaders have from {shortest} to {longest} batches: every "
                f"epoch ends after {shortest}."
            )
        return shortest
