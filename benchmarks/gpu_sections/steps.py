"""Section: simulated against measured time of training steps, and of tiny operations."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from section import Section
from timing import Call, Case, compare, simulated_step, step_times
from torch import nn
from workloads import FULL, HALF, MODELS, TINY, new_batch, new_model, precisions, training_step

BATCHES = {"cnn": (64, 1024, 16_384), "resnet50": (8, 64, 256), "gpt": (2, 16, 64)}


def twenty(call: Call) -> Call:
    return lambda: [call() for _ in range(20)]


def launches(device: torch.device) -> dict[str, Call]:
    """Tiny operations 20 times, whose kernels take less than their launches."""
    x = torch.zeros(8, 64, device=device)
    images = torch.zeros(2, 8, 8, 8, device=device)
    linear = nn.Linear(64, 64).to(device)
    convolution = nn.Conv2d(8, 8, 3, padding=1).to(device)
    optimizer = torch.optim.SGD(linear.parameters(), 0.0, momentum=0.9)
    linear(x).sum().backward()
    calls: dict[str, Call] = {
        "add": lambda: x + 1,
        "softmax": lambda: F.softmax(x, 1),
        "linear": lambda: linear(x),
        "linear, forward and backward": lambda: linear(x).sum().backward(),
        "conv2d": lambda: convolution(images),
        "layer_norm": lambda: F.layer_norm(x, (64,)),
        "SGD.step of a layer": optimizer.step,
    }
    return {name: twenty(call) for name, call in calls.items()}


def cases(section: Section) -> Iterator[Case]:
    size = TINY if section.quick else FULL
    for name in MODELS:
        for how in precisions(section.gpu):
            for rows in (1, 2) if section.quick else BATCHES[name]:

                def calls(
                    device: torch.device, name: str = name, how: str = how, rows: int = rows
                ) -> dict[str, Call]:
                    model = new_model(name, size).to(device)
                    batch = new_batch(name, size, rows, device)
                    return {"": training_step(model, batch, HALF.get(how))}

                yield Case(f"{name} {how} {rows}", name, how, calls)
    yield Case("20 ×", "launches", "fp32", launches)


if __name__ == "__main__":
    compare(
        "One training step with SGD: the time on the GPU, host included, and the simulated "
        "time. A case is the model, the precision, and the rows of its batch; then tiny "
        "operations, 20 times each, which show what a launch costs the host.",
        "ms",
        cases,
        step_times,
        simulated_step,
    )
