"""single_device: one process on one device, without a wrapper."""

from collections.abc import Callable
from typing import Any

from torch import nn

from multigpu.strategies.base import Strategy


class SingleDeviceStrategy(Strategy):
    """The Trainer's default for one device. A step is the module's own method."""

    name = "single_device"

    def step_function(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """The module's method of this name."""
        return getattr(model.module, name)
