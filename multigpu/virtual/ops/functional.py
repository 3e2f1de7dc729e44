"""Functional collectives (torch.distributed._functional_collectives) of virtual tensors.

DTensor uses them. They are custom operations: torch's kernels get the virtual tensors and call
the process group's methods. From two of the kernels a group in Python cannot be reached,
because C++ calls these methods on the group's backend; the handlers in this file call them
from Python. An operation that uses the result waits for the collective.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, _resolve_process_group

from multigpu.virtual.ops.op_info import Handler, run_custom

Tensor = torch.Tensor
OpOverload = torch._ops.OpOverload
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def _group(group: dist.ProcessGroup | str) -> dist.ProcessGroup:
    return _resolve_process_group(group) if isinstance(group, str) else group


def all_gather_out(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """all_gather_into_tensor_out(tensor, size, group, out=…)."""
    tensor, _, group = args
    out = kwargs["out"]
    group = _group(group)
    if type(group) is dist.ProcessGroup:
        return run_custom(func, args, kwargs)
    group._allgather_base(out, tensor.contiguous(), AllgatherOptions())
    return out


def reduce_scatter_out(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """reduce_scatter_tensor_out(tensor, reduce_op, size, group, out=…)."""
    tensor, reduce_op, _, group = args
    out = kwargs["out"]
    group = _group(group)
    if type(group) is dist.ProcessGroup:
        return run_custom(func, args, kwargs)
    options = dist.ReduceScatterOptions()
    options.reduceOp = REDUCE_OPS[reduce_op.lower()]
    group._reduce_scatter_base(out, tensor.contiguous(), options)
    return out


HANDLERS: dict[torch._ops.OpOverloadPacket, Handler] = {
    torch.ops._c10d_functional.all_gather_into_tensor_out: all_gather_out,
    torch.ops._c10d_functional.reduce_scatter_tensor_out: reduce_scatter_out,
}
