"""dp: one process, several GPUs. Each step cuts the batch, copies the model, runs the pieces side by side, gathers.

It is torch's own DataParallel. Lesson 02 does the same by hand, and tells what it costs.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.strategies.accelerators import Accelerator
from multigpu.strategies.base import Strategy


class DataParallelStrategy(Strategy):
    """The batch is cut on dimension 0: 10 rows on 4 devices are [3, 3, 3, 1].

    A step's output is gathered on the first device, on dimension 0; a scalar of each replica becomes a vector of them.
    If that is the loss, its mean is taken. That is the mean over *replicas*: where the pieces are uneven it is not the mean over
    the batch, so compute the loss in `training_step_end`, from the gathered outputs.

    State that `training_step` sets on the module is lost: it ran on a copy.
    """

    name = "dp"

    def configure(self, accelerator: Accelerator, num_nodes: int = 1) -> None:
        if num_nodes > 1:
            raise UserError(
                f"{self.name} is one process on one machine, and num_nodes is {num_nodes}: use 'ddp' or 'ddp2'."
            )
        super().configure(accelerator, num_nodes)

    def wrap(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        return replicated(model, self.devices)

    def evaluated(self, model: nn.Module) -> nn.Module:
        return replicated(model, self.devices)

    def merge(self, output: Any) -> Any:
        return mean_of_replicas(output)


def replicated(model: nn.Module, devices: list[torch.device]) -> nn.Module:
    """`model`, which lies on the first device, over all of them. One device: the model itself."""
    # A scalar loss of each replica becomes a vector of them: what `merge` expects, and torch warns of.
    warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
    return Replicated(model, device_ids=devices) if len(devices) > 1 else model


class Replicated(nn.DataParallel):
    """DataParallel whose threads compute in the caller's autocast.

    torch's own tell their threads that autocast is on, for CUDA, but not its type, which each thread has for itself: under
    bfloat16 the replicas compute in float16. For other devices they do not even tell that (torch 2.11 to 2.13).
    """

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list:
        kind = self.src_device_obj.type
        if torch.is_autocast_enabled(kind):
            replicas = [
                _within_autocast(replica, kind, torch.get_autocast_dtype(kind))
                for replica in replicas
            ]
        return super().parallel_apply(replicas, inputs, kwargs)


def _within_autocast(replica: nn.Module, kind: str, dtype: torch.dtype) -> Callable[..., Any]:
    def forward(*args: Any, **keywords: Any) -> Any:
        with torch.autocast(kind, dtype):
            return replica(*args, **keywords)

    return forward


def mean_of_replicas(output: Any) -> Any:
    """The loss that `training_step` returned, alone or under "loss", from the replicas' losses."""
    if isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
        return {**output, "loss": output["loss"].mean()}
    return output.mean() if isinstance(output, torch.Tensor) else output
