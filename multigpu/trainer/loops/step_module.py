"""The module that strategies wrap: calling it calls one of the LightningModule's steps."""

from typing import Any

from torch import nn

from multigpu.trainer.loops.log_context import LogContext
from multigpu.trainer.module import LightningModule


class StepModule(nn.Module):
    """Its forward calls a step by name, because DDP and DataParallel act on `forward`."""

    def __init__(self, module: LightningModule):
        super().__init__()
        self.module = module

    def forward(self, name: str, *args: Any) -> Any:
        module = self.module
        attributes = module.__dict__
        context = attributes["_log_context"]
        if context.results.device is None:
            return getattr(module, name)(*args)
        # In a replica, and in a pipeline, args[0] is a micro-batch, whose rows weight what the
        # step logs.
        attributes["_log_context"] = LogContext(context.results, context.hook, args[0])
        try:
            return getattr(module, name)(*args)
        finally:
            attributes["_log_context"] = context
