"""DistributedDataParallel's map of used parameters, for find_unused_parameters, static_graph.

DDP's C++ code counts on the host which parameters backward has used. It copies the counts to
the device by way of pinned memory, which a Python backend cannot offer, and the ranks add them
up there. With virtual GPUs DDP gets a tensor of the host in the place of the device's, so it
copies without pinned memory. Its attribute `on_gpu` is a virtual tensor with the same numbers,
which the process group gets.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from multigpu.virtual.ops.tensor import wrap_new
from multigpu.virtual.sim.machine import current

EMPTY = torch.ops.aten.empty.memory_format


class _MapOnHost(TorchDispatchMode):
    """In this block DDP's map is made on the host; its `on_gpu` is the virtual tensor.

    It is the only int32 tensor that the reducer makes on a device.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is not EMPTY or kwargs.get("dtype") != torch.int32 or device.type != "vgpu":
            return func(*args, **kwargs)
        counts = torch.zeros(*args, dtype=torch.int32)
        counts.on_gpu = wrap_new(counts.detach(), current().meter(device))
        return counts


def with_map_on_host(original: Callable) -> Callable:
    """A method of DDP's reducer that makes the map of used parameters."""

    def method(self: dist.Reducer, *args: Any, **kwargs: Any) -> Any:
        with _MapOnHost():
            return original(self, *args, **kwargs)

    return method


def on_device(value: Any) -> Any:
    """An argument of a collective: DDP's map, also in a list, becomes its `on_gpu`."""
    if isinstance(value, list):
        return [on_device(part) for part in value]
    return getattr(value, "on_gpu", value) if type(value) is torch.Tensor else value
