"""qadam: Adam that sends momenta as bytes after a warm-up (Bagua's QAdam).

Steps 1 to W are Adam with averaged gradients. After step W each rank computes β₁m + (1−β₁)g
from its own gradient g. The ranks average these vectors by ByteGrad, and the mean is the new
momentum m. The variance v and its bias correction do not change after step W. In Bagua the
correction continues, so the steps grow, 3.2-fold for W = 100. (The idea is from Tang et al.,
"1-bit Adam", 2021. Step W's gradient is used here; Bagua drops it.)
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.strategies.bagua.base import Algorithm, Wrap
from multigpu.strategies.bagua.bytegrad import ByteHook


class QAdamOptimizer(Optimizer):
    """Adam whose variance is frozen after `warmup_steps` steps.

    The algorithm QAdam needs it. Without QAdam it trains in one process. Choose a long
    enough warm-up: if an element's gradient was 0 in the whole warm-up, its variance is 0 and
    its later steps are lr · m / eps. A parameter without any gradient in the warm-up raises
    UserError at its first gradient. `weight_decay` is Adam's: weight_decay · p is added to the
    gradient. The arguments have Bagua's order. After the warm-up p.grad contains the new
    momentum when `step` is called, so gradient clipping before `step` clips the momentum.
    """

    # With this attribute a GradScaler calls `step` with scaled gradients, and `step` raises.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
    ):
        if not isinstance(warmup_steps, int):
            raise UserError(
                f"warmup_steps is {warmup_steps!r}: expected a number of steps; it is the "
                f"third argument, as in Bagua, so give betas by name."
            )
        if warmup_steps < 1:
            raise UserError(
                f"warmup_steps is {warmup_steps}: "
                f"QAdam needs at least one step to estimate the variance."
            )
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise UserError(
                f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: "
                f"all must be 0 or more, and both betas must be below 1."
            )
        # True while p.grad contains the new momentum.
        self.exchanged = False
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
            "steps": 0,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.exchanged = False

    def warming_up(self) -> bool:
        """True if the next step is one of the first `warmup_steps`."""
        warmups = {group["warmup_steps"] for group in self.param_groups}
        if len(warmups) > 1:
            raise UserError(
                f"the parameter groups have different warmup_steps {sorted(warmups)}: "
                f"give all groups the same number."
            )
        return self.param_groups[0]["steps"] < warmups.pop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as in torch. This also ends a step that is skipped."""
        super().zero_grad(set_to_none)
        self.exchanged = False

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Step once. Raises UserError under a GradScaler, which would scale the momentum."""
        if hasattr(self, "found_inf"):
            raise UserError(
                "QAdam does not support a GradScaler, because the scaler's changing factor "
                "would stay in the momentum: use bfloat16, which needs no scaler."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        warm = self.warming_up()
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group, warm)
        self.exchanged = False
        return loss

    def _update(self, p: torch.Tensor, group: dict, warm: bool) -> None:
        """Update `p` as torch.optim.Adam does, with the same operations in the same order."""
        beta1, beta2 = group["betas"]
        state = self.state[p]
        if not state:
            if not warm:
                raise UserError(
                    f"a parameter of shape {tuple(p.shape)} has its first gradient after the "
                    f"warm-up, so its variance is unknown: "
                    f"give more than {group['warmup_steps']} warmup_steps."
                )
            state["step"] = 0
            state["variance_steps"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        momentum = state["exp_avg"]
        variance = state["exp_avg_sq"]
        if self.exchanged:
            momentum.copy_(p.grad)
        else:
            gradient = p.grad
            if group["weight_decay"]:
                gradient = gradient.add(p, alpha=group["weight_decay"])
            momentum.lerp_(gradient, 1 - beta1)
            if warm:
                state["variance_steps"] += 1
                variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1 = 1 - beta1 ** state["step"]
        correction2 = (1 - beta2 ** state["variance_steps"]) ** 0.5
        denominator = (variance.sqrt() / correction2).add_(group["eps"])
        p.addcdiv_(momentum, denominator, value=-group["lr"] / correction1)


class QAdam(Algorithm):
    """DDP with one QAdamOptimizer: sends gradients in the warm-up, then momenta as bytes."""

    def attach(self, model: nn.Module, optimizers: list[Optimizer], wrap: Wrap) -> nn.Module:
        """Raises UserError unless the only optimizer is a QAdamOptimizer."""
        if len(optimizers) != 1 or not isinstance(optimizers[0], QAdamOptimizer):
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
            raise UserError(
                f"qadam needs exactly one optimizer, a QAdamOptimizer, but was given: {names}."
            )
        self.optimizer = optimizers[0]
        self.byte_hook = ByteHook()
        wrapped = wrap(model)
        wrapped.register_comm_hook(None, self._hook)
        return wrapped

    def _hook(
        self, state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        if self.optimizer.warming_up():
            return allreduce_hook(None, bucket)
        if bucket.index() == 0:
            if self.optimizer.exchanged:
                raise UserError(
                    "backward() was called again before step(), but the momenta are exchanged "
                    "already: put all backwards of a step except the last into "
                    "`with model.no_sync():`, and end a step that you skip with "
                    "optimizer.zero_grad()."
                )
            self.optimizer.exchanged = True
        self._replace_by_momenta(bucket)
        return self.byte_hook.hook(state, bucket)

    @torch.no_grad()
    def _replace_by_momenta(self, bucket: dist.GradBucket) -> None:
        """Turn the bucket's gradients g into β₁m + (1−β₁)g, in the bucket's own memory."""
        settings = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if p not in settings:
                continue
            beta1 = settings[p]["betas"][0]
            gradient.add_(p, alpha=settings[p]["weight_decay"]).mul_(1 - beta1)
            state = self.optimizer.state.get(p)
            if state:
                gradient.add_(state["exp_avg"], alpha=beta1)
