"""Operations on virtual tensors: kernels, memory, costs, and the errors that they raise."""

from multigpu.virtual.ops import (
    attention,
    functional,
    kernels,
    op_info,
    sync_norm,
    transfer,
)

# The registries are filled here, so dispatch never runs while they are empty.
for module in (attention, kernels, sync_norm):
    op_info.KERNELS.update(module.KERNELS)
for module in (attention, functional, kernels, transfer):
    op_info.HANDLERS.update(module.HANDLERS)
