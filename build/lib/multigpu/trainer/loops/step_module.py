"""The module that strategies wrap: its forward calls a step of the LightningModule."""

from typing import Any

from torch import nn

from multigpu.trainer.loops.log_context import LogContext
from multigpu.trainer.module import LightningModule


class StepModule(nn.Module):
    """Calls a step by name in `forward`, because DDP and DataParallel wrap only `forward`."""

    def __init__(self, module: LightningModule):
        super().__init__()
        self.module = module

    def forward(self, name: str, *args: Any) -> Any:
        module = self.module
        attributes = module.__dict__
        context = attributes["_log_context"]
        if context.results.device is None:
            return getattr(module, name)(*args)
        # In a replica or a pipeline, args[0] is a part of the batch. Its number of rows is the
        # weight of the values that the step logs.
        attributes["_log_context"] = LogContext(context.results, context.hook, args[0])
        try:
            return getattr(module, name)(*args)
        finally:
            attributes["_log_context"] = context
