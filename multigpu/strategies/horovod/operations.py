"""Horovod's reduction operations: Average, Sum, Min, Max, Product, and Adasum's name."""

from enum import Enum

import torch.distributed as dist

from multigpu.errors import UserError


class Operation(Enum):
    """How the ranks' tensors become one. The values are torch.distributed's operations."""

    Average = "AVG"
    Sum = "SUM"
    Min = "MIN"
    Max = "MAX"
    Product = "PRODUCT"
    Adasum = "Adasum"

    @property
    def reduce_op(self) -> dist.ReduceOp:
        """torch.distributed's operation. Raises UserError for Adasum."""
        if self is Operation.Adasum:
            raise UserError(
                "op=Adasum is not supported: give op=Average, and the learning rate that you "
                "would give without Adasum."
            )
        return getattr(dist.ReduceOp, self.value)


Average = Operation.Average
Sum = Operation.Sum
Min = Operation.Min
Max = Operation.Max
Product = Operation.Product
Adasum = Operation.Adasum


def check_operation(op: Operation) -> None:
    """Raises UserError for Adasum, and for what is no operation."""
    if not isinstance(op, Operation):
        raise UserError(f"op is {op!r}: expected Average, Sum, Min, Max or Product.")
    _ = op.reduce_op
