"""An optimizer of the program: its parameters, its options, and what belongs to its steps."""

import functools
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from multigpu.prove.inside.host import number, numbers
from multigpu.prove.inside.parts import Tracked, clean, track
from multigpu.prove.sketch import SUMS, sketch

# Options of an optimizer's group that do not change what a step computes.
NO_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")
# The number of elements by which to see whether a frozen parameter has changed.
SOME = 16


class TrackedOptimizer:
    """An optimizer and its parameters; the first one has the modules' buffers and frozen
    parameters, too.
    """

    def __init__(self, place: int, optimizer: Optimizer, modules: Any, without_grad: Any):
        self.place = place
        self.optimizer = optimizer
        self.steps = 0
        self.tracked: list[Tracked] = track(optimizer, modules)
        self.modules = list(modules) if place == 0 else []
        self.frozen = {} if place else _frozen([*self.modules, *without_grad])
        # For each: some of its elements, and the sketch of all. Most never change.
        self.frozen_before: dict[str, tuple[torch.Tensor, np.ndarray]] = {}
        self.local: np.ndarray | None = None

    def _buffers(self) -> dict[str, torch.Tensor]:
        buffers: dict[str, torch.Tensor] = {}
        for place, module in enumerate(self.modules):
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point() and not hasattr(buffer, "_local_tensor"):
                    name = clean(name)
                    buffers[f"{place}.{name}" if name in buffers else name] = buffer
        return buffers

    def buffer_names(self) -> list[str]:
        return list(self._buffers())

    def buffer_sketches(self) -> np.ndarray:
        """The sketches of all floating-point buffers, (buffers, 64)."""
        buffers = [numbers(buffer).reshape(-1) for buffer in self._buffers().values()]
        rows = [sketch(buffer, buffer.numel()) for buffer in buffers]
        return np.stack(rows) if rows else np.zeros((0, SUMS))

    def buffer_moments(self) -> np.ndarray:
        """The sums of the buffers' elements, of their squares and cubes, (buffers, 3)."""
        rows = [numbers(buffer).double() for buffer in self._buffers().values()]
        return np.array([[(row**k).sum().item() for k in (1, 2, 3)] for row in rows])

    def frozen_sketches(self) -> np.ndarray:
        """The sketches of the frozen parameters, (frozen, 64)."""
        for name, parameter in self.frozen.items():
            values = numbers(parameter).reshape(-1)
            some = values[:: max(1, len(values) // SOME)].clone()
            before = self.frozen_before.get(name)
            if before is None or not torch.equal(before[0], some):
                self.frozen_before[name] = some, sketch(values, values.numel())
        rows = [row for _, row in self.frozen_before.values()]
        return np.stack(rows) if rows else np.zeros((0, SUMS))

    def watch_local(self, recorder: Any) -> None:
        """Add up the gradients that backward computes, before anything averages them.

        They are divided by the loss scale.
        """
        self.local = np.zeros((len(self.tracked), SUMS))

        def add(place: int, gradient: torch.Tensor) -> None:
            # Not in torch.autograd.grad, whose gradients nobody steps with.
            if recorder.in_backward:
                local = self.tracked[place].sketch(gradient)
                self.local[place] += local / recorder.loss_scale

        for place, tracked in enumerate(self.tracked):
            if tracked.parameter.requires_grad:
                tracked.parameter.register_hook(functools.partial(add, place))


def _frozen(modules: list[nn.Module]) -> dict[str, torch.Tensor]:
    """The parameters that need no gradient, by the module's type and their name."""
    frozen: dict[str, torch.Tensor] = {}
    for place, module in enumerate(dict.fromkeys(modules)):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad or hasattr(parameter, "_local_tensor"):
                continue
            name = f"{type(module).__name__} {clean(name)}"
            frozen[f"{place}. {name}" if name in frozen else name] = parameter
    return frozen


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def options_of(optimizer: Optimizer) -> list[dict]:
    """The numbers of each group's rule: learning rate, momentum, weight decay, …"""
    groups = []
    for group in optimizer.param_groups:
        values = {}
        for name, value in group.items():
            if name in NO_OPTIONS:
                continue
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = number(value)
            if isinstance(value, bool | int | float | str):
                values[name] = value
            elif isinstance(value, list | tuple):
                for place, entry in enumerate(value):
                    if isinstance(entry, int | float):
                        values[f"{name}[{place}]"] = entry
        groups.append(values)
    return groups
