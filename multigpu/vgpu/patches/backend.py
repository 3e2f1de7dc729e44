"""How does torch learn of the device type "vgpu"? The one place that uses torch's private calls to register it.

Tried with torch 2.11, 2.12 and 2.13. `_setup_privateuseone_for_python_backend` is experimental, so other versions are
refused with one sentence.
"""

import sys
from types import ModuleType

import torch

from multigpu.errors import UserError
from multigpu.vgpu.patches import engine

OLDEST, TOO_NEW = (2, 11), (2, 14)
_libraries: list[
    torch.library.Library
] = []  # a registration lives as long as its library object


def register(device_module: ModuleType) -> None:
    """Register the device type "vgpu" with torch, once a process. Raises UserError if this torch cannot do it."""
    if _libraries:
        return
    check_version(torch.__version__)
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise UserError(
            f'torch has one place for a device type of its users, and in this process "{name}" has taken it: '
            f"use virtual GPUs in a process that does not import {name}'s package."
        )

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return device_module.is_available()

        def has_primary_context(self, device_index: int) -> bool:
            return device_module.is_available()

        def is_built(self) -> bool:
            return device_module.is_available()

    from torch.optim.optimizer import _foreach_supported_types
    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(
        "vgpu", device_module, Hooks(), engine.Guard()
    )
    sys.modules["torch.vgpu"] = (
        device_module  # so that `import torch.vgpu` works, as for torch's own devices
    )

    import multigpu.vgpu.ops.transfer  # noqa: F401 - its import adds the copies to op_info.HANDLERS
    from multigpu.vgpu.ops import autocast, kernels
    from multigpu.vgpu.ops.dispatch import dispatch
    from multigpu.vgpu.ops.tensor import VirtualTensor
    from multigpu.vgpu.patches import loading

    # Calls without a tensor, as torch.ones(2, device="vgpu:0"), reach no __torch_dispatch__: they come here.
    everything, aten = (
        torch.library.Library("_", "IMPL"),
        torch.library.Library("aten", "IMPL"),
    )
    everything.fallback(
        lambda func, *args, **kwargs: dispatch(func, args, kwargs), "PrivateUse1"
    )
    # torch.tensor(…, device=…) copies the numbers below __torch_dispatch__, and the fallback does not get this call.
    copy_ = torch.ops.aten.copy_.default
    aten.impl("copy_", lambda *args, **kwargs: dispatch(copy_, args, kwargs), "PrivateUse1")
    _libraries.extend((everything, aten))
    kernels.register(aten)
    loading.register()
    autocast.register(everything, aten)
    # Optimizers take their foreach implementation for a GPU's parameters, if these are of a type that they know.
    _foreach_supported_types.append(VirtualTensor)


def check_version(version: str) -> None:
    """Raises UserError unless torch is one that this was tried with."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if not OLDEST <= (major, minor) < TOO_NEW:
        raise UserError(
            f"virtual GPUs were tried with torch 2.11 to 2.13, and this is torch {version}: "
            f'install one of those (pip install "torch>=2.11,<2.14").'
        )
