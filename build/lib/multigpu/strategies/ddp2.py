"""ddp2: dp within a node, ddp between nodes.

One process per node splits its batch over the node's GPUs. Use ddp2 for a loss that needs the
whole batch of a node at once, such as an in-batch NCE loss, where the other rows are the
negatives. Compute such a loss in `training_step_end`, which gets the gathered outputs of the
node.
"""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from multigpu.strategies.accelerators import resolve
from multigpu.strategies.ddp import DDPStrategy
from multigpu.strategies.dp import mean_of_replicas, wrap_in_data_parallel


class DDP2Strategy(DDPStrategy):
    """DDP(DataParallel(model)) with one rank per node.

    It accepts DDPStrategy's arguments. The Trainer's `devices` is the number of GPUs per node.
    """

    name = "ddp2"
    processes_per_node = 1

    def connect(self) -> None:
        """Connect as ddp does; this process gets all devices of its node."""
        self.accelerator = self.accelerator or resolve()
        node_devices = self.accelerator.of_process(self.world)
        super().connect()
        self.devices = node_devices
        self.device = node_devices[0]

    def wrap(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        """Return DDP(DataParallel(model))."""
        return self.distributed(wrap_in_data_parallel(model, self.devices))

    def wrap_for_evaluation(self, model: nn.Module) -> nn.Module:
        """The model in DataParallel, without DDP: an evaluation averages no gradients."""
        return wrap_in_data_parallel(model, self.devices)

    def configure_ddp(self, model: nn.Module, device_ids: list[int] | None) -> nn.Module:
        """Create the wrapper as ddp does, but without device_ids if there are several devices.

        DDP then does not move the inputs.
        """
        return super().configure_ddp(model, None if len(self.devices) > 1 else device_ids)

    def reduce_loss(self, output: Any) -> Any:
        """The mean of the replicas' losses."""
        return mean_of_replicas(output)
