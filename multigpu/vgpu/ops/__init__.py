"""Operations on virtual tensors: kernels, memory, costs, and the errors that they raise."""

from multigpu.vgpu.ops import kernels, op_info, transfer

# The registries are filled here, so dispatch never runs while they are empty.
op_info.KERNELS.update(kernels.KERNELS)
op_info.HANDLERS.update(kernels.HANDLERS | transfer.HANDLERS)
