"""Training: epochs and batches, with validation, schedulers and what is logged.

FitLoop.fit → train_epoch → train_batch → step.py is a batch's way.
"""

from collections.abc import Iterator
from typing import Any

import torch

from multigpu.elastic.checkpoint_file import random_states, set_random_states
from multigpu.errors import UserError
from multigpu.trainer import dataloaders, epoch_outputs, optimizers
from multigpu.trainer.fit_data import FitData
from multigpu.trainer.refused import refuse
from multigpu.trainer.run import Run
from multigpu.trainer.settings import Settings
from multigpu.trainer.state import State
from multigpu.trainer.step import Step

END = object()


class FitLoop:
    """Trains for epochs.

    step                 forward, backward and the optimizer's step
    last                 whether the running batch is the epoch's last
    batches_done         batches of this epoch, with the running one; 0 between epochs
    total_batches        batches of all epochs that are complete
    todo                 the work still to do at the end of the last batch: "validate", "rest"
                         or "" (nothing)
    epoch_done           whether the epoch's batches are complete, and only its end goes on
    epoch_start_states   random states at the epoch's start: a resumed epoch must shuffle in
                         the same order
    states_after_skip    random states to set once a resumed epoch has skipped its first
                         batches
    """

    def __init__(self, run: Run, data: FitData):
        self.run = run
        self.data = data
        self.results = run.log.results
        self.state = run.state
        self.automatic = run.module.automatic_optimization
        self.step: Step | None = None
        self.last = False
        self.batches_done = 0
        self.total_batches = 0
        self.todo = ""
        self.epoch_done = False
        self.epoch_start_states: dict[str, Any] | None = None
        self.states_after_skip: dict[str, Any] | None = None

    # ---- epochs ----------------------------------------------------------------------------

    def fit(self) -> None:
        """Train until a limit is reached, or a hook sets should_stop."""
        run = self.run
        self.data.load_training()
        if not self.data.batches:
            return
        reason = reason_to_stop(run.settings, run.state)
        if not reason:
            if self.data.validates and run.settings.validates_in(self.state.current_epoch):
                self.data.load_validation()
            run.call("on_train_start")
            self._prepare()
            self._agree()
            while not (reason := reason_to_stop(run.settings, run.state)):
                self.train_epoch()
                self._agree()
            run.call("on_train_end")
        if reason:
            run.report(f"`Trainer.fit` stopped: {reason}.")

    @property
    def together(self) -> bool:
        """Whether no rank goes on alone, as async's ranks do."""
        strategy = self.run.strategy
        return strategy.ranks_step_together or strategy.control is None

    def train_epoch(self) -> None:
        run = self.run
        run.log.results = self.results
        epoch = self.state.current_epoch
        dataloaders.start_epoch(self.data.loader, epoch)
        self.epoch_done = False
        run.call("on_train_epoch_start")
        run.strategy.start_epoch(run.model)
        for batch, index, last in self.batches():
            self.train_batch(batch, index, last)
            self._end_batch()
            if self._is_done_within_epoch():
                break
        self.batches_done = 0
        self.epoch_done = True
        self._end_epoch()

    def batches(self) -> Iterator[tuple[Any, int, bool]]:
        """Give (batch, its index, whether it is the last) for the batches still to do.

        A resumed epoch skips the batches that are done. A loader without a length is read one
        batch ahead, to know which batch is the last.
        """
        if self.epoch_start_states is not None and self.states_after_skip is not None:
            set_random_states(self.epoch_start_states)
        else:
            self.epoch_start_states = random_states()
        iterator = iter(self.data.loader)
        for _ in range(self.batches_done):
            next(iterator, END)
        if self.states_after_skip is not None:
            set_random_states(self.states_after_skip)
            self.states_after_skip = None
        limit = self.data.batches
        looks_ahead = self.data.length == float("inf")
        index = self.batches_done
        following = next(iterator, END) if looks_ahead and index < limit else None
        if index:
            self.last = index >= limit or following is END
            if self.todo:  # the checkpoint was written at a batch's end: finish this batch
                self._finish_batch()
        while index < limit:
            if looks_ahead:
                batch = following
                following = END if index + 1 >= limit else next(iterator, END)
                batch, following = self._end_together(batch, following)
            else:
                batch = next(iterator, END)
            if batch is END:
                return
            yield batch, index, index + 1 >= limit or following is END
            index += 1

    def _end_together(self, *batches: Any) -> list[Any]:
        """The batches; what is END on any rank becomes END on all ranks."""
        if not self.together:
            return list(batches)
        ends = self.run.strategy.all_reduce_max([int(batch is END) for batch in batches])
        return [END if end else batch for end, batch in zip(ends, batches, strict=True)]

    def _end_epoch(self) -> None:
        run = self.run
        metrics = run.state.metrics
        metrics.update(self.results.epoch_metrics())
        if self.epoch_outputs is not None:
            self.epoch_outputs.call(run)
        run.call("on_train_epoch_end")
        # Over all ranks, because the decisions of those that monitor must be the same on each.
        reported = self.results.epoch_metrics()
        metrics.update(reported)
        run.call_monitors("on_train_epoch_end")
        if self.last:
            self.step_schedulers("epoch", plateau=True)
        run.log.send(reported, offset=-1)  # an epoch's values are those of its last step
        self.results.reset()
        self.state.current_epoch += 1
        self.epoch_done = False

    def _prepare(self) -> None:
        """Look up what every batch needs, after on_train_start, which can add callbacks."""
        run = self.run
        run.refresh_hooks()
        self.step = Step(run)
        self.epoch_outputs = epoch_outputs.collect(run.module, "training_epoch_end")

    # ---- a batch ---------------------------------------------------------------------------

    def train_batch(self, batch: Any, index: int, last: bool) -> None:
        run = self.run
        step = self.step
        self.last = last
        self.batches_done = index + 1
        self.total_batches += 1
        steps = last or (index + 1) % run.settings.accumulate_grad_batches == 0
        batch = run.transfer(batch)
        self.results.start_batch(batch)
        if run.call("on_train_batch_start", batch, index) == -1:
            refuse("on_train_batch_start that returns -1")
        with run.log.within("training_step"):
            if not self.automatic:
                output = step.forward(batch, index)
            elif steps:
                output = step.gradients_and_step(batch, index)
            else:
                with run.strategy.no_sync(run.model):
                    output = step.gradients(batch, index)
        if steps:
            self.step_schedulers("step")
        if last:
            self.step_schedulers("epoch")
        self.todo = "validate"
        outputs = _outputs(output)
        self._report(outputs, batch, index, steps)
        if self.epoch_outputs is not None:
            self.epoch_outputs.add(outputs or None)

    def _report(self, outputs: dict, batch: Any, index: int, steps: bool) -> None:
        """Give logged values to callbacks and, every log_every_n_steps steps, to loggers."""
        run = self.run
        results = self.results
        metrics = run.state.metrics
        every = run.settings.log_every_n_steps
        logs = steps and bool(every) and (self.state.batches_that_stepped + 1) % every == 0
        metrics.update(results.step_metrics(self.together))
        if any(run.find_hooks("on_train_batch_end")):
            run.call("on_train_batch_end", outputs, batch, index)
            metrics.update(results.step_metrics(self.together))
        if logs or (run.settings.fast_dev_run and steps):
            # Also values of earlier batches: a name that is logged only in some batches would
            # otherwise be lost.
            run.log.send(results.last_step_metrics())

    def _end_batch(self) -> None:
        """Validate if it is due, and let the ranks agree on should_stop."""
        if self.together:  # before the validation, which a rank must not begin alone
            self._agree()
        validated = self._finish_batch()
        if validated and self.together:
            self._agree()

    def _finish_batch(self) -> bool:
        """Validate and step schedulers, where this is due. Returns whether it validated."""
        run = self.run
        steps = self.last or self.batches_done % run.settings.accumulate_grad_batches == 0
        validates = self.todo == "validate" and self._validation_is_due()
        self.todo = "rest"
        if validates:
            if steps:
                run.module.zero_grad()  # frees the memory of the gradients
            self.data.load_validation()
            self.data.validation.evaluate()
        if steps:
            self.step_schedulers("step", plateau=True)
            self.state.batches_that_stepped += 1
        self.todo = ""
        return validates

    def _validation_is_due(self) -> bool:
        run = self.run
        if not self.data.validates or not run.settings.validates_in(self.state.current_epoch):
            return False
        batches = self.data.batches_between_validations
        if self.together:
            if may_stop(run.settings, run.state):  # else only this rank may want to stop
                return True
        elif self.data.length == float("inf") and batches != float("inf"):
            raise UserError(
                f"val_check_interval={run.settings.val_check_interval}, but with "
                f"{run.strategy.name} the ranks can have different numbers of batches from a "
                f"dataloader without a length: leave val_check_interval out, to validate "
                f"after each epoch."
            )
        if batches == float("inf"):
            return self.last
        across_epochs = run.settings.check_val_every_n_epoch is None
        done = self.total_batches if across_epochs else self.batches_done
        return done % batches == 0

    def step_schedulers(self, interval: str, plateau: bool = False) -> None:
        """Step the schedulers of this interval, in automatic optimization.

        plateau   True: schedulers that need a metric, once it is known; False: the others
        """
        run = self.run
        if not self.automatic:
            return
        for config in run.schedulers:
            if config.reduce_on_plateau != plateau or config.interval != interval:
                continue
            count = self.batches_done if interval == "step" else self.state.current_epoch + 1
            if count % config.frequency:
                continue
            metric = None
            if plateau:
                metric = optimizers.monitored_metric(run, config)
                if metric is None:
                    continue
            with run.log.within("lr_scheduler_step"):
                run.module.lr_scheduler_step(config.scheduler, metric)

    # ---- the end ---------------------------------------------------------------------------

    def _agree(self) -> None:
        """Set should_stop on all ranks if it is set on one: the others would wait for it."""
        state = self.run.state
        (stop,) = self.run.strategy.all_reduce_max([int(state.should_stop)])
        state.should_stop = bool(stop)

    def _is_done_within_epoch(self) -> bool:
        settings = self.run.settings
        state = self.run.state
        # A rank that goes on alone stops with the epoch, when all ranks agree.
        stops = self.together and may_stop(settings, state)
        return stops or steps_are_made(settings, state)

    def estimated_steps(self) -> float:
        """The number of optimizer steps in the whole run; infinity if nothing limits it."""
        settings = self.run.settings
        self.data.load_training()
        steps = float("inf")
        if settings.max_epochs != -1 and self.data.batches != float("inf"):
            steps = -(-self.data.batches // settings.accumulate_grad_batches)
            steps *= settings.max_epochs
        if settings.max_steps != -1:
            steps = min(steps, settings.max_steps)
        return steps if steps == float("inf") else int(steps)


def reason_to_stop(settings: Settings, state: State) -> str:
    """Why no further epoch begins, in Lightning's words; "" if one begins."""
    if steps_are_made(settings, state):
        return f"`max_steps={settings.max_steps}` reached"
    limited = settings.max_epochs not in (None, -1)
    if limited and state.current_epoch >= settings.max_epochs:
        return f"`max_epochs={settings.max_epochs}` reached"
    return "`trainer.should_stop` was set" if may_stop(settings, state) else ""


def steps_are_made(settings: Settings, state: State) -> bool:
    """Whether max_steps is reached; a manual training_step can make several steps."""
    return settings.max_steps != -1 and state.global_step >= settings.max_steps


def may_stop(settings: Settings, state: State) -> bool:
    """Whether should_stop is set, and min_epochs and min_steps are reached."""
    return (
        state.should_stop
        and state.current_epoch >= (settings.min_epochs or 0)
        and state.global_step >= (settings.min_steps or 0)
    )


def _outputs(output: Any) -> dict[str, Any]:
    """on_train_batch_end's `outputs`: a dict whose loss is detached from its graph."""
    if output is None:
        return {}
    outputs = output if isinstance(output, dict) else {"loss": output}
    loss = outputs.get("loss")
    if isinstance(loss, torch.Tensor):
        return {**outputs, "loss": loss.detach()}
    return outputs
