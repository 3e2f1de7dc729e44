"""How do torch.save and torch.load treat a virtual GPU's tensors? As a GPU's: a storage in the file knows its device.

torch.load reads storages on the host, moves each to its place, and makes tensors of them there. A virtual GPU has no
storages of its own, so a storage that is to go there stays on the host and only says where it belongs: the tensor that
torch then makes there takes it as its payload's.
"""

from multiprocessing.reduction import ForkingPickler

import torch

from multigpu.vgpu.ops.tensor import VirtualTensor, reduce_alone


class Located(torch.UntypedStorage):
    """A storage of the host that belongs to a virtual GPU."""

    @property
    def device(self) -> torch.device:
        return self.__dict__["where"]


def register() -> None:
    torch.serialization.register_package(
        9, _tag, _locate
    )  # before torch's own for the CPU, which is 10
    # Between processes storages would travel as shared memory of the host, and forget their device.
    ForkingPickler.register(VirtualTensor, reduce_alone)


def _tag(storage: torch.UntypedStorage) -> str | None:
    return getattr(storage, "of_vgpu", None)  # set by VirtualTensor.__reduce_ex__


def _locate(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if not location.startswith("vgpu"):
        return None
    storage.__class__ = Located
    storage.__dict__["where"] = torch.device(location)
    return storage
