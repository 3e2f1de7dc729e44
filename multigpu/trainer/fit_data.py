"""The data of a fit: requested from the user when it is first needed, as Lightning does.

configure_optimizers runs before the dataloaders are made, unless it asks for
trainer.estimated_stepping_batches. A sanity check makes the validation dataloaders first.
"""

from typing import Any

from multigpu.errors import UserError
from multigpu.launch.rendezvous import same_everywhere
from multigpu.trainer import dataloaders
from multigpu.trainer.evaluate import EvaluationLoop
from multigpu.trainer.run import Run


class FitData:
    """This rank's training batches, and the loop over the validation batches.

    All ranks must call each method equally often. Raises UserError if there is nothing to
    train on.

    loader       this rank's shard of the training dataloader; None before `load_training`
    length       the number of its batches; infinity if it has no length
    batches      the number of batches of an epoch, limited and equal on all ranks
    validation   the loop of validation; None before `load_validation`, or without validation
    validates    whether there is anything to validate with
    batches_between_validations   infinity: validate at the epoch's end
    """

    def __init__(self, run: Run):
        self.run = run
        self.loader: Any = None
        self.length: float = 0
        self.batches: float = 0
        self.batches_between_validations: float = 0
        self.validation: EvaluationLoop | None = None
        if not run.has_loader("train"):
            raise UserError(
                "trainer.fit has no training data: pass train_dataloaders= or datamodule=, or "
                "define the method train_dataloader in the module."
            )
        has_step = run.overrides("validation_step")
        has_loader = run.has_loader("val")
        self._same("whether there are validation dataloaders", has_loader)
        limited = run.settings.limit_val_batches == 0
        self.validates = has_step and has_loader and not limited
        if has_step != has_loader and not limited:
            missing = "validation dataloader" if has_step else "validation_step"
            run.state.warn_once(f"there is no {missing}: nothing is validated.")

    def load_training(self) -> None:
        """Make the training dataloader, unless it is there."""
        run = self.run
        settings = run.settings
        if self.loader is not None or settings.limit_train_batches == 0:
            return
        train = dataloaders.one_loader(dataloaders.find(run, "train"))
        sized = dataloaders.num_batches(train) < float("inf")
        self._same("the kind of training dataloader (with a length, or without)", sized)
        self.loader = dataloaders.prepare_for_rank(
            settings, run.strategy, train, training=True
        )
        self.length = dataloaders.num_batches(self.loader)
        limited = dataloaders.limit_batches(settings, self.length, "train")
        self.batches = self._shortest_of_ranks(limited)
        if self.batches == 0:
            run.state.warn_once(
                "the training dataloader has no batches: nothing is learned in this fit."
            )
        run.state.loaders["train"] = self.loader
        run.state.num_batches["train"] = self.batches
        self.batches_between_validations = settings.batches_between_validations(
            self.batches, self.validates
        )

    def load_validation(self) -> None:
        """Make the validation dataloaders, unless they are there."""
        if not self.validates or self.validation is not None:
            return
        loaders = dataloaders.as_list(dataloaders.find(self.run, "val"))
        self._same("the number of validation dataloaders", len(loaders))
        self.validation = EvaluationLoop(self.run, "validate", loaders)

    def _same(self, subject: str, value: Any) -> None:
        """Raises UserError on all ranks if the ranks' values differ."""
        strategy = self.run.strategy
        same_everywhere(strategy.world, subject, value, strategy.gather_objects)

    def _shortest_of_ranks(self, batches: float) -> float:
        """Return the smallest number of batches of any rank; unsharded loaders can differ."""
        if self.length == float("inf"):
            return batches
        strategy = self.run.strategy
        longest, negative = strategy.all_reduce_max([int(batches), -int(batches)])
        shortest = -negative
        if shortest < longest:
            self.run.state.warn_once(
                f"the ranks' dataloaders have from {shortest} to {longest} batches: every "
                f"epoch ends after {shortest}."
            )
        return shortest
