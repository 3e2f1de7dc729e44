"""The longer experiments of lesson 11, for its notebook and its picture.

They show what 16 bits cost and save on a GPU. `trained` trains the lesson's module.
"""

import contextlib
import io
import math
import sys
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

import multigpu
import multigpu.trainer as L
from multigpu import plots, proof
from multigpu.errors import UserError
from multigpu.models import CNN
from multigpu.trainer import Precision

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from PTL_Precision import Epochs, LitCNN, read_digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20


# ---- numbers --------------------------------------------------------------------------------


def show_numbers(numbers: list[float]) -> None:
    """Print how each type stores the numbers, and their bits: sign, exponent, fraction."""
    for dtype, exponent in ((torch.float32, 8), (torch.bfloat16, 8), (torch.float16, 5)):
        limits = torch.finfo(dtype)
        span = f"at most {limits.max:.3g}, normal from {limits.tiny:.1e}"
        print(f"{dtype}: {span}, spacing after 1: 1/{1 / limits.eps:.0f}")
        for number in numbers:
            stored = torch.tensor(number, dtype=dtype)
            integer = stored.view(torch.int32 if limits.bits == 32 else torch.int16).item()
            bits = f"{integer & (2**limits.bits - 1):0{limits.bits}b}"
            parts = f"{bits[0]} {bits[1 : 1 + exponent]} {bits[1 + exponent :]}"
            print(f"  {number:<12.9g} is {stored.item():<14.9g} {parts}")


# ---- training -------------------------------------------------------------------------------


def trained(
    precision: str, lr: float = 0.05, **trainer: object
) -> tuple[LitCNN, list[dict[str, float]]]:
    """The lesson's module, trained on the digits, and the numbers of each epoch.

    It trains for three epochs on the CPU, unless `trainer`, the Trainer's arguments, has
    others.
    """
    numbers = Epochs()
    module = LitCNN(*read_digits(), lr=lr)
    arguments = {"accelerator": "cpu", "devices": 1, "max_epochs": 3, "callbacks": [numbers]}
    with contextlib.redirect_stdout(io.StringIO()):
        L.Trainer(
            precision=precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **arguments | trainer,
        ).fit(module)
    return module, numbers.history


def away(history: list[dict[str, float]], exact: list[dict[str, float]]) -> float:
    """The largest difference of the test losses after an epoch of two trainings."""
    pairs = zip(history, exact, strict=True)
    return proof.largest(
        abs(epoch["test_loss"] - other["test_loss"]) for epoch, other in pairs
    )


def learns_the_same(name: str, history: list[dict], exact: list[dict]) -> bool:
    """Print and return whether two trainings learn the same.

    Their test losses are within 0.005 after each epoch, their accuracies within 0.01 at the
    end. Weights in 16 bit are too coarse to compare.
    """
    accuracy = abs(history[-1]["accuracy"] - exact[-1]["accuracy"])
    same = away(history, exact) <= 5e-3 and accuracy <= 1e-2
    claim = (
        f"proof: {name} learns as 32-true, test loss within 0.005 after {len(exact)} epochs"
    )
    print(f"{claim}: {'holds' if same else 'fails'}")
    return same


def three_steps(strategy: str, gpus: int) -> LitCNN:
    """The module after three steps in 16-mixed on virtual V100s.

    strategy   "single_device", "dp", or "ddp", in which each rank has one of the GPUs
    """
    with multigpu.gpus(gpus, gpu="V100-16GB"):
        short = {"max_steps": 3, "limit_val_batches": 0, "callbacks": []}
        devices = "auto" if strategy == "ddp" else gpus
        return trained("16", accelerator="gpu", strategy=strategy, devices=devices, **short)[0]


def says(precision: str, accelerator: str) -> str:
    """Print and return the Trainer's error or warning about a precision."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            short = {"max_steps": 1, "limit_val_batches": 0, "callbacks": []}
            trained(precision, accelerator=accelerator, **short)
        except UserError as error:
            text = f"error: {error}"
        else:
            text = f"warning: {caught[0].message}"
    print(textwrap.fill(text, 95))
    return text


# ---- the loss scale -------------------------------------------------------------------------


def scales(
    images: torch.Tensor, labels: torch.Tensor, first: float, patience: int, steps: int
) -> list[float]:
    """The loss scale before each step, and after the last step.

    The scaler starts with `first` and doubles the scale after `patience` good steps.
    """
    device = images.device.type
    model = CNN().to(images.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler(device, init_scale=first, growth_interval=patience)
    history = [first]
    for _ in range(steps):
        with torch.autocast(device, torch.float16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # skips the step if a gradient is not finite
        scaler.update()  # halves the scale after a skipped step
        history.append(scaler.get_scale())
    return history


def draw_scales(history: list[float]) -> "Figure":
    """Draw the result of `scales`, with a cross where the scale fell after the step."""
    steps = len(history) - 1
    powers = [math.log2(scale) for scale in history]
    skipped = [i for i in range(steps) if history[i + 1] < history[i]]
    count = f"{len(skipped)} of {steps}"
    title = f"Overflow skips the step and halves the scale ({count}); good steps double it"
    curve = {"loss scale": powers[:-1]}
    style = {"level": None, "powers": False}
    figure = plots.lines(range(steps), curve, "step", "log2 of the scale", title, **style)
    axes = figure.axes[0]
    at_overflow = [powers[i] for i in skipped]
    label = "overflow: the step is skipped"
    axes.plot(skipped, at_overflow, "x", color=plots.RED, markersize=9, label=label)
    axes.set_ylim(min(powers) - 1, max(powers) + 1)
    axes.legend()
    return figure


# ---- memory and time: one step, simulated ---------------------------------------------------


def step(precision: str, gpu: str, batch: int) -> tuple[dict[str, float], float, float]:
    """A training step of a CNN with 4,096 hidden units on a virtual GPU, with shapes only.

    Returns the memory in MiB by use, between forward and backward, the peak of the step in
    MiB, and the simulated seconds. Autocast makes 16-bit copies of the weights, two bytes per
    parameter, and keeps them for backward. They are counted apart from the activations.
    """
    with multigpu.gpus(1, gpu=gpu, shapes_only=True) as (device,):
        numbers = Precision(precision, device)
        model = numbers.convert_module(CNN((1, 28, 28), hidden=4096)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        images = numbers.convert_batch(torch.empty(batch, 1, 28, 28)).to(device)
        labels = torch.empty(batch, dtype=torch.long, device=device)
        for _ in range(3):
            began = multigpu.elapsed()
            torch.cuda.reset_peak_memory_stats(device)
            optimizer.zero_grad()
            with numbers.context():
                loss = F.cross_entropy(model(images), labels)
            held = multigpu.memory_held(model, optimizer)[device]
            # There is no loss scale: a scaler reads a number, but there are only shapes.
            loss.backward()
            optimizer.step()
        seconds = multigpu.elapsed() - began
        peak = torch.cuda.max_memory_allocated(device) / MIB

        copies = 0
        if numbers.mixed:
            copies = 2 * sum(parameter.numel() for parameter in model.parameters())
    held["activations"] -= copies
    held = {**held, "16-bit copies": copies}
    return {use: size / MIB for use, size in held.items()}, peak, seconds


def memory(batches: tuple[int, ...]) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """The memory of `step` on an A100 in MiB, for each precision and batch.

    Returns the memory by use between forward and backward, and the peak of the step. The keys
    are "32-true, 64" and so on.
    """
    bars, peaks = {}, {}
    for batch in batches:
        for precision in ("32-true", "bf16-mixed", "bf16-true"):
            name = f"{precision}, {batch:,}"
            bars[name], peaks[name], _ = step(precision, "A100-40GB", batch)
    return bars, peaks


def draw_memory(bars: dict[str, dict[str, float]]) -> "Figure":
    """Draw the bars of `memory`. The title compares the precisions at the last batch."""
    batch = list(bars)[-1].partition(", ")[2]
    exact, mixed = (bars[f"{name}, {batch}"] for name in ("32-true", "bf16-mixed"))
    share = mixed["activations"] / exact["activations"]
    title = f"bf16-mixed at batch {batch}: {share:.0%} of fp32's activations, "
    title += f"and {mixed['16-bit copies']:.0f} MiB of 16-bit copies"
    unit = "MiB by precision and batch, metered on a virtual A100 before backward"
    return plots.stacked_bars(bars, unit, title, totals=True)


def speedups(gpu: str, batches: tuple[int, ...], products: str = "highest") -> list[float]:
    """How many times as fast 16-mixed is as 32-true on `gpu`, simulated, for each batch.

    `products` is torch's float32_matmul_precision: with "high", 32-true's matrix products may
    run in TF32.
    """
    mixed = [step("16-mixed", gpu, batch)[2] for batch in batches]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(products)
    exact = [step("32-true", gpu, batch)[2] for batch in batches]
    torch.set_float32_matmul_precision(before)
    return [slow / fast for slow, fast in zip(exact, mixed, strict=True)]


def peaks(kind: str) -> dict[str, int]:
    """fp16's peak ÷ that of `kind` ("fp32" or "tf32"), by the GPUs' datasheets."""
    gpus = {name: multigpu.GPUS[name] for name in ("V100-16GB", "A100-40GB", "H100-80GB")}
    return {name: round(gpu.fp16 / getattr(gpu, kind)) for name, gpu in gpus.items()}


def draw_speedups(batches: tuple[int, ...], ratios: dict[str, list[float]]) -> "Figure":
    """Draw the results of `speedups` by GPU. The title names the smallest and the largest."""
    points = [
        (ratio, gpu, batch)
        for gpu, values in ratios.items()
        for batch, ratio in zip(batches, values, strict=True)
    ]
    least, most = min(points), max(points)
    title = f"Simulated: from {least[0]:.1f} × ({least[1]}, batch {least[2]:,}) "
    title += f"to {most[0]:.1f} × ({most[1]}, batch {most[2]:,})"
    label = "step time of 32-true\n÷ that of 16-mixed (1: no gain)"
    return plots.lines(batches, ratios, "batch", label, title)
