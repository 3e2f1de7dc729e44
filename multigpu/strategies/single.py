"""single_device: one process, one device, and nothing in between."""

from typing import Any

from torch import nn

from multigpu.strategies.base import Strategy


class SingleDeviceStrategy(Strategy):
    """What the Trainer takes where there is one device. Its steps are the module's own."""

    name = "single_device"

    def run_step(self, model: nn.Module, name: str, *args: Any) -> Any:
        return getattr(model.module, name)(*args)
