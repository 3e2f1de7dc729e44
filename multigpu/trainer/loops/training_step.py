"""What is done with a batch? Forward, backward, and every so often a step; the user's hooks stand between."""

import inspect
from typing import Any

import torch

from multigpu.errors import UserError
from multigpu.trainer.hooks import overridden
from multigpu.trainer.loops import call_hooks
from multigpu.trainer.loops.anomaly import refuse_what_is_not_finite
from multigpu.trainer.loops.optimizers import wants_closure
from multigpu.trainer.module import LightningModule


class TrainingStep:
    """Who overrides what is looked up once, before the first batch: a hook that nobody has costs nothing in the loop."""

    def __init__(self, trainer: Any):
        self.trainer, self.module, self.strategy = (
            trainer,
            trainer.lightning_module,
            trainer.strategy,
        )
        module = self.module
        names = (
            "on_before_zero_grad",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
        )
        self.before_zero, self.before_backward, self.after_backward, self.before_step = (
            call_hooks.at(trainer, name) for name in names
        )
        self.forward = trainer.profiled("training_step", self._forward)
        self.backward = trainer.profiled("backward", trainer.run_backward)
        self.step = trainer.profiled("optimizer_step", trainer.precision_plugin.step)
        self.automatic = module.automatic_optimization
        self.own_zero_grad = overridden("optimizer_zero_grad", module, LightningModule)
        self.own_clipping = overridden("configure_gradient_clipping", module, LightningModule)
        self.step_end = getattr(module, "training_step_end", None)
        self.giver = "training_step" if self.step_end is None else "training_step_end"
        first = trainer.optimizers[0] if trainer.optimizers else None
        self.own_step = first is not None and (
            overridden("optimizer_step", module, LightningModule) or wants_closure(first)
        )
        takes = inspect.signature(module.training_step).parameters
        self.takes_index = len(takes) > 1 or any(
            p.kind is p.VAR_POSITIONAL for p in takes.values()
        )
        if self.automatic and first is None:
            trainer.warn_once(
                "configure_optimizers returned None: nothing is learned in this fit."
            )

    def learn(self, batch: Any, index: int, stepping: bool) -> Any:
        """One batch, number `index` of its epoch; `stepping`: it completes a step. What `training_step` gave."""
        if not self.automatic:
            return self.forward(batch, index)
        if stepping:
            return self._step_on(batch, index)
        with self.strategy.no_sync(self.trainer.model):
            return self.gradients(batch, index)

    def _forward(self, batch: Any, index: int) -> Any:
        """What `training_step` returned, after training_step_end or the strategy's own merging."""
        trainer = self.trainer
        args = (batch, index) if self.takes_index else (batch,)
        if trainer.precision_plugin.plain:
            output = self.strategy.run_step(trainer.model, "training_step", *args)
        else:
            with trainer.precision_plugin.context():
                output = self.strategy.run_step(trainer.model, "training_step", *args)
        return (
            self.step_end(output) if self.step_end is not None else self.strategy.merge(output)
        )

    def gradients(self, batch: Any, index: int) -> Any:
        """Forward and backward of one batch, its loss divided by the number of batches that make a step."""
        trainer = self.trainer
        output = self.forward(batch, index)
        loss = output.get("loss") if isinstance(output, dict) else output
        if loss is None:
            self._nothing(index, output)
        elif not isinstance(loss, torch.Tensor):
            raise UserError(
                f"{self.giver} returned {type(loss).__name__}: expected the loss, a tensor, or a dict with 'loss'."
            )
        elif loss.numel() != 1:
            raise UserError(
                f"{self.giver} returned a loss of shape {tuple(loss.shape)}: expected one number. Take its mean."
            )
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        if optimizer is not None and index % trainer.accumulate_grad_batches == 0:
            if self.before_zero is not None:
                self.before_zero(optimizer)
            if self.own_zero_grad:
                self.module.optimizer_zero_grad(trainer.current_epoch, index, optimizer)
            else:
                optimizer.zero_grad()
        if loss is None:
            return None
        if trainer.accumulate_grad_batches > 1:
            loss = loss / trainer.accumulate_grad_batches
        if trainer.detect_anomaly:
            refuse_what_is_not_finite(trainer, loss, batch)
        if loss.requires_grad:
            self.backward(loss)
        elif optimizer is not None:
            raise UserError(
                "the loss does not depend on any parameter that learns: training_step returned a tensor without a graph."
            )
        if trainer.detect_anomaly:
            refuse_what_is_not_finite(trainer, loss, batch)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def _step_on(self, batch: Any, index: int) -> Any:
        """The batch that completes a step."""
        trainer = self.trainer
        if self.own_step:
            output = self._own_step_on(batch, index)
        else:
            output = self.gradients(batch, index)
            optimizer = trainer.optimizers[0] if trainer.optimizers else None
            if (
                output is None
                and trainer.precision_plugin.scaler is not None
                and self._nothing_to_step(optimizer)
            ):
                return None
            if optimizer is not None:
                self._complete(optimizer)
                with self.strategy.stepping(optimizer):
                    self.step(optimizer)
        trainer.global_step += 1
        return output

    def _own_step_on(self, batch: Any, index: int) -> Any:
        """By the user's optimizer_step, or an optimizer that calls the closure itself, perhaps several times."""
        trainer, kept = self.trainer, []

        def closure() -> Any:
            with torch.enable_grad():
                kept[:] = [self.gradients(batch, index)]
            self._complete(trainer.optimizers[0])
            return kept[0]["loss"] if isinstance(kept[0], dict) else kept[0]

        self.module.optimizer_step(trainer.current_epoch, index, trainer.steppers[0], closure)
        return kept[0] if kept else None

    @staticmethod
    def _nothing_to_step(optimizer: Any) -> bool:
        """No gradient at all: the scaler would have nothing to look at."""
        return optimizer is None or all(
            p.grad is None for group in optimizer.param_groups for p in group["params"]
        )

    def _complete(self, optimizer: Any) -> None:
        """The gradients are complete: averaged, in their true size, clipped."""
        trainer = self.trainer
        self.strategy.synchronize(optimizer)
        trainer.precision_plugin.unscale(optimizer)
        if self.before_step is not None:
            self.before_step(optimizer)
        if trainer.gradient_clip_val is not None or self.own_clipping:
            how = trainer.gradient_clip_algorithm or "norm"
            self.module.configure_gradient_clipping(optimizer, trainer.gradient_clip_val, how)

    def _nothing(self, index: int, output: Any) -> None:
        trainer = self.trainer
        what = "a dict without 'loss'" if isinstance(output, dict) else "nothing"
        if isinstance(output, dict) or trainer.world_size > 1 or trainer.detect_anomaly:
            raise UserError(
                f"training_step returned {what} in step {trainer.global_step} (batch {index} of epoch {trainer.current_epoch}): return the "
                f"loss. A batch can be skipped, by returning None, on one device only: other ranks would wait for its gradients.",
            )
        trainer.warn_once(
            f"training_step returned nothing in step {trainer.global_step}: the batch is skipped."
        )
