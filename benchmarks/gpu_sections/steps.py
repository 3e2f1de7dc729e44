"""Section: simulated against measured time of training steps, kernels and tiny operations.

On a GPU, times are read from CUDA events, after a warm-up. In a rehearsal, in which the CPU
has the GPU's place, they are read from the clock.
"""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import quantiles

import torch
import torch.nn.functional as F
from section import Section, main
from torch import nn
from workloads import (
    FULL,
    HALF,
    MODELS,
    TINY,
    computing,
    new_batch,
    new_model,
    precisions,
    simulating,
    training_step,
)

from multigpu.virtual import control

Call = Callable[[], object]
BATCHES = {"cnn": (64, 1024, 16_384), "resnet50": (8, 64, 256), "gpt": (2, 16, 64)}
# m, n, k: squares, thin products as of a small batch, a GPT's layers, an odd vocabulary.
PRODUCTS = (
    *((1024, 1024, 1024), (8192, 8192, 8192), (4095, 4095, 4095), (16, 4096, 4096)),
    *((256, 4096, 4096), (8192, 1536, 512), (8192, 50_257, 768), (256, 256, 65_536)),
)
# Channels in and out, kernel, stride, height and width, with 128 rows: layers of ResNet-50.
CONVOLUTIONS = (
    *((3, 64, 7, 2, 224), (64, 64, 1, 1, 56), (64, 64, 3, 1, 56), (128, 128, 3, 1, 28)),
    *((256, 1024, 1, 1, 14), (512, 512, 3, 1, 7)),
)
# Rows, heads, length, width of a head.
ATTENTION = ((8, 12, 1024, 64), (4, 16, 2048, 64), (2, 32, 4096, 128), (64, 8, 512, 64))


def times(call: Call, device: torch.device) -> dict[str, float]:
    """The median and the quartiles, in seconds, of a call with the host running ahead.

    A call takes the longer of the host's time for its launches and the GPU's time, as in
    training. There are 5 to 50 repeats: as many as fit into a second.
    """
    found, repeats = [], 2
    for _ in range(4):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    if device.type == "cuda":
        repeats = max(5, min(50, int(1 / found[-1])))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        found = [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
    low, middle, high = quantiles(found[-repeats:], n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high, "repeats": repeats}


def simulated(call: Call) -> float:
    """Simulated seconds of a call on the running virtual GPU, after one to warm up."""
    call()
    began = control.elapsed()
    for _ in range(2):
        call()
    return (control.elapsed() - began) / 2


def step(name: str, how: str, rows: int, quick: bool, device: torch.device) -> Call:
    size = TINY if quick else FULL
    model = new_model(name, size).to(device)
    return training_step(model, new_batch(name, size, rows, device), HALF.get(how))


def kernel(kind: str, how: str, sizes: tuple, device: torch.device) -> Call:
    """A product, a convolution or attention, of random operands in this precision."""

    def random(*shape: int) -> torch.Tensor:
        # Zeros would take less power, so a GPU at its power limit would be faster with them.
        return torch.randn(*shape, dtype=HALF.get(how, torch.float32), device=device)

    if kind == "product":
        m, n, k = sizes
        a, b = random(m, k), random(k, n)
        return lambda: a @ b
    if kind == "convolution":
        rows, inward, outward, size, stride, image = sizes
        x, weight = random(rows, inward, image, image), random(outward, inward, size, size)
        return lambda: F.conv2d(x, weight, stride=stride, padding=size // 2)
    q, k, v = (random(*sizes) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def memory_bound(name: str, megabytes: int, device: torch.device) -> Call:
    """An operation on a float32 tensor; of 1 MiB it shows the cost of its launch."""
    x = torch.randn(megabytes * 256, 1024, device=device)
    norm = nn.LayerNorm(1024).to(device)
    calls = {
        "add": lambda: x + x,
        "gelu": lambda: F.gelu(x),
        "softmax": lambda: F.softmax(x, 1),
        "sum": lambda: x.sum(),
        "layer_norm, with backward": lambda: norm(x).sum().backward(),
    }
    return calls[name]


def cases(section: Section) -> Iterator[tuple[str, str, str, Callable[[torch.device], Call]]]:
    """(case, kind, precision, function from a device to the call) of all cases."""
    quick, wanted = section.quick, precisions(section.gpu)
    for name in MODELS:
        for how in wanted:
            for rows in (1, 2) if quick else BATCHES[name]:
                yield (
                    f"{name} {how} {rows}",
                    f"{name} {how}",
                    how,
                    (lambda device, a=(name, how, rows, quick): step(*a, device)),
                )
    shapes = [("product", how, one) for how in wanted for one in PRODUCTS]
    shapes += [("convolution", how, (128, *one)) for how in wanted for one in CONVOLUTIONS]
    shapes += [("attention", wanted[-1], one) for one in ATTENTION]
    if quick:
        shapes = [("product", how, (16, 16, 16)) for how in wanted]
        shapes += [("convolution", "fp32", (2, 3, 4, 3, 1, 8))]
        shapes += [("attention", wanted[-1], (1, 2, 16, 8))]
    for kind, how, sizes in shapes:
        yield (
            f"{kind} {how} {'×'.join(map(str, sizes))}",
            f"{kind} {how}",
            how,
            (lambda device, a=(kind, how, sizes): kernel(*a, device)),
        )
    for name in ("add", "gelu", "softmax", "sum", "layer_norm, with backward"):
        for megabytes in (1,) if quick else (1, 256):
            yield (
                f"{name} of {megabytes} MiB",
                f"of {megabytes} MiB",
                "fp32",
                (lambda device, a=(name, megabytes): memory_bound(*a, device)),
            )


def real(section: Section) -> None:
    expected = section.virtual()
    for case, kind, how, make in cases(section):
        with section.item(case), computing(how):
            measured = times(make(section.device), section.device)
            found = expected.get(case, {}).get("seconds")
            error = found and found / measured["median"] - 1
            section.row(case=case, kind=kind, measured=measured, simulated=found, error=error)


def virtual(section: Section) -> None:
    for case, _, how, make in cases(section):
        with section.item(case), simulating(how, section.gpu) as device, computing(how):
            section.row(case=case, seconds=simulated(make(device)))


if __name__ == "__main__":
    main(
        "The time on the GPU, host included, and the simulated time: of a training step with "
        "SGD (model, precision, rows of the batch), then of one call of a kernel. Operands "
        "are random, and warm in the L2 cache. Sizes: product m×n×k; convolution rows×"
        "channels in×out×kernel×stride×image; attention rows×heads×length×width.",
        {"measured": "ms", "simulated": "ms", "error": "%"},
        real,
        virtual,
    )
