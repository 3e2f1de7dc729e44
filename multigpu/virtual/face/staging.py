"""An asynchronous checkpoint first copies all tensors to the host: dcp.async_save."""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.face.late import when_imported
from multigpu.virtual.ops.tensor import INTERNAL, VirtualTensor
from multigpu.virtual.patches.replacing import Replacement, Row, Setting, Table

STAGER = "torch.distributed.checkpoint._state_dict_stager"
_WHY = "it copies a tensor's storage and attributes, and a virtual GPU has no storage to copy"


def _offload_tensor(original: Callable) -> Callable:
    def offload_tensor(
        self: Any, tensor: torch.Tensor, memo: dict, non_blocking: bool = False
    ) -> torch.Tensor:
        """A copy of the tensor on the host, with copies of the program's own attributes."""
        if type(tensor) is not VirtualTensor:
            return original(self, tensor, memo, non_blocking=non_blocking)
        copied = memo[id(tensor)] = tensor.detach().to("cpu", non_blocking=non_blocking)
        if self.share_memory:
            copied.share_memory_()
        for name, value in vars(tensor).items():
            if name not in INTERNAL:
                value = self.deepcopy_with_tensor_offload(
                    value, memo, non_blocking=non_blocking
                )
                setattr(copied, name, value)
        return copied

    return offload_tensor


_TABLE = Table(
    (
        Replacement(
            f"{STAGER}.StateDictStager",
            "_offload_tensor",
            _offload_tensor,
            _WHY,
            optional=True,
        ),
    )
)
ROWS: tuple[Row, ...] = (
    Setting("the copies of an asynchronous checkpoint", when_imported(STAGER, _TABLE), _WHY),
)
