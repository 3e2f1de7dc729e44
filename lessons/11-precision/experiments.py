"""What do 16 bits cost and save on a GPU? The longer experiments of lesson 11, for its notebook and its picture."""

import math

import torch
import torch.nn.functional as F

from multigpu import plots, vgpu
from multigpu.models import CNN
from multigpu.trainer.loops.precision import Precision

MIB = 2**20


def step(precision: str, gpu: str, batch: int) -> tuple[dict[str, float], float]:
    """A training step of a CNN with 4,096 hidden units on a virtual GPU, with shapes only: (MiB by use, simulated seconds).

    The memory is that of the moment between forward and backward. What autocast has made of the weights and keeps for
    backward, two bytes a parameter, is told apart from the activations.
    """
    with vgpu.running(1, gpu=gpu, compute=False) as (place,):
        numbers = Precision(precision, place)
        model = numbers.convert_module(CNN((1, 28, 28), hidden=4096)).to(place)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        images = numbers.convert_batch(torch.empty(batch, 1, 28, 28)).to(place)
        labels = torch.empty(batch, dtype=torch.long, device=place)
        for _ in range(3):
            began = vgpu.elapsed()
            optimizer.zero_grad(
                set_to_none=False
            )  # zeros, not nothing: so the bars show the gradients
            with numbers.context():
                loss = F.cross_entropy(model(images), labels)
            held = vgpu.memory_held(model, optimizer)[place]
            loss.backward()  # a scaler asks for the value of a number, and here are shapes only
            optimizer.step()
        seconds = vgpu.elapsed() - began
        copies = (
            2 * sum(parameter.numel() for parameter in model.parameters())
            if numbers.mixed
            else 0
        )
    held["activations"] -= copies
    return {
        part: size / MIB for part, size in (held | {"16-bit copies": copies}).items()
    }, seconds


def scales(
    images: torch.Tensor, labels: torch.Tensor, first: float, patience: int, steps: int
) -> list[float]:
    """The loss scale before each step, and after the last: a scaler that doubles after `patience` good steps."""
    model = CNN().to(images.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler(
        images.device.type, init_scale=first, growth_interval=patience
    )
    found = [first]
    for _ in range(steps):
        with torch.autocast(images.device.type, torch.float16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # no step, if a gradient is not finite
        scaler.update()  # half of the scale in that case
        found.append(scaler.get_scale())
    return found


def memory(batches: tuple[int, ...] = (64, 4096)):
    """The bars of `step` on an A100; prints their lengths. The title is true of these batches."""
    names = ("32-true", "bf16-mixed", "bf16-true")
    bars = {
        f"{name}, {batch:,}": step(name, "A100-40GB", batch)[0]
        for batch in batches
        for name in names
    }
    print(
        "MiB by precision and batch:",
        "; ".join(f"{name}: {sum(parts.values()):.0f}" for name, parts in bars.items()),
    )
    title = "Mixed precision nearly halves activations, and adds 16-bit copies of the weights"
    unit = "MiB by precision and batch, metered on a virtual A100 before backward"
    return plots.stacked(bars, unit, title, totals=True)


def speed(batches: tuple[int, ...] = (64, 256, 1024, 4096)):
    """How many times as fast as 32-true 16-mixed is, on three GPUs; prints it. The title is true of these batches."""
    gpus = ("V100-16GB", "A100-40GB", "H100-80GB")
    ratios = {
        gpu: [step("32-true", gpu, b)[1] / step("16-mixed", gpu, b)[1] for b in batches]
        for gpu in gpus
    }
    for gpu, found in ratios.items():
        shown = (
            f"{batch:,}: {ratio:.1f} ×" for batch, ratio in zip(batches, found, strict=True)
        )
        print(f"{gpu}, 16-mixed for 32-true:", ", ".join(shown))
    label = "step time of 32-true\n÷ that of 16-mixed (1: no gain)"
    return plots.lines(
        batches,
        ratios,
        "batch",
        label,
        "Simulated: 16 bit is fast where there is much to multiply",
    )


def draw_scales(found: list[float]):
    """What `scales` gave, with a cross where the scale fell after the step."""
    powers = [math.log2(scale) for scale in found]
    skipped = [i for i in range(len(found) - 1) if found[i + 1] < found[i]]
    share = f"{len(skipped)} of {len(found) - 1}"
    title = f"Overflow skips the step and halves the scale ({share}); good steps in a row double it"
    figure = plots.lines(
        range(len(found) - 1),
        {"loss scale": powers[:-1]},
        "step",
        "log2 of the scale",
        title,
        level=None,
        powers=False,
    )
    axes = figure.axes[0]
    axes.plot(
        skipped,
        [powers[i] for i in skipped],
        "kx",
        markersize=9,
        label="overflow: the step is skipped",
    )
    axes.set_ylim(min(powers) - 1, max(powers) + 1)
    axes.legend(frameon=False)
    return figure
