"""torch.save and torch.load for virtual GPUs: as for a GPU, a storage has its device.

torch.load reads each storage on the host, moves it to its device, and makes tensors from it
there. A virtual GPU has no storages of its own. So the storage stays on the host and reports
the device to which it belongs; the tensor that torch makes on that device then takes the
storage for its payload.
"""

from multiprocessing.reduction import ForkingPickler

import torch

from multigpu.vgpu.ops.tensor import VirtualTensor, reduce_without_storage

# Before torch's own entry for the CPU, which has 10 and takes every storage.
PRIORITY = 9


class LocatedStorage(torch.UntypedStorage):
    """A storage of the host that belongs to a virtual GPU."""

    @property
    def device(self) -> torch.device:
        return self.__dict__["located_on"]


def register_location() -> None:
    """Register with torch.save and torch.load how a storage's device is written and read."""
    torch.serialization.register_package(PRIORITY, _location, _restore)


def register_reduction() -> None:
    """Register how a tensor travels between processes: without its storage."""
    ForkingPickler.register(VirtualTensor, reduce_without_storage)


def _location(storage: torch.UntypedStorage) -> str | None:
    return getattr(storage, "of_vgpu", None)  # set by VirtualTensor.__reduce_ex__


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if not location.startswith("vgpu"):
        return None
    storage.__class__ = LocatedStorage
    storage.__dict__["located_on"] = torch.device(location)
    return storage
