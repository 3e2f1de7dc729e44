"""The longer experiments of lesson 14: meters, the memory of a step over time, pictures.

All large GPTs are on a virtual GPU, with shapes only.
"""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import multigpu
from multigpu import plots
from multigpu.course import find_root
from multigpu.memory import Model, Step, Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30
GPU = "A100-80GB"
KINDS = ("weights", "optimizer", "gradients", "activations and other")


def _script() -> ModuleType:
    """scripts/PT_GPT_Memory.py as a module."""
    path = find_root() / "scripts" / "PT_GPT_Memory.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _script()


class Run:
    """A GPT in training on a virtual GPU with room for anything; `step` makes a step."""

    def __init__(self, model: Model, training: Training, in_backward: bool = False):
        self.device = torch.device("cuda:0")
        self.training = training
        with self.device:
            self.net = script.GPT(
                model.layers,
                model.hidden,
                model.heads,
                model.tokens,
                model.vocabulary,
                training.attention,
                training.checkpointing,
            )
            batch = (training.batch, model.tokens + 1)
            self.sequences = torch.randint(model.vocabulary, batch)
        self.optimizers = [self._optimizer(list(self.net.parameters()))]
        if in_backward:
            self._step_in_backward()

    def _optimizer(self, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if self.training.optimizer == "adamw":
            return torch.optim.AdamW(weights)
        return torch.optim.SGD(weights, 0.1, momentum=0.9)

    def _step_in_backward(self) -> None:
        """One optimizer for each weight, which steps as soon as backward has its gradient."""
        of_weight = {weight: self._optimizer([weight]) for weight in self.net.parameters()}

        def step(weight: torch.nn.Parameter) -> None:
            of_weight[weight].step()
            of_weight[weight].zero_grad()

        for weight in of_weight:
            weight.register_post_accumulate_grad_hook(step)
        self.optimizers = []

    def backward(self, sequences: torch.Tensor) -> None:
        half = self.training.precision == "bf16-mixed"
        with torch.autocast("cuda", torch.bfloat16, half):
            labels = sequences[:, 1:].flatten()
            # The logits get no name: they would stay until the end of backward.
            loss = F.cross_entropy(self.net(sequences[:, :-1]).flatten(0, 1), labels)
        loss.backward()

    def step(self, micro_batches: int = 1) -> None:
        for sequences in self.sequences.chunk(micro_batches):
            self.backward(sequences)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def running(model: Model, training: Training, in_backward: bool = False) -> Iterator[Run]:
    """A run on a virtual A100 after its first step, which makes the optimizer's state."""
    with multigpu.gpus(1, gpu=GPU, memory="2048GiB", shapes_only=True):
        run = Run(model, training, in_backward)
        run.step()
        torch.cuda.reset_peak_memory_stats()
        yield run
        del run


def meter(model: Model, training: Training, **options: Any) -> tuple[float, float, float]:
    """A step's peak of allocated and of reserved memory in GiB, and its simulated seconds.

    `micro_batches` accumulates; `in_backward` lets the optimizer step in backward.
    """
    micro_batches = options.pop("micro_batches", 1)
    with running(model, training, **options) as run:
        began = multigpu.elapsed()
        run.step(micro_batches)
        seconds = multigpu.elapsed() - began
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return peaks[0] / GIB, peaks[1] / GIB, seconds


def kept_by_a_block(model: Model, training: Training) -> int:
    """Bytes that a block keeps for backward, by the meter, with its input."""
    with multigpu.gpus(1, gpu=GPU, shapes_only=True) as (gpu,):
        block = script.Block(model.hidden, model.heads, training.attention).to(gpu)
        x = torch.empty(training.batch, model.tokens, model.hidden, device=gpu)
        x.requires_grad_()
        warm = block(x)  # makes cuBLAS's workspace
        del warm
        before = torch.cuda.memory_allocated()
        y = block(x)
        kept = torch.cuda.memory_allocated() - before - y.nbytes + x.nbytes
        del block, x, y
    return kept


class _Memory(TorchDispatchMode):
    """Notes the bytes of each kind after each operation, and the simulated seconds."""

    def __init__(self, run: Run, always: dict[str, int]):
        super().__init__()
        self.weights = list(run.net.parameters())
        self.always = always
        self.began = multigpu.elapsed()
        self.points: list[dict[str, float]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        gradients = sum(
            weight.grad.nbytes for weight in self.weights if weight.grad is not None
        )
        held = torch.cuda.memory_allocated() - gradients - sum(self.always.values())
        point = self.always | {"gradients": gradients, "activations and other": held}
        self.points.append(point | {"seconds": multigpu.elapsed() - self.began})
        return result


def over_time(model: Model, training: Training) -> list[dict[str, float]]:
    """Bytes of each of KINDS after each operation of a step, with "seconds"."""
    state = Step(model, training, multigpu.GPUS[GPU]).state()
    with running(model, training) as run:
        always = {"weights": state["weights"], "optimizer": state["optimizer"]}
        with _Memory(run, always) as memory:
            run.step()
    return memory.points


def draw_over_time(steps: dict[str, list[dict[str, float]]], title: str) -> "Figure":
    """One panel for each step: GiB by kind over simulated time."""
    figure = plots.figure(8, 1 + 1.7 * len(steps))
    highest = max(
        sum(point[kind] for kind in KINDS) for points in steps.values() for point in points
    )
    longest = max(points[-1]["seconds"] for points in steps.values())
    for place, (name, points) in enumerate(steps.items(), 1):
        axes = figure.add_subplot(len(steps), 1, place)
        seconds = [point["seconds"] for point in points]
        below = [0.0] * len(points)
        for kind in KINDS:
            look = plots.PARTS[kind]
            above = [low + point[kind] / GIB for low, point in zip(below, points, strict=True)]
            style = {"facecolor": look.fill, "edgecolor": plots.EDGE, "hatch": look.hatch}
            axes.fill_between(seconds, below, above, label=kind, linewidth=0.3, **style)
            below = above
        axes.set(title=name, ylabel="GiB", ylim=(0, 1.05 * highest / GIB), xlim=(0, longest))
        axes.set_xlabel("simulated seconds")
        axes.legend()
    figure.suptitle(title)
    plots.share_legend(figure)
    return figure


def draw_tokens(model: Model, numbers: list[int]) -> "Figure":
    """GiB that all blocks keep for one sequence, over its tokens."""
    cases = {
        "math": ("none", "math"),
        "math, selective": ("selective", "math"),
        "flash": ("none", "flash"),
        "flash, full": ("full", "flash"),
    }
    curves = {}
    for name, (checkpointing, attention) in cases.items():
        training = Training(1, checkpointing=checkpointing, attention=attention)
        curves[name] = [
            model.layers
            * Step(
                Model(model.layers, model.hidden, model.heads, tokens),
                training,
                multigpu.GPUS[GPU],
            ).kept_block()
            / GIB
            for tokens in numbers
        ]
    title = "Without a kernel like flash, attention's memory grows with the square"
    figure = plots.lines(
        numbers, curves, "tokens of the sequence", "GiB kept, by formula", title,
        level=80, dashed="flash",
    )  # fmt: skip
    figure.axes[0].set_yscale("log")
    figure.axes[0].set_ylim(0.1, None)
    return figure


def draw_digits(images: torch.Tensor) -> "Figure":
    """Images (n, 8, 8) of grey levels 0 to 16, side by side."""
    figure = plots.figure(8, 1)
    for place, image in enumerate(images.cpu(), 1):
        axes = figure.add_subplot(1, len(images), place)
        axes.imshow(image, cmap="gray_r", vmin=0, vmax=16)
        axes.axis("off")
    return figure


def published() -> dict[str, Any]:
    """benchmarks/memory.json: the formula beside meter, report and published figures."""
    path = find_root() / "benchmarks" / "memory.json"
    return json.loads(path.read_text(encoding="utf-8"))


def print_published(published: dict[str, Any]) -> None:
    for row in published["adan"]:
        print(
            f"GPT-2, {row['heads']:>2} heads × {row['hidden']:>4}: a layer adds"
            f" {row['published_mb']:,.0f} MB; our formula {row['formula_mb']:,.0f}, "
            f"with what theirs keeps {row['their_model_mb']:,.0f}"
        )
    for row in published["h100"]:
        print(
            f"H100, {row['case']}: measured {row['measured']:,.0f} MiB, formula "
            f"{row['formula']:,.0f}"
        )
