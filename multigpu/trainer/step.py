"""The parts of a training step: forward, backward, and the optimizer's step.

fit.py calls them for each batch in automatic optimization. In manual optimization it calls
`forward` only; self.manual_backward and self.optimizers().step() call `backward` and
`step_optimizer`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.trainer.refused import refuse, refused_method
from multigpu.trainer.run import Run


class Step:
    """Computes and steps for one run.

    run_step    calls training_step(batch, batch_idx) through the strategy's wrapper
    step_end    the module's training_step_end, or None
    """

    def __init__(self, run: Run):
        self.run = run
        module = run.module
        self.automatic = module.automatic_optimization
        self.step_end = getattr(module, "training_step_end", None)
        run_step = run.strategy.step_function(run.model, "training_step")
        if takes_index(module.training_step):
            self.run_step = run_step
        else:
            self.run_step = lambda batch, batch_idx: run_step(batch)

    # ---- forward and backward --------------------------------------------------------------

    def forward(self, batch: Any, index: int) -> Any:
        """training_step's output, after training_step_end or the strategy's reduce_loss."""
        with self.run.precision.context():
            output = self.run_step(batch, index)
        if self.step_end is not None:
            return self.step_end(output)
        return self.run.strategy.reduce_loss(output)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Scale the loss if needed; call the module's `backward` and the hooks around it."""
        run = self.run
        scaled = run.precision.scale(loss)
        if not self.automatic:
            run.strategy.before_backward(run.model, scaled)
        run.call("on_before_backward", scaled)
        run.module.backward(scaled, *args, **kwargs)
        run.call("on_after_backward")

    def gradients(self, batch: Any, index: int) -> Any:
        """Forward and backward; the loss is divided by the number of batches per step.

        Returns training_step's output, or None if it returned nothing.
        """
        run = self.run
        output = self.forward(batch, index)
        loss = output.get("loss") if isinstance(output, dict) else output
        self._check_loss(loss, output, index)
        optimizer = run.optimizers[0] if run.optimizers else None
        accumulated = run.settings.accumulate_grad_batches
        if optimizer is not None and index % accumulated == 0:
            run.call("on_before_zero_grad", optimizer)
            epoch = run.state.current_epoch
            run.module.optimizer_zero_grad(epoch, index, optimizer)
        if loss is None:
            return None
        if accumulated > 1:
            loss = loss / accumulated
        if loss.requires_grad or optimizer is not None:
            self.backward(loss)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    # ---- the optimizer's step --------------------------------------------------------------

    def step_optimizer(self, optimizer: Optimizer, **keywords: Any) -> Any:
        """Average, unscale and clip the gradients, and step the optimizer.

        Returns what `optimizer.step(**keywords)` returns.
        """
        run = self.run
        run.strategy.synchronize(optimizer)
        run.precision.unscale(optimizer)
        run.call("on_before_optimizer_step", optimizer)
        if self.automatic:
            self._clip(optimizer)
        with run.strategy.optimizer_step_context(optimizer):
            returned = run.precision.step(optimizer, **keywords)
        if not self.automatic:
            run.state.global_step += 1
        return returned

    def gradients_and_step(self, batch: Any, index: int) -> Any:
        """Train on a batch that completes a step. Returns training_step's output."""
        run = self.run
        if run.overrides("optimizer_step") and run.optimizers:
            output = self._through_optimizer_step(batch, index)
        else:
            output = self.gradients(batch, index)
            # GradScaler.step raises an error if there is no gradient.
            scaling = run.precision.scaler is not None
            if output is None and scaling and _without_gradients(run.optimizers):
                return None
            for optimizer in run.optimizers:  # one at most
                self.step_optimizer(optimizer)
        run.state.global_step += 1
        return output

    def _through_optimizer_step(self, batch: Any, index: int) -> Any:
        """Call the user's optimizer_step with a closure that runs forward and backward.

        Raises UserError if the closure was not called.
        """
        run = self.run
        outputs = []

        def closure() -> Any:
            with torch.enable_grad():
                output = self.gradients(batch, index)
            outputs.append(output)
            return output["loss"] if isinstance(output, dict) else output

        epoch = run.state.current_epoch
        run.module.optimizer_step(epoch, index, run.lightning_optimizers[0], closure)
        if not outputs:
            raise UserError(
                "optimizer_step did not call the closure, which computes the loss and the "
                "gradients: pass it on, as in optimizer.step(closure=optimizer_closure)."
            )
        return outputs[-1]

    def _clip(self, optimizer: Optimizer) -> None:
        run = self.run
        clip = run.settings.gradient_clip_val
        if clip is not None or run.overrides("configure_gradient_clipping"):
            run.module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=clip,
                gradient_clip_algorithm=run.settings.gradient_clip_algorithm,
            )

    # ---- checks ----------------------------------------------------------------------------

    def _check_loss(self, loss: Any, output: Any, index: int) -> None:
        """Raises UserError if `loss` is not one number; a lone rank may return None."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return
        run = self.run
        alone = run.strategy.world.size == 1
        if output is None and alone:
            run.state.warn_once("training_step returned nothing: the batch is skipped.")
            return
        returned = type(output).__name__
        if isinstance(loss, torch.Tensor):
            returned = f"a loss of shape {tuple(loss.shape)}"
        elif isinstance(output, dict):
            returned = f"a dict with {sorted(map(str, output))}"
        waits = "" if alone else "; nothing would make the other ranks wait for its gradients"
        raise UserError(
            f"{'training_step' if self.step_end is None else 'training_step_end'} returned "
            f"{returned} in batch {index} of epoch {run.state.current_epoch}: return the "
            f"loss, a tensor with one number, or a dict with 'loss'{waits}."
        )


class LightningOptimizer:
    """What `self.optimizers()` returns: an optimizer that steps by Step.step_optimizer."""

    def __init__(self, optimizer: Optimizer, run: Run):
        self.optimizer = optimizer
        self._run = run

    @property
    def __class__(self) -> type:
        """The optimizer's class, so that isinstance(…, Optimizer) holds, as torch's schedulers
        require.
        """
        return type(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
        """Call the closure, which computes the gradients, if there is one; then step.

        Returns what `optimizer.step` returns, or else what the closure returned.
        """
        loss = None if closure is None else closure()
        returned = self._run.fit_loop.step.step_optimizer(self.optimizer, **keywords)
        return loss if returned is None else returned

    toggle_model = refused_method("toggle_model")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def takes_index(step: Callable[..., Any]) -> bool:
    """Whether a step takes more than the batch."""
    parameters = inspect.signature(step).parameters
    return len(parameters) > 1 or any(
        parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()
    )


def check_closure(optimizer: Optimizer) -> None:
    """Raises UserError if the optimizer calls its closure itself, and perhaps several times.

    LBFGS does, and an optimizer whose `step` has a closure without a default, such as SAM.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    required = closure is not None and closure.default is closure.empty
    if required or isinstance(optimizer, torch.optim.LBFGS):
        refuse("closure", f"{type(optimizer).__name__}.step")


def _without_gradients(optimizers: list[Optimizer]) -> bool:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return all(p.grad is None for group in groups for p in group["params"])
