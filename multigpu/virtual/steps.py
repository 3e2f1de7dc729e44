"""Notes each step of the program's optimizer, and ends the program after so many steps."""

import weakref
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from multigpu.virtual import recorder
from multigpu.virtual.sim import machine
from multigpu.virtual.sim.flops import CountingCosts


class _Steps:
    """Counts the steps of the optimizer that steps first; others belong to the same steps."""

    def __init__(self, most: int | None):
        self.most = most
        self.count = 0
        self.optimizer: weakref.ref[Optimizer] | None = None

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook that torch calls after the step of any optimizer."""
        running = recorder.current()
        if running is None or not machine.current().in_use():
            return
        if self.optimizer is None:
            self.optimizer = weakref.ref(optimizer)
        if optimizer is not self.optimizer():
            return
        running.end_step()
        self.count += 1
        if self.count == self.most:
            raise SystemExit(0)


def watch(most: int | None) -> None:
    """Let this process's recorder note each step, with its arithmetic.

    After `most` steps the program ends with exit code 0; None lets it end by itself.
    """
    current = machine.current()
    current.set_costs(
        {
            gpu: CountingCosts(costs.gpu, costs.host_factor, current.clock)
            for gpu, costs in current.costs.items()
        }
    )
    register_optimizer_step_post_hook(_Steps(most))
