"""A prediction of memory as text: the parts at each moment of a step, the peak, what fits."""

from collections.abc import Iterable
from dataclasses import replace

from multigpu.memory.formula import Step
from multigpu.virtual.sim.presets import GIB

# Bytes of CUDA's context, which a process has beside its tensors: 526.8 MiB on an H100
# (benchmarks/gpu).
CONTEXT = 527 * 2**20
# Settings that need less, the cheapest first. They are tried if a step does not fit.
LESS = (
    {"attention": "flash"},
    {"attention": "flash", "checkpointing": "full"},
)
# The report names fragmentation if less than this share of the GPU is free. In a virtual
# A100-80GB a peak of 71.1 GiB did not fit: 35 × 2,048 tokens, 1.3 billion weights, full
# checkpointing.
NEAR = 0.15
FRAGMENTATION = (
    "  the allocator can need more, if its free memory is in small pieces:\n"
    "  PYTORCH_ALLOC_CONF=expandable_segments:True avoids most of that"
)


def text(steps: Iterable[Step]) -> str:
    """The table of the first step, and for each one's GPU whether it fits."""
    steps = list(steps)
    first = steps[0]
    return "\n".join([heading(first), table(first), *(verdict(step) for step in steps)])


def heading(step: Step) -> str:
    """Two lines: the model, and how it is trained."""
    model, training = step.model, step.training
    sizes = f"{model.layers} layers × {model.hidden} hidden units × {model.heads} heads"
    return (
        f"GPT of {model.weights / 1e9:.2f} billion weights: {sizes}\n"
        f"{training.batch} × {model.tokens} tokens, {training.optimizer}, "
        f"{training.precision}, checkpointing {training.checkpointing}, "
        f"{training.attention} attention"
    )


def table(step: Step) -> str:
    """GiB of each part, at each moment that can have the peak; a title has two lines."""
    moments = step.moments()
    parts = dict.fromkeys(part for held in moments.values() for part in held)
    titles = [name.rsplit(" of ", 1) if " of " in name else name.split() for name in moments]
    lines = [
        ["", *(f"{first} of" if first != "optimizer's" else first for first, _ in titles)],
        ["GiB", *(last for _, last in titles)],
        *(
            [part, *(_gib(held[part]) if held.get(part) else "" for held in moments.values())]
            for part in parts
        ),
        ["together", *(_gib(sum(held.values())) for held in moments.values())],
    ]
    return _aligned(lines)


def shared(steps: Iterable[Step], gpus: int) -> str:
    """GiB that each of so many GPUs keeps for all of a step, and whether its peak fits.

    Rajbhandari et al. (2019), "ZeRO" (arXiv 1910.02054), table 1: a part that is shared is
    divided by the number of GPUs. DDP and the three stages share 0, 1, 2 or 3 parts. The steps
    differ in the GPU alone; each has a column.
    """
    steps = list(steps)
    step = steps[0]
    state, gradients = step.state(), 4 * step.model.weights
    sizes = {
        "optimizer": state["optimizer"],
        "gradients": gradients,
        "weights": state["weights"],
    }
    names = [step.gpu.name for step in steps]
    lines = [[f"GiB on each of {gpus} GPUs", *sizes, "together", "peak", *names]]
    for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP")):
        shares = [gpus if place < stage else 1 for place in range(len(sizes))]
        held = [size / share for size, share in zip(sizes.values(), shares, strict=True)]
        peaks = [gpu_step.shared_peak(gpus, stage) for gpu_step in steps]
        rooms = [
            gpu_step.gpu.memory - CONTEXT - peak
            for gpu_step, peak in zip(steps, peaks, strict=True)
        ]
        cells = [*map(_gib, (*held, sum(held), peaks[0])), *map(_fits, rooms)]
        lines.append([name, *cells])
    return (
        f"{_aligned(lines)}\n"
        f"peak: with activations, logits and temporaries; buckets as large as the gradients "
        f"with DDP and ZeRO-1;\n  what fully_shard gathers with ZeRO-2 "
        f"(reshard_after_forward=False) and ZeRO-3; CUDA's context comes on top"
    )


def _fits(left: float) -> str:
    return f"fits, {_gib(left)} free" if left >= 0 else f"does not fit, {_gib(-left)} missing"


def _aligned(lines: list[list[str]]) -> str:
    """A table's rows: the first column begins at the left, the others end at the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    )


def room(step: Step) -> int:
    """Bytes that are left on the GPU at the peak, beside CUDA's context; negative: missing."""
    return step.gpu.memory - CONTEXT - step.peak()[1]


def verdict(step: Step) -> str:
    """Whether the step fits, how much is left or missing, and what would fit."""
    moment, peak = step.peak()
    left = room(step)
    first = (
        f"{step.gpu.name}: {_fits(left)}\n  peak {_gib(peak)}, at the {moment}; the GPU has "
        f"{_gib(step.gpu.memory)}, CUDA's context takes {_gib(CONTEXT)}"
    )
    if left < 0:
        return f"{first}\n{remedy(step)}"
    return f"{first}\n{FRAGMENTATION}" if left < NEAR * step.gpu.memory else first


def remedy(step: Step) -> str:
    """A line: the first of LESS with which the step fits, with a smaller batch if needed."""
    training = step.training
    least = LESS[-1]
    smaller = [{**least, "batch": batch} for batch in range(training.batch - 1, 0, -1)]
    for changes in (*LESS, *smaller):
        if room(replace(step, training=replace(training, **changes))) >= 0:
            flags = [
                f"--{name} {value}"
                for name, value in changes.items()
                if getattr(training, name) != value
            ]
            return f"  fits with {' '.join(flags)}"
    smallest = replace(step, training=replace(training, **least, batch=1))
    moment, peak = smallest.peak()
    needs = "with --attention flash --checkpointing full --batch 1"
    moments = smallest.moments()
    del moments["optimizer's step"]["temporaries"]
    fused = max(sum(parts.values()) for parts in moments.values())
    if fused <= step.gpu.memory - CONTEXT:
        return (
            f"  fits {needs} and AdamW(fused=True), "
            f"whose step has no temporaries: the peak is {_gib(fused)}"
        )
    state = sum(step.state().values()) + 4 * step.model.weights
    return (
        f"  {needs} the peak is {_gib(peak)}, at the {moment}, of which\n  {_gib(state)} are "
        f"weights, gradients and optimizer state: several GPUs must share them (--gpus 8)"
    )


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.1f}"
