"""How does Adam train with one byte a number? By sending the momentum, once the variance has settled: Bagua's QAdam.

Steps 1 … W are Adam with averaged gradients. After them each rank computes β₁m + (1−β₁)g from its own gradient g, the
ranks average that by ByteGrad, and the mean is the new momentum m. The variance v stays what it was after step W, and so
does its bias correction: Bagua's goes on growing, and so its steps do, 3.2-fold for W = 100.
(Tang et al., "1-bit Adam", 2021, has the idea; step W's gradient counts here, which Bagua drops.)
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.strategies.bagua.bytegrad import ByteHook


class QAdamOptimizer(Optimizer):
    """Adam whose variance is frozen after `warmup_steps` steps. For the algorithm QAdam; alone it needs no ranks.

    Give it enough warm-up: an element whose gradient was 0 in all of it has variance 0, and then moves by lr · m / eps. A
    parameter that had no gradient at all in it is refused with a UserError. `weight_decay` is Adam's: it is added to
    the gradient. After the warm-up p.grad holds the new momentum when `step` is called: clip before, and you clip that.
    """

    _step_supports_amp_scaling = (
        True  # a GradScaler then leaves the gradients alone, and `step` can refuse it
    )

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        warmup_steps: int = 100,
    ):
        if warmup_steps < 1:
            raise UserError(
                f"warmup_steps is {warmup_steps}: QAdam needs at least one step to find the variance."
            )
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise UserError(
                f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: "
                f"none is below 0, and both betas are below 1."
            )
        self.exchanged = False  # p.grad holds the new momentum already
        keys = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**keys, "warmup_steps": warmup_steps, "steps": 0})

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.exchanged = False

    def warming_up(self) -> bool:
        """Is the step that comes next one of the first `warmup_steps`?"""
        warmups = {group["warmup_steps"] for group in self.param_groups}
        if len(warmups) > 1:
            raise UserError(
                f"parameter groups with warmup_steps {sorted(warmups)}: give all groups the same."
            )
        return self.param_groups[0]["steps"] < warmups.pop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.exchanged = False

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One step. Raises UserError under a GradScaler, whose factor would go into the momentum."""
        if hasattr(self, "found_inf"):
            raise UserError(
                "QAdam does not work with a GradScaler, whose changing factor would stay in the momentum: "
                "use bfloat16, which needs no scaler."
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
        """As torch.optim.Adam, in the order of its operations."""
        (beta1, beta2), state = group["betas"], self.state[p]
        if not state:
            if not warm:
                raise UserError(
                    f"a parameter of shape {tuple(p.shape)} has its first gradient after the warm-up, which found no "
                    f"variance for it: give more than {group['warmup_steps']} warmup_steps."
                )
            state.update(
                step=0,
                variance_steps=0,
                exp_avg=torch.zeros_like(p),
                exp_avg_sq=torch.zeros_like(p),
            )
        state["step"] += 1
        momentum, variance = state["exp_avg"], state["exp_avg_sq"]
        if self.exchanged:
            momentum.copy_(p.grad)
        else:
            gradient = (
                p.grad.add(p, alpha=group["weight_decay"]) if group["weight_decay"] else p.grad
            )
            momentum.lerp_(gradient, 1 - beta1)
            if warm:
                state["variance_steps"] += 1
                variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1 = 1 - beta1 ** state["step"]
        correction2 = (1 - beta2 ** state["variance_steps"]) ** 0.5
        p.addcdiv_(
            momentum,
            (variance.sqrt() / correction2).add_(group["eps"]),
            value=-group["lr"] / correction1,
        )


class QAdam:
    """DDP with Adam: gradients in the warm-up, then momenta as bytes. Its optimizer is one QAdamOptimizer."""

    def attach(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        wrap: Callable[[nn.Module], DistributedDataParallel],
        group: dist.ProcessGroup | None = None,
    ) -> nn.Module:
        """The model in DDP, which gives all ranks rank 0's weights and buffers, and has the hook.

        Raises UserError unless there is one optimizer, and it is a QAdamOptimizer.
        """
        if len(optimizers) != 1 or not isinstance(optimizers[0], QAdamOptimizer):
            given = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
            raise UserError(
                f"qadam needs one optimizer, a QAdamOptimizer, and was given: {given}."
            )
        self.optimizer = optimizers[0]
        wrapped = wrap(model)
        self.bytes = ByteHook(wrapped.process_group)
        wrapped.register_comm_hook(None, self._hook)
        return wrapped

    def detach(self) -> None:
        """Of the group."""
        self.bytes = None

    close = detach

    def _hook(
        self, state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        if self.optimizer.warming_up():
            return allreduce_hook(self.bytes.group, bucket)
        if bucket.index() == 0:
            if self.optimizer.exchanged:
                raise UserError(
                    "a second backward before the step, and the momenta have been exchanged: put all backwards of a "
                    "step but the last into `with model.no_sync():`, and end a step that you give up with optimizer.zero_grad()."
                )
            self.optimizer.exchanged = True
        settings = {
            p: parameters
            for parameters in self.optimizer.param_groups
            for p in parameters["params"]
        }
        with torch.no_grad():
            for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if p in settings:  # the bucket's own memory becomes β₁m + (1−β₁)g
                    beta1, known = settings[p]["betas"][0], self.optimizer.state.get(p)
                    gradient.add_(p, alpha=settings[p]["weight_decay"]).mul_(1 - beta1)
                    if known:
                        gradient.add_(known["exp_avg"], alpha=beta1)
        return self.bytes.hook(state, bucket)
