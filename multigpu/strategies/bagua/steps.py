"""When does a training step begin, and when does it end? Hooks find it out in a loop that knows nothing of them."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer


def nothing() -> None:
    """What happens at a moment that nobody waits for."""


class Steps:
    """Calls `begin` once a step, at its first forward; `before` and `after` around `optimizer.step()`.

    A forward without gradients, as in a validation, begins nothing. Further forwards before the step are pieces of it, or
    other inputs of the same loss. A step that was given up (a GradScaler does that) is known by this: there was a
    backward, no parameter has a gradient any more, and here comes a forward. Then `given_up` and `begin` are called, so
    that a rank which alone gives up a step keeps pace with the others. After zero_grad(set_to_none=False) it is not known.

    Where no forward came before `optimizer.step()`, as with step(closure), `begin` is called there.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        begin: Callable[[], None] = nothing,
        before: Callable[[], None] = nothing,
        after: Callable[[], None] = nothing,
        given_up: Callable[[], None] = nothing,
    ):
        self.begin, self.before, self.after, self.given_up = begin, before, after, given_up
        self.parameters = list(model.parameters())
        self.begun = self.gradients = self.stepping = False
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
        if not torch.is_grad_enabled() or self.stepping:
            return
        if self.begun and self.gradients and all(p.grad is None for p in self.parameters):
            self.begun = False
            self.given_up()
        self._begin()

    def _begin(self) -> None:
        if not self.begun:
            self.begun, self.gradients = True, False
            self.begin()

    def _backward(self, *_: object) -> None:
        self.gradients = True

    def _before(self, *_: object) -> None:
        self.stepping = True
        self._begin()
        self.before()

    def _after(self, *_: object) -> None:
        self.begun = self.stepping = False
        self.after()
