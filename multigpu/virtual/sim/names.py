"""The device type that programs see: "vgpu", or "cuda" while virtual GPUs look like CUDA.

To torch's C++ code a virtual GPU is always of the device type "vgpu", because only this type
has a device guard, autograd's streams and an autocast key that Python can register. In Python
multigpu.virtual.face can show the devices as "cuda:i" instead. So a device has two names: the
inner one, for C++, and the shown one, for programs and messages.
"""

import torch

INNER = "vgpu"
# The type that programs see. One for the process, like torch's registry of device types.
_shown_type = INNER


def set_shown_type(device_type: str) -> None:
    """Let programs see virtual GPUs as devices of this type, before control.start."""
    global _shown_type
    _shown_type = device_type


def shown_type() -> str:
    """The type that programs see: "vgpu" or "cuda"."""
    return _shown_type


def runtime() -> str:
    """The name of the runtime in its error messages: "vgpu" or "CUDA"."""
    return "CUDA" if _shown_type == "cuda" else _shown_type


def is_virtual(device: torch.device) -> bool:
    """Whether the device is a virtual GPU, by either name."""
    return device.type == INNER or device.type == _shown_type


def show(device: torch.device) -> torch.device:
    """The device as programs see it; devices that are not virtual are returned unchanged."""
    if device.type != INNER or _shown_type == INNER:
        return device
    if device.index is None:
        return torch.device(_shown_type)
    return torch.device(_shown_type, device.index)


def hide(device: torch.device) -> torch.device:
    """The device as torch's C++ code knows it; the reverse of `show`."""
    if device.type != _shown_type or _shown_type == INNER:
        return device
    return torch.device(INNER) if device.index is None else torch.device(INNER, device.index)


def option(start: str, command: str, cell: str) -> str:
    """How to change the virtual GPUs: `start` is an argument of control.start.

    `command` and `cell` are the same for `multigpu virtual` and for multigpu.gpus,
    which show the devices as "cuda".
    """
    if _shown_type == INNER:
        return f"multigpu.virtual.control.start({start})"
    return f"multigpu virtual {command}, or multigpu.gpus({cell}) in a notebook"
