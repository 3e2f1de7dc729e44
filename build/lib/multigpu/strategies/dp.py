"""dp: one process and several GPUs, with torch's DataParallel.

Each step cuts the batch into chunks, copies the model to all GPUs, runs the replicas in
parallel, and gathers their outputs. Lesson 02 does the same step by step, and measures the
cost.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from multigpu.strategies.base import Strategy


class DataParallelStrategy(Strategy):
    """Cut the batch on dimension 0 into one chunk per device: 10 rows on 4 are [3, 3, 3, 1].

    A step's outputs are concatenated on dimension 0 on the first device. One scalar per
    replica becomes a vector. If the vector is the loss, its mean is used: the mean over
    *replicas*. With chunks of unequal size this mean differs from the mean over the batch. In
    that case compute the loss in `training_step_end`, from the gathered outputs.

    Attributes that `training_step` sets on the module are lost, because it runs on a replica.
    """

    name = "dp"

    def wrap(self, model: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        """The model in DataParallel."""
        return wrap_in_data_parallel(model, self.devices)

    def wrap_for_evaluation(self, model: nn.Module) -> nn.Module:
        """The model in DataParallel."""
        return wrap_in_data_parallel(model, self.devices)

    def reduce_loss(self, output: Any) -> Any:
        """The mean of the replicas' losses."""
        return mean_of_replicas(output)


def wrap_in_data_parallel(model: nn.Module, devices: list[torch.device]) -> nn.Module:
    """`model`, which is on the first device, in DataParallel; unchanged for one device."""
    # torch warns when one scalar per replica becomes a vector, as `reduce_loss` expects.
    warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
    return AutocastDataParallel(model, device_ids=devices) if len(devices) > 1 else model


class AutocastDataParallel(nn.DataParallel):
    """DataParallel whose threads compute under the caller's autocast.

    torch's DataParallel enables autocast in its threads for CUDA only. It never sets
    autocast's dtype, which each thread has separately. Under bfloat16 its replicas therefore
    compute in float16 (torch 2.11 to 2.13).
    """

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Each replica's output for its chunk of the inputs."""
        device_type = self.src_device_obj.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            replicas = [_within_autocast(replica, device_type, dtype) for replica in replicas]
        return super().parallel_apply(replicas, inputs, kwargs)


def _within_autocast(
    replica: nn.Module, device_type: str, dtype: torch.dtype
) -> Callable[..., Any]:
    def forward(*args: Any, **keywords: Any) -> Any:
        with torch.autocast(device_type, dtype):
            return replica(*args, **keywords)

    return forward


def mean_of_replicas(output: Any) -> Any:
    """Return `training_step`'s output with the mean of the replicas' losses as the loss.

    The output is a loss, or a dict with "loss".
    """
    if isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
        return {**output, "loss": output["loss"].mean()}
    return output.mean() if isinstance(output, torch.Tensor) else output
