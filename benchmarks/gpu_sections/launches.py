"""Section: what a launch costs: the host's time for an operation, and a tiny kernel's time.

`host` is the host's time for a call that it does not wait for. `kernel` is the device's time,
with all launches done before. `together` is the time of a call in a long row of calls, which
the simulation predicts: the longer of the two.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from section import Section, main
from timing import Times, kernel_times, step_times, synchronize
from torch import nn

from multigpu.virtual import control

CALLS = 200
ROUNDS = 9


def operations(device: torch.device) -> dict[str, Callable[[], object]]:
    """Tiny operations, whose arithmetic takes no time; some of them with autograd."""
    one = torch.zeros(1, device=device)
    x = torch.zeros(8, 64, device=device)
    images = torch.zeros(2, 8, 8, 8, device=device)
    words = torch.zeros(8, dtype=torch.long, device=device)
    linear = nn.Linear(64, 64).to(device)
    convolution = nn.Conv2d(8, 8, 3, padding=1).to(device)
    norm = nn.LayerNorm(64).to(device)
    batch_norm = nn.BatchNorm2d(8).to(device)
    embedding = nn.Embedding(16, 64).to(device)
    q = torch.zeros(1, 2, 16, 16, device=device)
    optimizer = torch.optim.SGD(linear.parameters(), 0.0, momentum=0.9)
    linear(x).sum().backward()
    return {
        "add_ in place": lambda: one.add_(1),
        "add": lambda: x + 1,
        "relu": lambda: F.relu(x),
        "sum": lambda: x.sum(),
        "softmax": lambda: F.softmax(x, 1),
        "cross_entropy": lambda: F.cross_entropy(x, words),
        "linear": lambda: linear(x),
        "linear, forward and backward": lambda: linear(x).sum().backward(),
        "conv2d": lambda: convolution(images),
        "layer_norm": lambda: norm(x),
        "batch_norm": lambda: batch_norm(images),
        "max_pool2d": lambda: F.max_pool2d(images, 2),
        "embedding": lambda: embedding(words),
        "attention": lambda: F.scaled_dot_product_attention(q, q, q),
        "SGD.step of a layer": optimizer.step,
    }


def host_times(call: Callable[[], object], device: torch.device, calls: int) -> Times:
    """The host's time per call; rounds end before the device's queue is full."""
    call()
    rounds = []
    for _ in range(ROUNDS):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - began) / calls)
    return Times.of(rounds)


def real(section: Section) -> None:
    simulated = section.virtual()
    calls = 5 if section.quick else CALLS
    made: list[float] = []
    for name, call in operations(section.device).items():
        with section.item(name):
            host = host_times(call, section.device, calls)
            together = step_times(
                lambda call=call: [call() for _ in range(20)], section.device, 0.3
            )
            kernel = kernel_times(call, section.device)
            found = simulated.get(name, {}).get("seconds")
            per_call = together.median / 20
            made.append(host.median)
            section.row(
                case=name,
                host=host.as_dict(),
                kernel=kernel.as_dict(),
                together=per_call,
                simulated=found,
                error=found and found / per_call - 1,
            )
    if made:
        section.note(f"The median operation costs the host {1e6 * median(made):.1f} µs.")


def virtual(section: Section) -> None:
    with control.running(1, gpu=section.card.gpu, compute=False) as (device,):
        for name, call in operations(device).items():
            with section.item(name):
                call()
                began = control.elapsed()
                for _ in range(20):
                    call()
                section.row(case=name, seconds=(control.elapsed() - began) / 20)


if __name__ == "__main__":
    main(real, virtual)
