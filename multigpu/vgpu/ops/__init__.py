"""Operations on virtual tensors: kernels, memory, costs, and the errors that they raise."""

from multigpu.vgpu.ops import kernels, op_info, transfer

# Here, and not in those modules, so that dispatch never runs without them.
op_info.KERNELS.update(kernels.KERNELS)
op_info.HANDLERS.update(kernels.HANDLERS | transfer.HANDLERS)
