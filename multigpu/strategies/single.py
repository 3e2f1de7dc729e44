"""single_device: one process on one device, without a wrapper."""

from typing import Any

from torch import nn

from multigpu.strategies.base import Strategy


class SingleDeviceStrategy(Strategy):
    """The Trainer's default for one device. A step is the module's own method."""

    name = "single_device"

    def run_step(self, model: nn.Module, name: str, *args: Any) -> Any:
        """Call the module's method of this name."""
        return getattr(model.module, name)(*args)
