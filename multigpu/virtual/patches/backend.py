"""Registers the device type "vgpu" with torch.

The first `control.start()` makes the registration, and it stays until the process ends, for
two reasons. torch has no function that removes it, and a tensor that outlives `stop()` needs
the kernels to raise its error.

PERMANENT lists what stays in Python. These stay in C++: the name of the device type, its
device guard, its hooks (whose `is_available()` then returns False) and its kernels. These stay
in the process: the settings of the host's allocator (sim/memory.py), the function called in a
forked child (sim/machine.py), and the function called at exit (process_group.py).

Tested with torch 2.11, 2.12 and 2.13. `_setup_privateuseone_for_python_backend` is
experimental, so other versions are refused.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from multigpu.errors import UserError
from multigpu.virtual.patches import device_module, engine

MIN_TORCH = (2, 11)
FIRST_UNTESTED_TORCH = (2, 14)

# Python symbols of torch that stay → what they are, as of torch 2.13. control.stop() restores
# everything else.
PERMANENT = {
    "torch.vgpu": "the device module (device_module.py)",
    "sys.modules['torch.vgpu']": "the device module, for `import torch.vgpu`",
    "torch.Tensor.vgpu": "made by torch for the device type, like Tensor.cuda",
    "torch.Tensor.is_vgpu": "made by torch for the device type, like Tensor.is_cuda",
    "torch.nn.Module.vgpu": "made by torch for the device type, like Module.cuda",
    "torch.nn.utils.rnn.PackedSequence.vgpu": "made by torch for the device type",
    "torch.nn.utils.rnn.PackedSequence.is_vgpu": "made by torch for the device type",
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

# Kept until the process ends, because torch removes the kernels when their Library object is
# deleted.
_libraries: list[torch.library.Library] = []


def register() -> None:
    """Register the device type "vgpu" with torch, if this process has not done so yet.

    Raises UserError if this version of torch is untested, or if another package has registered
    its device type.
    """
    if _libraries:
        return
    check_version(torch.__version__)
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise UserError(
            f"torch accepts only one device type of other packages, and in this process "
            f'"{name}" is already registered: use virtual GPUs in a process that does not '
            f"import {name}'s package."
        )

    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(
        "vgpu", device_module, Hooks(), engine.Guard()
    )
    sys.modules["torch.vgpu"] = device_module
    _libraries.extend(_kernels())


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """The hooks that torch's C++ code calls: each returns whether virtual GPUs run."""

    def is_available(self) -> bool:
        return device_module.is_available()

    def has_primary_context(self, device_index: int) -> bool:
        return device_module.is_available()

    def is_built(self) -> bool:
        return device_module.is_available()


def _kernels() -> tuple[torch.library.Library, torch.library.Library]:
    """Register the kernels, and return the Library objects that keep them registered.

    The kernels' modules use the device type, so they are imported after its registration.
    """
    from multigpu.virtual.ops import attention, autocast, kernels
    from multigpu.virtual.ops.dispatch import dispatch

    every_namespace = torch.library.Library("_", "IMPL")
    aten = torch.library.Library("aten", "IMPL")

    # A call without a tensor, such as torch.ones(2, device="vgpu:0"), does not reach
    # __torch_dispatch__.
    def fallback(func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        return dispatch(func, args, kwargs)

    every_namespace.fallback(fallback, "PrivateUse1")

    # torch calls these below __torch_dispatch__ and skips the fallback: copy_ for
    # torch.tensor(…, device=…), _local_scalar_dense for torch.tensor([a tensor, 1]), and
    # FSDP1 calls record_stream.
    def dispatching(func: torch._ops.OpOverload) -> Callable:
        return lambda *args, **kwargs: dispatch(func, args, kwargs)

    direct = ["copy_", "_local_scalar_dense", "record_stream"]
    # CUDA has one kernel for each of these. Without a registration, torch replaces them by
    # several operations, each of which rounds its result and takes time.
    direct += ["silu_backward", "mish_backward", "native_channel_shuffle"]
    direct += ["_fused_rms_norm", "_fused_rms_norm_backward"]
    for name in direct:
        aten.impl(name, dispatching(getattr(torch.ops.aten, name).default), "PrivateUse1")
    kernels.register(aten)
    attention.register(aten)
    autocast.register(every_namespace, aten)
    return every_namespace, aten


def check_version(version: str) -> None:
    """Raise UserError if virtual GPUs were not tested with this version of torch."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if not MIN_TORCH <= (major, minor) < FIRST_UNTESTED_TORCH:
        raise UserError(
            f"virtual GPUs were tested with torch 2.11 to 2.13, but this is torch {version}: "
            f'install a tested version (pip install "torch>=2.11,<2.14").'
        )
