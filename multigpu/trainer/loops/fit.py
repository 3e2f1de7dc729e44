"""Runs training: epochs and batches, with validation, schedulers and checkpoints."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from multigpu.checkpoint import random_states, set_random_states
from multigpu.errors import UserError
from multigpu.trainer.loops import advice, call_hooks, dataloaders, epoch_outputs, optimizers
from multigpu.trainer.loops.fit_data import FitData
from multigpu.trainer.loops.limits import may_stop, reason_to_stop
from multigpu.trainer.loops.log_context import LogContext
from multigpu.trainer.loops.loggers import send_to_loggers
from multigpu.trainer.loops.optimizer_step import OptimizerStep
from multigpu.trainer.loops.sigterm import save_and_interrupt
from multigpu.trainer.loops.training_step import TrainingStep

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer

END = object()


class FitLoop:
    """Runs the epochs of one training run. training_step.py trains on each batch.

    batches_done         batches of this epoch that are complete; 0 between epochs
    total_batches        batches of all epochs that are complete
    pending_phase        the work still to do at the end of the last batch: "validate", "rest"
                         or "" (nothing)
    epoch_start_states   random states at the epoch's start: a resumed epoch must shuffle in
                         the same order
    states_after_skip    random states to set once a resumed epoch has skipped its first
                         batches
    exchanges_steps      whether the ranks exchange every step's values; see results.py
    """

    def __init__(self, trainer: "Trainer", data: FitData):
        state = trainer.state
        self.trainer = trainer
        self.state = state
        self.progress = state.progress
        self.module = state.lightning_module
        self.strategy = trainer.strategy
        self.results = state.results
        self.data = data
        self.batches_done = 0
        self.total_batches = 0
        self.pending_phase = ""
        self.exchanges_steps = True
        self.last = False
        self.epoch_ended = False
        self.epoch_start_states: dict[str, Any] | None = None
        self.states_after_skip: dict[str, Any] | None = None
        self.training_step: TrainingStep | None = None

    def estimated_steps(self) -> float:
        """The number of optimizer steps in the whole run; infinity if nothing limits it."""
        trainer = self.trainer
        self.data.load_training()
        batches = self.data.batches
        if trainer.max_epochs == -1 or batches == float("inf"):
            steps = float("inf")
        else:
            steps = -(-batches // trainer.accumulate_grad_batches) * trainer.max_epochs
        if trainer.max_steps != -1:
            steps = min(steps, trainer.max_steps)
        return int(steps) if steps != float("inf") else steps

    # ---- the run ----------------------------------------------------------------------------

    def run(self) -> None:
        trainer = self.trainer
        state = self.state
        self.data.load_training()
        if self.data.batches == 0:
            return
        if reason := reason_to_stop(trainer):
            trainer.report(f"`Trainer.fit` stopped: {reason}.")
            return
        self.automatic = self.module.automatic_optimization
        iterator = self._iterator()
        if self.data.validation is None and self.data.validates_in_epoch():
            self.data.load_validation()
        call_hooks.call(trainer, "on_train_start")
        self._look_up()
        while not (reason := self._agree_to_stop()):
            state.results = self.results
            if iterator is None:
                self.data.load_training()
            dataloaders.start_epoch(self.data.loader, self.progress.current_epoch)
            self.epoch_ended = False
            call_hooks.call(trainer, "on_train_epoch_start")
            self.strategy.start_epoch(state.model)
            self._epoch(self._iterator() if iterator is None else iterator)
            iterator = None
            if state.interrupted:
                break
            self._end_epoch()
        if not state.interrupted and self.strategy.all_reduce_max([state.sigterm.received])[0]:
            save_and_interrupt(trainer)  # the signal came at the last epoch's end
        call_hooks.call(trainer, "on_train_end")
        if reason:
            trainer.report(f"`Trainer.fit` stopped: {reason}.")

    def _look_up(self) -> None:
        """Look up what every batch needs, after on_train_start, which can add callbacks."""
        trainer = self.trainer
        state = self.state
        call_hooks.attach_callbacks(trainer)
        self.transfer = None if state.transfer.nothing_to_do else state.transfer
        self.step_context = LogContext(self.results, "training_step")
        self.batch_start = call_hooks.lookup(trainer, "on_train_batch_start")
        self.batch_end = call_hooks.lookup(trainer, "on_train_batch_end")
        # All ranks exchange values at a batch's end if any rank has a hook that can read them.
        has_batch_end = int(self.batch_end is not None)
        self.any_batch_end = bool(self.strategy.all_reduce_max([has_batch_end])[0])
        self.epoch_outputs = epoch_outputs.collect(self.module, "training_epoch_end")
        self.fetch = next
        state.optimizer_step = OptimizerStep(trainer)
        self.training_step = TrainingStep(trainer)

    def _agree_to_stop(self) -> str:
        """Set should_stop on all ranks if a hook has set it on one; return reason_to_stop."""
        should_stop = int(self.state.should_stop)
        self.state.should_stop = bool(self.strategy.all_reduce_max([should_stop])[0])
        return reason_to_stop(self.trainer)

    # ---- an epoch ---------------------------------------------------------------------------

    def _iterator(self) -> Iterator:
        """Return an iterator over the epoch's batches.

        In a resumed epoch, it skips the batches that are already done.
        """
        if self.epoch_start_states is not None and self.states_after_skip is not None:
            set_random_states(self.epoch_start_states)
        else:
            self.epoch_start_states = random_states()
        loader = self.data.loader
        dataloaders.start_epoch(loader, self.progress.current_epoch)
        iterator = iter(loader)
        for _ in range(self.batches_done):
            next(iterator, END)
        if self.states_after_skip is not None:
            set_random_states(self.states_after_skip)
            self.states_after_skip = None
        return iterator

    def _epoch(self, iterator: Iterator) -> None:
        state = self.state
        strategy = self.strategy
        sigterm = state.sigterm
        limit = self.data.batches
        several_ranks = strategy.control is not None
        index = self.batches_done
        skipped = False
        # A loader without a length is read one batch ahead, to know which batch is the last.
        unsized = self.data.length == float("inf")
        following = next(iterator, END) if unsized and index < limit else None
        self.last = index >= limit or following is END
        # The checkpoint was written at a batch's end: finish this batch.
        if index and self.pending_phase:
            self._end_batch(index - 1, self.last)
        while index < limit and not skipped:
            if unsized:
                batch = following
                following = END if index + 1 >= limit else self.fetch(iterator, END)
                if several_ranks and strategy.ranks_step_together:
                    batch, following = self._end_together(batch, following)
            else:
                batch = self.fetch(iterator, END)
            if batch is END:
                break
            last = index + 1 >= limit or following is END
            self.index = index
            self.last = last
            self.batches_done = index + 1
            self.total_batches += 1
            skipped = self._batch(batch, index, last)
            together = several_ranks and strategy.ranks_step_together
            if together:  # before the validation, which a rank must not begin alone
                interrupt = self._agree_after_batch()
            validated = not skipped and self._end_batch(index, last)
            if not several_ranks:
                interrupt = sigterm.received
            elif validated or not together:
                interrupt = self._agree_after_batch()
            index += 1
            if interrupt:
                save_and_interrupt(self.trainer)
                return
            if self._finished_within_epoch():
                break
        if several_ranks and not strategy.ranks_step_together:
            interrupt, stop, _ = strategy.agree_after_epoch(
                [sigterm.received, int(state.should_stop), 0]
            )
            state.should_stop = bool(stop)
            if interrupt:
                save_and_interrupt(self.trainer)
                return
        self.batches_done = 0
        self.epoch_ended = True

    def _agree_after_batch(self) -> int:
        """Let the ranks agree on should_stop; a rank that stops alone leaves others waiting.

        Returns 1 if any rank has received a SIGTERM, else 0.
        """
        state = self.state
        strategy = self.strategy
        interrupt = state.sigterm.received
        exchange = self.results.sync_steps and strategy.ranks_step_together
        interrupt, stop, exchange = strategy.agree_after_batch(
            [interrupt, int(state.should_stop), int(exchange)]
        )
        state.should_stop = bool(stop)
        self.exchanges_steps = bool(exchange)
        return interrupt

    def _end_together(self, batch: Any, following: Any) -> tuple[Any, Any]:
        """Return (batch, following); what is END on any rank becomes END on all ranks."""
        no_batch, no_following = self.strategy.all_reduce_max(
            [int(batch is END), int(following is END)]
        )
        return END if no_batch else batch, END if no_following else following

    def _finished_within_epoch(self) -> bool:
        max_steps = self.trainer.max_steps
        # >=: in manual optimization, one batch can make several steps.
        if max_steps != -1 and self.progress.global_step >= max_steps:
            return True
        return self.state.should_stop and may_stop(self.trainer)

    def _end_epoch(self) -> None:
        trainer = self.trainer
        results = self.results
        metrics = self.state.metrics
        several_ranks = trainer.world_size > 1
        logged = results.entries or several_ranks
        metrics.update(results.epoch_metrics() if logged else None)
        before = len(results.entries)
        if self.epoch_outputs is not None:
            self.epoch_outputs.call(self.state)
        call_hooks.call(trainer, "on_train_epoch_end")
        if before != len(results.entries) or several_ranks:
            metrics.update(results.epoch_metrics())
        if self.automatic and self.last:
            self.schedule("epoch", plateau=True)
        # The loggers write an epoch's values at its last step.
        send_to_loggers(trainer, metrics.latest, offset=-1)
        advice.on_missing_logger(trainer, results)
        results.reset()
        metrics.latest = None
        self.progress.current_epoch += 1
        self.epoch_ended = False

    # ---- a batch ----------------------------------------------------------------------------

    def _batch(self, batch: Any, index: int, last: bool) -> bool:
        """Train on a batch.

        Returns True if on_train_batch_start returned -1: the rest of the epoch is skipped.
        """
        if self.transfer is not None:
            batch = self.transfer(batch)
        self.results.start_batch(batch)
        if self.batch_start is not None and self.batch_start(batch, index) == -1:
            if self.automatic:  # the epoch ends with this batch
                self.schedule("step", plateau=False)
                self.schedule("epoch", plateau=False)
            return True
        completes_step = last or (index + 1) % self.trainer.accumulate_grad_batches == 0
        attributes = self.module.__dict__
        between_hooks = attributes["_log_context"]
        attributes["_log_context"] = self.step_context
        output = self.training_step.run(batch, index, completes_step)
        attributes["_log_context"] = between_hooks
        if self.state.lr_scheduler_configs and self.automatic:
            if completes_step:
                self.schedule("step", plateau=False)
            if last:
                self.schedule("epoch", plateau=False)
        self.pending_phase = "validate"
        self._report(output, batch, index, completes_step)
        if self.epoch_outputs is not None:
            self.epoch_outputs.add(_outputs(output) or None)
        return False

    def _end_batch(self, index: int, last: bool) -> bool:
        """Validate and step schedulers, where this is due. Returns whether it validated."""
        trainer = self.trainer
        state = self.state
        completes_step = last or (index + 1) % trainer.accumulate_grad_batches == 0
        validating = (
            self.data.validates
            and self.pending_phase == "validate"
            and self._validation_is_due(index, last)
        )
        self.pending_phase = "rest"
        self.index = index
        if validating:
            if completes_step:
                self.module.on_validation_model_zero_grad()
            self.data.load_validation()
            self.data.validation.run()
            state.results = self.results
        if completes_step:
            if state.lr_scheduler_configs and self.automatic:
                self.schedule("step", plateau=True)
            self.progress.batches_that_stepped += 1
        self.pending_phase = ""
        return validating

    def _report(self, output: Any, batch: Any, index: int, completes_step: bool) -> None:
        """Give logged values to callbacks and, every log_every_n_steps steps, to loggers."""
        trainer = self.trainer
        results = self.results
        metrics = self.state.metrics
        together = results.ranks > 1 and self.strategy.ranks_step_together
        exchanging = together and self.exchanges_steps
        if results.sync_steps and results.ranks > 1 and not together:
            self.state.warn_once(
                f"self.log(sync_dist=True) of a step: with {self.strategy.name} the ranks do "
                f"not wait for each other in a step, so the value is rank 0's; log it with "
                f"on_step=False, on_epoch=True for the mean over the ranks."
            )
        if self.any_batch_end and (exchanging or results.any_fresh):
            metrics.update(results.step_metrics(exchange=exchanging))
        if self.batch_end is not None:
            self.batch_end(_outputs(output), batch, index)
        every = trainer.log_every_n_steps
        logged = (
            completes_step
            and bool(every)
            and (self.progress.batches_that_stepped + 1) % every == 0
        )
        exchange = together and (logged or exchanging)
        if results.any_fresh or exchange:
            metrics.update(results.step_metrics(exchange))
        if logged or (trainer.fast_dev_run and completes_step):
            # Also values of earlier batches: a name that is logged only in some batches would
            # otherwise be lost.
            send_to_loggers(trainer, results.last_step_metrics())

    # ---- what is due ------------------------------------------------------------------------

    def _validation_is_due(self, index: int, last: bool) -> bool:
        every = self.trainer.check_val_every_n_epoch
        if every is not None and (self.progress.current_epoch + 1) % every:
            return False
        together = self.strategy.ranks_step_together  # else only this rank may want to stop
        if together and self.state.should_stop and may_stop(self.trainer):
            return True
        if not together:
            self._check_meeting_point()
        batches = self.state.data.val_check_batch
        if batches == float("inf"):
            return last
        done = self.total_batches if every is None else index + 1
        return done % batches == 0

    def _check_meeting_point(self) -> None:
        """Raises UserError if ranks that do not step together could validate apart."""
        name = self.strategy.name
        unsized = self.data.length == float("inf")
        if unsized and self.state.data.val_check_batch != float("inf"):
            raise UserError(
                f"val_check_interval={self.trainer.val_check_interval}, but with {name} the "
                f"ranks can have different numbers of batches from a dataloader without a "
                f"length: leave val_check_interval out, to validate after each epoch."
            )

    def schedule(self, interval: str, plateau: bool) -> None:
        """Step the schedulers of this interval.

        plateau   True: schedulers that need a metric, once it is known; False: the others
        """
        for config in self.state.lr_scheduler_configs:
            if config.reduce_on_plateau != plateau or config.interval != interval:
                continue
            count = (self.index if interval == "step" else self.progress.current_epoch) + 1
            if count % config.frequency:
                continue
            metric = None
            if plateau:
                metric = optimizers.monitored_metric(self.trainer, config)
                if metric is None:
                    continue
            with self.state.running_hook("lr_scheduler_step"):
                self.module.lr_scheduler_step(config.scheduler, metric)


def estimated_steps(trainer: "Trainer") -> float:
    """Return FitLoop.estimated_steps(). Raises UserError before `configure_optimizers`."""
    fit_loop = trainer.state.fit_loop
    if fit_loop is None:
        raise UserError(
            "trainer.estimated_stepping_batches is not known before configure_optimizers is "
            "called: read it in configure_optimizers or later."
        )
    return fit_loop.estimated_steps()


def _outputs(output: Any) -> dict[str, Any]:
    """Return on_train_batch_end's `outputs`: a dict whose loss is detached from its graph."""
    if output is None:
        return {}
    outputs = output if isinstance(output, dict) else {"loss": output}
    loss = outputs.get("loss")
    if isinstance(loss, torch.Tensor):
        return {**outputs, "loss": loss.detach()}
    return outputs
