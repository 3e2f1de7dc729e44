"""torch.save and torch.load for virtual GPUs: a saved storage has a device, as for a GPU.

torch.load reads each storage on the host, moves it to its device, and makes tensors from it
there. A virtual GPU has no storages. So the storage stays on the host, but its `device` is the
virtual GPU. torch then makes a tensor on that device, whose payload uses the storage.
"""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.ops.storage import locate
from multigpu.virtual.ops.unknown_tensor import unknown_tensor
from multigpu.virtual.patches.replacing import remove
from multigpu.virtual.sim import names

# Lower numbers come first. torch's entry for the CPU has 10 and accepts every storage.
PRIORITY = 9


def register_location() -> Callable[[], None]:
    """Register with torch.save and torch.load how a storage's device is written and read."""
    entry = (PRIORITY, _location, _restore)
    torch.serialization.register_package(*entry)
    return lambda: remove(torch.serialization._package_registry, entry)


def reading_shapes(original: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """The functions that torch.load(weights_only=True) may call: `unknown_tensor`, too."""

    def _get_user_allowed_globals() -> dict[str, Any]:
        name = f"{unknown_tensor.__module__}.{unknown_tensor.__name__}"
        return {**original(), name: unknown_tensor}

    return _get_user_allowed_globals


def _location(storage: torch.UntypedStorage) -> str | None:
    return getattr(storage, "of_vgpu", None)  # set by VirtualTensor.__reduce_ex__


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if not location.startswith((names.INNER, names.shown_type())):
        return None
    return locate(storage, torch.device(location))
