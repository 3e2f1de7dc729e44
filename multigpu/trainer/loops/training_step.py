"""Trains on one batch: forward, backward, and after the last batch of a step the step."""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.strategies import Strategy
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.loops import call_hooks
from multigpu.trainer.module import LightningModule

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class TrainingStep:
    """Trains on a batch. Overridden hooks are looked up once; other hooks cost nothing."""

    def __init__(self, trainer: "Trainer"):
        state = trainer.state
        module = state.lightning_module
        self.trainer = trainer
        self.state = state
        self.progress = state.progress
        self.module = module
        self.strategy = trainer.strategy
        self.precision = state.precision
        self.optimizer_step = state.optimizer_step
        self.automatic = module.automatic_optimization
        self.before_zero_grad = call_hooks.lookup(trainer, "on_before_zero_grad")
        self.before_backward = call_hooks.lookup(trainer, "on_before_backward")
        self.after_backward = call_hooks.lookup(trainer, "on_after_backward")
        self.overrides_zero_grad = is_overridden(
            "optimizer_zero_grad", module, LightningModule
        )
        self.step_end = getattr(module, "training_step_end", None)
        self.merges = is_overridden("reduce_loss", trainer.strategy, Strategy)
        self.returning = "training_step" if self.step_end is None else "training_step_end"
        parameters = inspect.signature(module.training_step).parameters
        takes_index = len(parameters) > 1 or any(
            p.kind is p.VAR_POSITIONAL for p in parameters.values()
        )
        step = trainer.strategy.step_function(state.model, "training_step")
        self.step = step if takes_index else lambda batch, index: step(batch)
        optimizer = state.optimizers[0] if state.optimizers else None
        self.steps_by_closure = optimizer is not None and (
            is_overridden("optimizer_step", module, LightningModule)
        )
        if self.automatic and optimizer is None:
            state.warn_once(
                "configure_optimizers returned None: nothing is learned in this fit."
            )

    def run(self, batch: Any, index: int, completes_step: bool) -> Any:
        """Train on batch number `index` of the epoch, and return training_step's output.

        `completes_step`: the optimizer steps after this batch.
        """
        if not self.automatic:
            return self.forward(batch, index)
        if completes_step:
            return self._run_and_step(batch, index)
        with self.strategy.no_sync(self.state.model):
            return self._gradients(batch, index)

    def forward(self, batch: Any, index: int) -> Any:
        """training_step's output, after training_step_end or the strategy's reduce_loss."""
        if self.precision.plain:
            output = self.step(batch, index)
        else:
            with self.precision.context():
                output = self.step(batch, index)
        if self.step_end is not None:
            return self.step_end(output)
        return self.strategy.reduce_loss(output) if self.merges else output

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Scale the loss if needed, then call the module's `backward` and the hooks around it.

        `manual_backward` also calls this method.
        """
        scaled = loss if self.precision.scaler is None else self.precision.scale(loss)
        if not self.automatic:
            self.strategy.before_backward(self.state.model, scaled)
        if self.before_backward is not None:
            self.before_backward(scaled)
        self.module.backward(scaled, *args, **kwargs)
        if self.after_backward is not None:
            self.after_backward()

    def _gradients(self, batch: Any, index: int) -> Any:
        """Run forward and backward; the loss is divided by the number of batches per step."""
        trainer = self.trainer
        output = self.forward(batch, index)
        loss = output.get("loss") if isinstance(output, dict) else output
        if loss is None:
            self._check_skip(index, output)
        elif not isinstance(loss, torch.Tensor):
            raise UserError(
                f"{self.returning} returned {type(loss).__name__}: expected the loss (a "
                f"tensor), or a dict with 'loss'."
            )
        elif loss.numel() != 1:
            raise UserError(
                f"{self.returning} returned a loss of shape {tuple(loss.shape)}: expected one "
                f"number. Take its mean."
            )
        optimizers = self.state.optimizers
        optimizer = optimizers[0] if optimizers else None
        if optimizer is not None and index % trainer.accumulate_grad_batches == 0:
            if self.before_zero_grad is not None:
                self.before_zero_grad(optimizer)
            if self.overrides_zero_grad:
                epoch = self.progress.current_epoch
                self.module.optimizer_zero_grad(epoch, index, optimizer)
            else:
                optimizer.zero_grad()
        if loss is None:
            return None
        if trainer.accumulate_grad_batches > 1:
            loss = loss / trainer.accumulate_grad_batches
        if loss.requires_grad:
            self.backward(loss)
        elif optimizer is not None:
            raise UserError(
                "the loss does not depend on any trainable parameter: training_step returned "
                "a tensor without a graph. Return the loss itself, not its detached value."
            )
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def _run_and_step(self, batch: Any, index: int) -> Any:
        """Train on a batch that completes a step, and step the optimizer."""
        if self.steps_by_closure:
            output = self._run_closure(batch, index)
        else:
            output = self._gradients(batch, index)
            optimizers = self.state.optimizers
            optimizer = optimizers[0] if optimizers else None
            scaling = self.precision.scaler is not None
            if output is None and scaling and _without_gradients(optimizer):
                return None  # GradScaler.step raises an error if there is no gradient
            if optimizer is not None:
                self.optimizer_step.prepare(optimizer)
                self.optimizer_step.apply(optimizer)
        self.progress.global_step += 1
        return output

    def _run_closure(self, batch: Any, index: int) -> Any:
        """Call `optimizer_step` with a closure that runs forward and backward.

        Returns training_step's output. Raises UserError if the closure was not called.
        """
        state = self.state
        output = None
        called = False

        def closure() -> Any:
            nonlocal output, called
            called = True
            with torch.enable_grad():
                output = self._gradients(batch, index)
            self.optimizer_step.prepare(state.optimizers[0])
            return output["loss"] if isinstance(output, dict) else output

        optimizer = state.lightning_optimizers[0]
        self.module.optimizer_step(self.progress.current_epoch, index, optimizer, closure)
        if not called:
            raise UserError(
                "optimizer_step did not call the closure, which computes the loss and the "
                "gradients: pass it on, as in optimizer.step(closure=optimizer_closure)."
            )
        return output

    def _check_skip(self, index: int, output: Any) -> None:
        """Check a batch without a loss: warn that it is skipped, or raise UserError."""
        trainer = self.trainer
        why = ""
        if isinstance(output, dict):
            why = "A dict needs the key 'loss'"
        elif trainer.world_size > 1:
            why = (
                "Returning None skips a batch only in a run on one device: with several "
                "ranks, the others would wait for this rank's gradients"
            )
        if why:
            what = "a dict without 'loss'" if isinstance(output, dict) else "nothing"
            raise UserError(
                f"training_step returned {what} in step {trainer.global_step} (batch {index} "
                f"of epoch {trainer.current_epoch}): return the loss. {why}."
            )
        self.state.warn_once(
            f"training_step returned nothing in step {trainer.global_step}: the batch is "
            f"skipped."
        )


def _without_gradients(optimizer: Optimizer | None) -> bool:
    return optimizer is None or all(
        p.grad is None for group in optimizer.param_groups for p in group["params"]
    )
