"""How does torch.load put a file's tensors on a virtual GPU? With map_location, as for a GPU.

torch.load reads storages on the host, moves each to its place, and makes tensors of them there. A virtual GPU has no
storages of its own, so a storage that is to go there stays on the host and only says where it belongs: the tensor that
torch then makes there takes it as its payload's.
"""

import torch


class Located(torch.UntypedStorage):
    """A storage of the host that belongs to a virtual GPU."""

    @property
    def device(self) -> torch.device:
        return self.__dict__["where"]


def register() -> None:
    torch.serialization.register_package(19, _tag, _locate)  # before torch's own for this device type, which is 23


def _tag(storage: torch.UntypedStorage) -> None:
    return None  # tensors of a virtual GPU are saved as tensors of the host that know their device (tensor.py)


def _locate(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if not location.startswith("vgpu"):
        return None
    storage.__class__ = Located
    storage.__dict__["where"] = torch.device(location)
    return storage
