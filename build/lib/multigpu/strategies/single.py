"""single_device: one process on one device, without a wrapper."""

from collections.abc import Callable
from typing import Any

from torch import nn

from multigpu.errors import UserError
from multigpu.strategies.base import Strategy


class SingleDeviceStrategy(Strategy):
    """The Trainer's default for one device. A step is the module's own method.

    device   as in Lightning; raises UserError if it is given, because the Trainer has the
             device
    """

    name = "single_device"

    def __init__(self, device: Any = None):
        super().__init__()
        if device is not None:
            raise UserError(
                f"SingleDeviceStrategy(device={str(device)!r}) is not supported: give the "
                f"Trainer the device, for example accelerator='gpu', devices=[1]."
            )

    def step_function(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """The module's method of this name."""
        return getattr(model.module, name)
