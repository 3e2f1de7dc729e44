"""The storage of a virtual GPU's tensors: a storage of the host that belongs to a device.

torch has one Python object for each storage of the host, so a program that asks tensors that
share a storage gets the same object from all of them.
"""

import torch

from multigpu.virtual.sim.memory import Block


class VirtualStorage(torch.UntypedStorage):
    """A storage of the host, with the device and the block of memory that it stands for.

    `block` is None for a storage that torch.load has read, until a tensor uses it.
    """

    block: Block | None

    @property
    def device(self) -> torch.device:
        return self.__dict__["located_on"]

    def data_ptr(self) -> int:
        """The block's address on its device; 0 if the storage is empty."""
        if self.block is None:
            return super().data_ptr()
        return self.block.address() if self.nbytes() else 0

    def is_shared(self) -> bool:
        """True, which torch says of every GPU's storage: other processes can use it."""
        return True

    def resize_(self, nbytes: int) -> "VirtualStorage":
        """Give the storage a new size, on the host and on the device: 0 frees its memory.

        Waits for a collective that uses the memory. Raises torch.OutOfMemoryError if the new
        size does not fit.
        """
        block = self.block
        if block is not None:
            meter = block.meter
            for unfinished in tuple(meter.machine.clock.pending.get(id(block), ())):
                unfinished.wait()
            shrinks = nbytes < self.nbytes()
            block.resize(nbytes)
            (meter.shrunk.add if shrinks else meter.shrunk.discard)(id(block))
        super().resize_(nbytes)
        return self


def locate(
    storage: torch.UntypedStorage, device: torch.device, block: Block | None = None
) -> VirtualStorage:
    """Turn a storage of the host into the storage of a virtual GPU, and return it."""
    storage.__class__ = VirtualStorage
    storage.__dict__["located_on"] = device
    storage.block = block
    return storage


def mark_as_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Let a tensor of the host, and its views, count as pinned; return the tensor."""
    tensor.untyped_storage().pinned_for_vgpu = True
    return tensor


def is_marked_as_pinned(tensor: torch.Tensor) -> bool:
    """Whether `mark_as_pinned` has marked a tensor of the host, or one whose view it is."""
    # A sparse tensor has no storage.
    return tensor.layout is torch.strided and hasattr(
        tensor.untyped_storage(), "pinned_for_vgpu"
    )
