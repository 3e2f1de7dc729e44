"""ddp2: dp within a node, ddp between nodes. One process a node, whose GPUs share its batch.

What it is for: a loss that needs a node's whole batch at once, such as an in-batch NCE loss, where the other rows are the
negatives. Compute it in `training_step_end`, which gets the node's outputs gathered.
"""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from multigpu.strategies.accelerators import resolve
from multigpu.strategies.ddp import DDPStrategy
from multigpu.strategies.dp import mean_of_replicas, replicated


class DDP2Strategy(DDPStrategy):
    """DDP(DataParallel(model)) with one rank a node. DDPStrategy's arguments; `devices` is the number of GPUs a node."""

    name = "ddp2"
    processes_per_node = 1

    def connect(self) -> None:
        self.accelerator = self.accelerator or resolve()
        mine = self.accelerator.of_process(self.world)
        super().connect()
        self.devices, self.device = mine, mine[0]

    def wrap(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        return self.distributed(replicated(model, self.devices))

    def evaluated(self, model: nn.Module) -> nn.Module:
        return replicated(model, self.devices)

    def configure_ddp(self, model: nn.Module, device_ids: list[int] | None) -> nn.Module:
        # A module over several devices: DDP must not move its inputs.
        return super().configure_ddp(model, None if len(self.devices) > 1 else device_ids)

    def merge(self, output: Any) -> Any:
        return mean_of_replicas(output)
