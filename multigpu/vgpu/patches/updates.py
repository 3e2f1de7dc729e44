"""Optimizers on virtual GPUs: the clock learns of each step; foreach kernels are used."""

from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types

from multigpu.vgpu.ops.tensor import VirtualTensor
from multigpu.vgpu.sim.machine import current


def mark_optimizer_steps(
    original: type[torch.autograd.profiler.record_function],
) -> type[torch.autograd.profiler.record_function]:
    """record_function, which runs around every optimizer step, and marks it on the clock.

    It marks the clock that is running when this is called.
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


def register_foreach() -> None:
    """Let optimizers use their foreach implementation for virtual GPUs, as for GPUs."""
    _foreach_supported_types.append(VirtualTensor)
