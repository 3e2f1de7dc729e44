"""Tells parameters, gradients and optimizer state apart in the memory at its peak.

The program's first optimizer step, a request that does not fit, and the end of the program
mark the blocks of all parameters and optimizers that exist then, also of frozen parameters. A
later step marks those of its optimizer, if there was a new peak since the last marks.
"""

import gc
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from multigpu import nested
from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.sim import machine, memory
from multigpu.virtual.sim.contents import GRADIENTS, MARKED, PARAMETERS, STATE

# For each device, the allocation that had made the peak when the blocks were marked last.
_marked_at: list[int] = []
# Whether each step marks the blocks.
_at_each_step = False
_had_a_step = False


def watch(history: bool = False) -> None:
    """Mark blocks from now on; with `history` at each step, for the memory over time."""
    global _at_each_step
    _at_each_step = history
    register_optimizer_step_pre_hook(_step)
    register_optimizer_step_post_hook(_step)
    memory.on_out_of_memory = mark_living


def mark_living() -> None:
    """Mark the blocks of all parameters and optimizers that exist now."""
    for obj in gc.get_objects():
        kind = type(obj)
        if issubclass(kind, Optimizer):
            _mark_of(obj)
        elif issubclass(kind, torch.Tensor) and isinstance(obj, torch.nn.Parameter):
            _mark(obj, PARAMETERS)
            _mark(obj.grad if obj.is_leaf else None, GRADIENTS)


def mark_at_the_end() -> None:
    """Mark what still exists if there was a new peak since the last marks."""
    if _has_new_peak() or _at_each_step:
        mark_living()


def _step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The hook that torch calls before and after the step of any optimizer."""
    global _had_a_step
    if not _had_a_step:
        _had_a_step = True
        mark_living()
    elif _has_new_peak() or _at_each_step:
        _mark_of(optimizer)


def _has_new_peak() -> bool:
    running = machine.running()
    meters = running.meters if running else []
    peaks = [meter.contents.born for meter in meters if meter.contents is not None]
    is_new = peaks != _marked_at
    _marked_at[:] = peaks
    return is_new


def _mark_of(optimizer: Optimizer) -> None:
    # An optimizer that is just being made has no groups yet.
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            _mark(parameter, PARAMETERS)
            _mark(parameter.grad, GRADIENTS)
    for tensor in nested.tensors(getattr(optimizer, "state", {})):
        _mark(tensor, STATE)


def _mark(tensor: torch.Tensor | None, kind: str) -> None:
    # A DTensor has its rank's part.
    tensor = getattr(tensor, "_local_tensor", tensor)
    if type(tensor) is VirtualTensor and tensor._block.kind not in MARKED:
        tensor._block.mark(kind)
