"""Section: what a program sees: errors, autocast's dtypes, and losses, real and virtual."""

import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from section import Section, main
from torch import nn
from workloads import HALF, TINY, new_batch, new_model, training_step

from multigpu import devices
from multigpu.virtual import control

FAR = 63  # no machine has so many GPUs
LIMIT = 1e-5  # of a loss: a GPU adds in another order than the CPU


def mistakes(device: torch.device) -> dict[str, Callable[[], object]]:
    """Each mistake's name → a function that makes it."""
    kind = device.type
    x = torch.ones(4, 4, device=device)
    host = torch.ones(4, 4)
    labels = torch.zeros(4, dtype=torch.long)
    module = getattr(torch, kind)

    return {
        "out of memory": lambda: torch.empty(2**50, dtype=torch.uint8, device=device),
        "add: device and host": lambda: x + host,
        "matmul: device and host": lambda: x @ host,
        "linear: weight on the host": lambda: nn.Linear(4, 4)(x),
        "linear: input on the host": lambda: nn.Linear(4, 4).to(device)(host),
        "conv2d: weight on the host": lambda: nn.Conv2d(1, 1, 3)(x[None, None]),
        "embedding: weight on the host": lambda: nn.Embedding(4, 2)(labels.to(device)),
        "embedding: indices on the host": lambda: nn.Embedding(4, 2).to(device)(labels),
        "cross_entropy: labels on the host": lambda: F.cross_entropy(x, labels),
        "cat: device and host": lambda: torch.cat([x, host]),
        "out= on the host": lambda: torch.add(x, x, out=torch.empty(4, 4)),
        "index of a host tensor on the device": lambda: host[labels.to(device)],
        "numpy()": lambda: x.numpy(),
        "pin_memory()": lambda: x.pin_memory(),
        "a device that does not exist": lambda: torch.ones(1, device=f"{kind}:{FAR}"),
        "set_device": lambda: module.set_device(FAR),
        "a generator of the host": lambda: torch.randn(
            2, device=device, generator=torch.Generator()
        ),
        "shapes of a matrix product": lambda: x @ torch.ones(3, 3, device=device),
        "dtypes of a linear layer": lambda: nn.Linear(4, 4).to(device)(x.half()),
    }


def common(text: str) -> str:
    """The first line of an error without what must differ: the device's name, and numbers."""
    line = text.strip().split("\n")[0]
    line = re.sub(r"\b(?:CUDA|VGPU|cuda|vgpu)\b", "gpu", line)
    line = re.sub(r"(wrapper)_(?:CUDA|VGPU)_+", r"\1_gpu_", line)
    line = re.sub(r"torch\.(?:cuda|vgpu)\.", "torch.gpu.", line)
    line = re.sub(r"\d[\d.]*(?= (?:GiB|MiB|KiB|bytes))", "N", line)
    # What follows differs by what PyTorch has reserved, and names an environment variable.
    return re.sub(r"(total capacity of N GiB).*", r"\1", line)


def operations(
    device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], torch.Tensor]]:
    """Operations of autocast's three kinds: 16 bit, float32, and the widest dtype.

    `dtype` is autocast's: the results of earlier operations have it.
    """
    x = torch.rand(4, 8, device=device) + 0.5
    half = x.to(dtype)
    images = torch.rand(2, 3, 8, 8, device=device)
    weight = torch.rand(4, 3, 3, 3, device=device)
    labels = torch.zeros(4, dtype=torch.long, device=device)
    q = torch.rand(1, 2, 4, 8, device=device)
    return {
        "matmul": lambda: x @ x.T,
        "linear": lambda: F.linear(x, x),
        "conv2d": lambda: F.conv2d(images, weight),
        "attention": lambda: F.scaled_dot_product_attention(q, q, q),
        "softmax": lambda: F.softmax(half, 1),
        "layer_norm": lambda: F.layer_norm(half, (8,)),
        "cross_entropy": lambda: F.cross_entropy(half, labels),
        "exp": lambda: half.exp(),
        "sum": lambda: half.sum(),
        "add": lambda: half + x,
        "relu": lambda: F.relu(half),
        "addcmul": lambda: torch.addcmul(half, half, x),
    }


def error_of(call: Callable[[], object]) -> str:
    """The class and the text of the exception that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {common(str(error))}"
    return "no error"


def dtype_of(call: Callable[[], torch.Tensor], kind: str, half: torch.dtype) -> str:
    """The dtype of a call's result under autocast."""
    with torch.autocast(kind, half):
        return str(call().dtype).removeprefix("torch.")


def losses(name: str, device: torch.device) -> list[float]:
    """The losses of four steps in full float32. Dropout's numbers would differ on a GPU."""
    devices.compute_exactly()
    step = training_step(new_model(name, TINY).to(device), new_batch(name, TINY, 8, device))
    return [step().item() for _ in range(4)]


def questions(section: Section, device: torch.device) -> Iterator[tuple[str, Callable]]:
    """(case, function that returns its answer) on a device, of all cases."""
    for name, call in mistakes(device).items():
        yield name, partial(error_of, call)
    for precision, half in HALF.items():
        if precision == "bf16" and not section.gpu.bf16:
            continue
        for name, call in operations(device, half).items():
            yield f"{precision} {name}", partial(dtype_of, call, device.type, half)
    for name in ("cnn", "gpt"):
        yield f"losses of {name}", partial(losses, name, device)


def same(one: object, other: object) -> bool:
    """Whether two answers are equal: texts exactly, losses to LIMIT."""
    if isinstance(one, list) and isinstance(other, list):
        return all(abs(a - b) <= LIMIT * abs(b) for a, b in zip(one, other, strict=True))
    return one == other


def real(section: Section) -> None:
    simulated = section.virtual()
    for name, question in questions(section, section.device):
        with section.item(name):
            answer, expected = question(), simulated.get(name, {}).get("answer")
            # The CPU of a rehearsal has other errors and other lists for autocast.
            compared = section.device.type == "cuda" or isinstance(answer, list)
            ok = same(answer, expected) if compared else None
            section.row(case=name, ok=ok, gpu=answer, virtual=expected)


def virtual(section: Section) -> None:
    with control.running(1, gpu=section.gpu) as (device,):
        for name, question in questions(section, device):
            with section.item(name):
                section.row(case=name, answer=question())


if __name__ == "__main__":
    main(
        "What a program sees on the GPU and on the virtual GPU: an error's class and first "
        "line, in which numbers of bytes are N and the device's kind is gpu; the dtype of an "
        "operation under autocast; and the losses of four steps in float32 (equal: to 1e-5).",
        {"ok": "", "gpu": "", "virtual": ""},
        real,
        virtual,
    )
