"""Section: mistakes, and the errors that they raise, on the real and on the virtual GPU.

The exception's class must be the same, and the first line of its text, after the device's name
and all numbers of bytes are written alike. Errors inside a kernel (an index out of range) are
left out: after them, CUDA cannot be used in the process any more.
"""

import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from section import Section, main
from torch import nn

from multigpu.virtual import control

FAR = 63  # no machine has so many GPUs


def mistakes(device: torch.device) -> dict[str, Callable[[], object]]:
    """Each mistake's name → a function that makes it."""
    kind = device.type
    x = torch.ones(4, 4, device=device)
    host = torch.ones(4, 4)
    labels = torch.zeros(4, dtype=torch.long)
    # For smaller batches the CPU has another kernel, with another message.
    images = torch.ones(16, 1, 4, 4)
    module = getattr(torch, kind)

    def backward_twice() -> None:
        leaf = torch.ones(2, device=device, requires_grad=True)
        loss = (leaf * leaf).sum()
        loss.backward()
        loss.backward()

    def gradient_in_place() -> None:
        leaf = torch.ones(2, device=device, requires_grad=True)
        leaf.add_(1)

    return {
        "out of memory": lambda: torch.empty(2**50, dtype=torch.uint8, device=device),
        "add: device and host": lambda: x + host,
        "matmul: device and host": lambda: x @ host,
        "linear: weight on the host": lambda: nn.Linear(4, 4)(x),
        "linear: input on the host": lambda: nn.Linear(4, 4).to(device)(host),
        "conv2d: weight on the host": lambda: nn.Conv2d(1, 1, 3)(x[None, None]),
        "conv2d: input on the host": lambda: nn.Conv2d(1, 1, 3).to(device)(images),
        "embedding: weight on the host": lambda: nn.Embedding(4, 2)(labels.to(device)),
        "embedding: indices on the host": lambda: nn.Embedding(4, 2).to(device)(labels),
        "cross_entropy: labels on the host": lambda: F.cross_entropy(x, labels),
        "layer_norm: weight on the host": lambda: F.layer_norm(x, (4,), torch.ones(4)),
        "batch_norm: buffers on the host": lambda: nn.BatchNorm1d(4)(x),
        "cat: device and host": lambda: torch.cat([x, host]),
        "stack: device and host": lambda: torch.stack([x, host]),
        "where: device and host": lambda: torch.where(x > 0, x, host),
        "out= on the host": lambda: torch.add(x, x, out=torch.empty(4, 4)),
        "index of a host tensor on the device": lambda: host[labels.to(device)],
        "in place on the host": lambda: host.add_(x),
        "numpy()": lambda: x.numpy(),
        "numpy() with a gradient": lambda: x.clone().requires_grad_().numpy(),
        "pin_memory()": lambda: x.pin_memory(),
        "a device that does not exist": lambda: torch.ones(1, device=f"{kind}:{FAR}"),
        ".to() a device that does not exist": lambda: host.to(f"{kind}:{FAR}"),
        "set_device": lambda: module.set_device(FAR),
        "a generator of the host": lambda: torch.randn(
            2, device=device, generator=torch.Generator()
        ),
        "shapes of a matrix product": lambda: x @ torch.ones(3, 3, device=device),
        "shapes of a sum": lambda: x + torch.ones(3, device=device),
        "dtypes of a linear layer": lambda: nn.Linear(4, 4).to(device)(x.half()),
        "dtypes of a convolution": lambda: nn.Conv2d(1, 1, 3).to(device)(x[None, None].half()),
        "view of a transposed tensor": lambda: x.T.view(16),
        "item() of many numbers": lambda: x.item(),
        "labels with the wrong length": lambda: F.cross_entropy(x, labels[:3].to(device)),
        "backward twice": backward_twice,
        "a leaf changed in place": gradient_in_place,
    }


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """The class and the text of the exception that a call raises; ("none", "") without one."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def common(text: str) -> str:
    """The first line of an error without what must differ: the device's name, and numbers."""
    line = text.strip().split("\n")[0]
    line = re.sub(r"\b(?:CUDA|VGPU|cuda|vgpu)\b", "gpu", line)
    line = re.sub(r"(wrapper)_(?:CUDA|VGPU)_+", r"\1_gpu_", line)
    line = re.sub(r"torch\.(?:cuda|vgpu)\.", "torch.gpu.", line)
    line = re.sub(r"\d[\d.]*(?= (?:GiB|MiB|KiB|bytes))", "N", line)
    # What follows differs by what PyTorch has reserved, and names an environment variable.
    return re.sub(r"(total capacity of N GiB).*", r"\1", line)


def real(section: Section) -> None:
    simulated = section.virtual()
    compared = section.device.type == "cuda"
    for name, call in mistakes(section.device).items():
        with section.item(name):
            kind, text = error_of(call)
            expected = simulated.get(name, {})
            same_class = kind == expected.get("error")
            same_text = common(text) == common(expected.get("text", ""))
            section.row(
                case=name,
                ok=(same_class and same_text) if compared else None,
                error=kind,
                text=text[:600],
                virtual_error=expected.get("error"),
                virtual_text=expected.get("text"),
            )


def virtual(section: Section) -> None:
    with control.running(1, gpu=section.card.gpu) as (device,):
        for name, call in mistakes(device).items():
            kind, text = error_of(call)
            section.row(case=name, error=kind, text=text[:600])


if __name__ == "__main__":
    main(real, virtual)
