"""How does training run? Epochs of batches, and what is due between them: validation, schedulers, checkpoints, the end."""

from collections.abc import Iterator
from typing import Any

import torch

from multigpu.checkpoint import random_states, set_random_states
from multigpu.trainer import arguments
from multigpu.trainer.loops import call_hooks, dataloaders, optimizers
from multigpu.trainer.loops.evaluate import Evaluation
from multigpu.trainer.loops.training_step import TrainingStep
from multigpu.trainer.loops.transfer import transfer

END = object()


class FitLoop:
    """One training run. The Trainer holds the settings and what users look at; learning.py has what is done with a batch.

    batches_done   batches of this epoch that are behind us; 0 between epochs
    to_do          what the end of the last of them still asks for: "validate", "rest", or nothing
    """

    def __init__(self, trainer: Any, loader: Any, validation: Evaluation | None):
        self.trainer, self.module, self.strategy = (
            trainer,
            trainer.lightning_module,
            trainer.strategy,
        )
        self.validation = validation
        self.loader = loader
        self.length = dataloaders.length(loader)
        limit, name = (
            trainer.limit_train_batches,
            ("overfit_batches" if trainer.overfit_batches else "limit_train_batches"),
        )
        self.batches_of_epoch = self._shortest(dataloaders.limited(self.length, limit, name))
        if self.batches_of_epoch == 0 and limit != 0:
            trainer.warn_once(
                "the training dataloader has no batches: nothing is learned in this fit."
            )
        self.batches_done = self.total_batches = 0
        self.to_do = ""
        self.syncing = True  # do the ranks exchange each step's values? see results.py
        self.last = self.epoch_ended = False
        self.epoch_began: dict | None = (
            None  # random states: an epoch that is resumed must be shuffled as before
        )
        self.after_skip: dict | None = None
        self.learning: TrainingStep | None = None

    def _shortest(self, mine: float) -> float:
        """Loaders that are not dealt out may be uneven: all ranks end an epoch with the first, as with streams."""
        if self.length == float("inf"):
            return mine
        longest, negative = self.strategy.largest([int(mine), -int(mine)])
        if (shortest := -negative) < longest:
            self.trainer.warn_once(
                f"the ranks' dataloaders have from {shortest} to {longest} batches: every epoch ends after {shortest}."
            )
        return shortest

    # ---- the run ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        trainer = self.trainer
        if self.batches_of_epoch == 0:
            return
        self._prepare()
        iterator = self._iterator()
        call_hooks.call(trainer, "on_train_start")
        self._look_up()  # who is called with every batch: on_train_start may have added callbacks
        while not self._finished():
            trainer.results, trainer.training = self.results, True
            dataloaders.start_epoch(self.loader, trainer.current_epoch)
            self.epoch_ended = False
            call_hooks.call(trainer, "on_train_epoch_start")
            self.strategy.start_epoch(trainer.model)
            self._epoch(self._iterator() if iterator is None else iterator)
            iterator = None
            if trainer.interrupted:
                break
            self._end_epoch()
        if not trainer.interrupted and self.strategy.largest([trainer.signals.asked])[0]:
            trainer.signals.stop(trainer)  # it came in the last epoch's end
        call_hooks.call(trainer, "on_train_end")

    def _prepare(self) -> None:
        trainer, module = self.trainer, self.module
        self.results = trainer.results
        self.automatic = module.automatic_optimization
        trainer.num_training_batches = self.batches_of_epoch
        trainer.val_check_batch = arguments.batches_between_validations(
            trainer, self.batches_of_epoch, bool(self.validation)
        )

    def _look_up(self) -> None:
        trainer = self.trainer
        self.start, self.end = (
            call_hooks.at(trainer, "on_train_batch_start"),
            call_hooks.at(trainer, "on_train_batch_end"),
        )
        self.heard = bool(
            self.strategy.largest([int(self.end is not None)])[0]
        )  # does any rank look at a batch's end?
        self.fetch = trainer.profiled("train_dataloader_next", next)
        self.learning = TrainingStep(trainer)

    def _finished(self) -> bool:
        trainer = self.trainer
        if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
            return True
        if (
            trainer.max_epochs not in (None, -1)
            and trainer.current_epoch >= trainer.max_epochs
        ):
            return True
        return self._may_stop()

    def _may_stop(self) -> bool:
        """Somebody set trainer.should_stop, and the least that was asked for is done."""
        trainer = self.trainer
        epochs = trainer.current_epoch + (self.batches_done == 0 and self.epoch_ended)
        return (
            trainer.should_stop
            and epochs >= (trainer.min_epochs or 0)
            and trainer.global_step >= (trainer.min_steps or 0)
        )

    # ---- an epoch -----------------------------------------------------------------------------------------------

    def _iterator(self) -> Iterator:
        """The epoch's batches. In an epoch that is resumed, those that were done are passed over."""
        if self.epoch_began is not None and self.after_skip is not None:
            set_random_states(self.epoch_began)
        else:
            self.epoch_began = random_states()
        dataloaders.start_epoch(self.loader, self.trainer.current_epoch)
        iterator = iter(self.loader)
        for _ in range(self.batches_done):
            next(iterator, END)
        if self.after_skip is not None:
            set_random_states(self.after_skip)
            self.after_skip = None
        return iterator

    def _epoch(self, iterator: Iterator) -> None:
        trainer, strategy, limit = self.trainer, self.strategy, self.batches_of_epoch
        many, index, skipped = strategy.control is not None, self.batches_done, False
        unsized = self.length == float("inf")
        following = next(iterator, END) if unsized and index < limit else None
        self.last = index >= limit or following is END
        if index and self.to_do:  # a run that was saved within a batch's end
            self._end_batch(index - 1, self.last)
        while index < limit and not skipped:
            if unsized:  # to know which batch is the last, one is fetched ahead
                batch, following = (
                    following,
                    END if index + 1 >= limit else self.fetch(iterator, END),
                )
                if (
                    many
                ):  # some rank has no more: all of them end with this batch, or without one
                    none, no_more = strategy.largest(
                        [int(batch is END), int(following is END)]
                    )
                    batch, following = END if none else batch, END if no_more else following
            else:
                batch = self.fetch(iterator, END)
            if batch is END:
                break
            self.index, self.last = index, index + 1 >= limit or following is END
            index += 1
            self.batches_done, self.total_batches = index, self.total_batches + 1
            skipped = self._batch(batch, self.index, self.last)
            asked = trainer.signals.asked
            if many:  # a rank that stops alone leaves the others waiting
                asks = [asked, int(trainer.should_stop), int(self.results.sync_asked)]
                asked, trainer.should_stop, self.syncing = map(bool, strategy.largest(asks))
            if asked:
                trainer.signals.stop(trainer)
                return
            if self._finished_within():
                break
        self.batches_done, self.epoch_ended = 0, True

    def _finished_within(self) -> bool:
        trainer = self.trainer
        enough = (
            trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        )  # a batch may make several steps
        return enough or (trainer.should_stop and self._may_stop())

    def _end_epoch(self) -> None:
        trainer = self.trainer
        trainer.take(
            self.results.epoch_metrics()
            if self.results.entries or trainer.world_size > 1
            else None
        )
        before = len(self.results.entries)
        call_hooks.call(trainer, "on_train_epoch_end")
        if before != len(self.results.entries) or trainer.world_size > 1:
            trainer.take(self.results.epoch_metrics())
        if self.automatic and self.last:
            self.schedule("epoch", plateau=True)
        trainer.send(
            trainer.last_told, step=trainer._logged_step - 1
        )  # an epoch's values stand at its last step
        self.results.reset()
        trainer.last_told = None
        trainer.current_epoch += 1
        self.epoch_ended = False

    # ---- a batch ------------------------------------------------------------------------------------------------

    def _batch(self, batch: Any, index: int, last: bool) -> bool:
        """True if the rest of the epoch is to be skipped: on_train_batch_start gave -1."""
        trainer, results = self.trainer, self.results
        batch = transfer(trainer, batch)
        results.start_batch(batch)
        if self.start is not None and self.start(batch, index) == -1:
            if self.automatic:  # the epoch ends here
                self.schedule("step", plateau=False)
                self.schedule("epoch", plateau=False)
            return True
        stepping = last or (index + 1) % trainer.accumulate_grad_batches == 0
        results.hook = "training_step"
        output = self.learning.learn(batch, index, stepping)
        results.hook = ""
        if trainer.lr_scheduler_configs and self.automatic:
            if stepping:
                self.schedule("step", plateau=False)
            if last:
                self.schedule("epoch", plateau=False)
        self.to_do = "validate"
        self._tell(output, batch, index, stepping)
        self._end_batch(index, last)
        return False

    def _end_batch(self, index: int, last: bool) -> None:
        trainer = self.trainer
        stepping = last or (index + 1) % trainer.accumulate_grad_batches == 0
        due = (
            self.to_do == "validate" and self.validation is not None and self._due(index, last)
        )
        self.to_do, self.index = "rest", index
        if due:
            if stepping:
                self.module.on_validation_model_zero_grad()
            self.validation.run()
            trainer.results, trainer.training = self.results, True
        if stepping:
            if trainer.lr_scheduler_configs and self.automatic:
                self.schedule("step", plateau=True)
            trainer._logged_step += 1
        self.to_do = ""

    def _tell(self, output: Any, batch: Any, index: int, stepping: bool) -> None:
        trainer, results = self.trainer, self.results
        syncing = self.syncing and results.ranks > 1
        if self.heard and (syncing or results.any_fresh):
            trainer.take(results.step_metrics(exchange=syncing))
        if self.end is not None:
            self.end(_outputs(output), batch, index)
        every = trainer.log_every_n_steps
        logged = stepping and bool(every) and (trainer._logged_step + 1) % every == 0
        exchange = results.ranks > 1 and (logged or syncing)
        if results.any_fresh or exchange:
            told = results.step_metrics(exchange)
            trainer.take(told)
            if logged or (trainer.fast_dev_run and stepping):
                trainer.send(told)

    # ---- when ---------------------------------------------------------------------------------------------------

    def _due(self, index: int, last: bool) -> bool:
        """Is it time to validate?"""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        if every is not None and (trainer.current_epoch + 1) % every:
            return False
        if trainer.should_stop and self._may_stop():
            return True
        if trainer.val_check_batch == float("inf"):
            return last
        return (
            self.total_batches if every is None else index + 1
        ) % trainer.val_check_batch == 0

    def schedule(self, interval: str, plateau: bool) -> None:
        """Step the schedulers of this interval: those that watch a metric after it is known, the others before."""
        trainer = self.trainer
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau != plateau or config.interval != interval:
                continue
            at = (self.index if interval == "step" else trainer.current_epoch) + 1
            if at % config.frequency:
                continue
            metric = None
            if plateau:
                metric = optimizers.watched(trainer, config)
                if metric is None:
                    continue
            with trainer.results.within("lr_scheduler_step"):
                self.module.lr_scheduler_step(config.scheduler, metric)


def _outputs(output: Any) -> dict[str, Any]:
    """What on_train_batch_end is given: a dict, and the loss in it without its graph."""
    found = {} if output is None else output if isinstance(output, dict) else {"loss": output}
    loss = found.get("loss")
    return {**found, "loss": loss.detach()} if isinstance(loss, torch.Tensor) else found
