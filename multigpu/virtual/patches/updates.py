"""Optimizers on virtual GPUs: the clock marks their steps, and they use foreach kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types

from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.patches.replacing import remove
from multigpu.virtual.sim.machine import current


def mark_optimizer_steps(
    original: type[torch.autograd.profiler.record_function],
) -> type[torch.autograd.profiler.record_function]:
    """A record_function that marks each optimizer step on the clock.

    torch runs record_function around every optimizer step. The clock is that of the machine
    that runs when this is called.
    """
    clock = current().clock

    class RecordFunction(original):
        def __enter__(self) -> Any:
            self.is_step = self.name.startswith("Optimizer.step#")
            self.was_updating = clock.updating
            clock.updating |= self.is_step
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            if self.is_step:
                clock.updating = self.was_updating
            super().__exit__(*error)

    return RecordFunction


def register_foreach() -> Callable[[], None]:
    """Let optimizers use their foreach implementation for virtual GPUs, as for real GPUs."""
    _foreach_supported_types.append(VirtualTensor)
    return lambda: remove(_foreach_supported_types, VirtualTensor)
