"""Hooks that find the start and end of each training step in an ordinary loop."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer


def do_nothing() -> None:
    """The default of a callback."""


class StepHooks:
    """Calls `begin` at a step's first forward, `before` and `after` around `optimizer.step()`.

    A forward without gradients, as in validation, does not begin a step. Further forwards
    before `optimizer.step()` belong to the same step: micro-batches, or other inputs of the
    loss.

    A GradScaler can skip a step. The next forward detects this: there was a backward, but no
    parameter has a gradient now. Then `skipped` and `begin` are called, so a rank that skips a
    step alone still makes the same calls as the other ranks. After
    zero_grad(set_to_none=False) a skipped step is not detected.

    If there was no forward before `optimizer.step()`, for example in step(closure), `begin` is
    called at the start of `optimizer.step()`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        begin: Callable[[], None] = do_nothing,
        before: Callable[[], None] = do_nothing,
        after: Callable[[], None] = do_nothing,
        skipped: Callable[[], None] = do_nothing,
    ):
        self.begin = begin
        self.before = before
        self.after = after
        self.skipped = skipped
        self.parameters = list(model.parameters())
        self.has_begun = False
        self.has_gradients = False
        self.in_optimizer_step = False
        self.handles = [model.register_forward_pre_hook(self._forward)]
        for optimizer in optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self._before))
            self.handles.append(optimizer.register_step_post_hook(self._after))
        for parameter in self.parameters:
            if parameter.requires_grad:
                self.handles.append(
                    parameter.register_post_accumulate_grad_hook(self._backward)
                )

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _forward(self, *_: object) -> None:
        if not torch.is_grad_enabled() or self.in_optimizer_step:
            return
        if self.has_begun and self.has_gradients and self._gradients_are_gone():
            self.has_begun = False
            self.skipped()
        self._begin()

    def _gradients_are_gone(self) -> bool:
        return all(parameter.grad is None for parameter in self.parameters)

    def _begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.has_gradients = False
            self.begin()

    def _backward(self, *_: object) -> None:
        self.has_gradients = True

    def _before(self, *_: object) -> None:
        self.in_optimizer_step = True
        self._begin()
        self.before()

    def _after(self, *_: object) -> None:
        self.has_begun = False
        self.in_optimizer_step = False
        self.after()
