"""Registers the device type "vgpu" with torch: the one place that uses torch's private calls.

The registration is made once, by the first `vgpu.start()`, and stays until the process ends:
torch offers no way back, and the operations of a tensor that outlives `vgpu.stop()` need the
kernels to raise their error. What stays in Python is listed in PERMANENT. In C++ stay the name
of the device type, its device guard, its hooks (`is_available()` is then false) and its
kernels.
In the process stay the settings of the host's allocator (sim/memory.py), what is called in a
forked child (sim/machine.py), and what is called at exit (process_group.py).

Tried with torch 2.11, 2.12 and 2.13. `_setup_privateuseone_for_python_backend` is
experimental, so other versions are refused.
"""

import sys
from typing import Any

import torch

from multigpu.errors import UserError
from multigpu.vgpu.patches import device_module, engine

MIN_TORCH = (2, 11)
FIRST_UNTESTED_TORCH = (2, 14)

# Python symbols of torch that stay → what they are, as of torch 2.13. vgpu.stop() puts back
# everything else.
PERMANENT = {
    "torch.vgpu": "the device module (device_module.py)",
    "sys.modules['torch.vgpu']": "the device module, for `import torch.vgpu`",
    "torch.Tensor.vgpu": "made by torch with the device type, as Tensor.cuda",
    "torch.Tensor.is_vgpu": "made by torch with the device type, as Tensor.is_cuda",
    "torch.nn.Module.vgpu": "made by torch with the device type, as Module.cuda",
    "torch.nn.utils.rnn.PackedSequence.vgpu": "made by torch with the device type",
    "torch.nn.utils.rnn.PackedSequence.is_vgpu": "made by torch with the device type",
    "torch.utils.backend_registration._privateuse1_backend_name": "the device type's name",
    "torch._C._autograd.DeviceType.VGPU": "the device type's name in the enum",
    "torch._C._autograd.DeviceType.__repr__": "writes the device type's name",
    "torch._C._autograd.DeviceType.__str__": "writes the device type's name",
    "torch._C._autograd.DeviceType.name": "writes the device type's name",
    "torch._C._profiler.ProfilerActivity.VGPU": "the device type's name in the enum",
    "torch._C._profiler.ProfilerActivity.__repr__": "writes the device type's name",
    "torch._C._profiler.ProfilerActivity.__str__": "writes the device type's name",
    "torch._C._profiler.ProfilerActivity.name": "writes the device type's name",
    "torch.library._impls": "the kernels, each with its name",
}

# Belongs to the process, as the registration does. torch removes the kernels when their
# Library object is deleted.
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Register the device type "vgpu" with torch, if this process has not done so.

    Raises UserError if this version of torch was not tried, or if another package has taken
    the place.
    """
    if _libraries:
        return
    check_version(torch.__version__)
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise UserError(
            f"torch has one place for a device type of its users, and in this process "
            f'"{name}" has taken it: use virtual GPUs in a process that does not import '
            f"{name}'s package."
        )

    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(
        "vgpu", device_module, Hooks(), engine.Guard()
    )
    sys.modules["torch.vgpu"] = device_module
    _libraries.extend(_kernels())


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """What torch's C++ code asks about the device type: whether virtual GPUs run."""

    def is_available(self) -> bool:
        return device_module.is_available()

    def has_primary_context(self, device_index: int) -> bool:
        return device_module.is_available()

    def is_built(self) -> bool:
        return device_module.is_available()


def _kernels() -> tuple[torch.library.Library, torch.library.Library]:
    """Register the kernels, and return what keeps them registered.

    Their modules use the device type, so they are imported after it is registered.
    """
    from multigpu.vgpu.ops import autocast, kernels
    from multigpu.vgpu.ops.dispatch import dispatch

    every_namespace = torch.library.Library("_", "IMPL")
    aten = torch.library.Library("aten", "IMPL")

    # Calls without a tensor, as torch.ones(2, device="vgpu:0"), reach no __torch_dispatch__.
    def fallback(func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        return dispatch(func, args, kwargs)

    every_namespace.fallback(fallback, "PrivateUse1")

    # torch.tensor(…, device=…) copies below __torch_dispatch__, and not through the fallback.
    def copy_(*args: Any, **kwargs: Any) -> torch.Tensor:
        return dispatch(torch.ops.aten.copy_.default, args, kwargs)

    aten.impl("copy_", copy_, "PrivateUse1")
    kernels.register(aten)
    autocast.register(every_namespace, aten)
    return every_namespace, aten


def check_version(version: str) -> None:
    """Raises UserError unless virtual GPUs were tried with this version of torch."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if not MIN_TORCH <= (major, minor) < FIRST_UNTESTED_TORCH:
        raise UserError(
            f"virtual GPUs were tried with torch 2.11 to 2.13, and this is torch {version}: "
            f'install one of those (pip install "torch>=2.11,<2.14").'
        )
