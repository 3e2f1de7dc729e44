"""A proof as JSON, and as a picture: the difference over the steps, and parameters × steps."""

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from multigpu.files import write_json
from multigpu.prove.compare import StepDistances
from multigpu.prove.proof import Proof

# The parameters whose names a picture has room for.
MOST_NAMES = 40
# What is equal to the last digit has no logarithm: it is drawn here.
SMALLEST = 1e-9


def write(proof: Proof, picture: Path | None, json_file: Path | None) -> list[str]:
    """Write the files that were asked for; return a line for each."""
    lines = []
    if json_file:
        lines.append(f"numbers: {write_json(json_file, as_json(proof))}")
    if picture and proof.comparison and proof.comparison.steps:
        draw(proof, picture)
        lines.append(f"picture: {picture}")
    elif picture:
        lines.append(f"no picture: no step was compared, so {picture} was not written")
    return lines


def as_json(proof: Proof) -> dict[str, Any]:
    """The verdict and all distances. NaN is null."""
    return {
        "verdict": proof.verdict,
        "exit_code": proof.exit_code,
        "line": proof.line,
        "command": proof.command,
        "reference": proof.reference,
        "cause": asdict(proof.cause) if proof.cause else None,
        "notes": proof.notes,
        "seconds": proof.seconds,
        "steps": [_step(step) for step in proof.comparison.steps] if proof.comparison else [],
    }


def _step(step: StepDistances) -> dict[str, Any]:
    return {
        "optimizer": step.key[0],
        "step": step.number,
        "losses": {
            "reference": [_finite(loss) for loss in step.reference[0].losses],
            **{
                f"rank {rank}": [_finite(loss) for loss in own.losses]
                for rank, own in zip(step.ranks, step.parallel, strict=True)
            },
        },
        **{
            kind: dict(
                zip(("difference", "limit"), map(_finite, distances.relative()), strict=True)
            )
            for kind, distances in step.kinds.items()
        },
        "parameters": {
            name: {
                kind: {
                    "difference": _finite(_share(distances.off, distances.scale, place)),
                    "apart": _finite(_share(distances.apart, distances.scale, place)),
                    "limit": _finite(_share(distances.limit, distances.scale, place)),
                }
                for kind, distances in step.kinds.items()
            }
            for place, name in enumerate(step.names)
        },
    }


def _share(values: np.ndarray, scale: np.ndarray, place: int) -> float:
    return float(values[place]) / max(float(scale[place]), 1e-30)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def draw(proof: Proof, path: Path) -> None:
    """Draw the difference of the gradients over the steps, with what rounding explains, and
    for each parameter and step how many times the limit it is.
    """
    from matplotlib.figure import Figure

    steps = [step for step in proof.comparison.steps if step.key[0] == 0]
    numbers = [step.number for step in steps]
    names = steps[0].names
    figure = Figure(
        figsize=(9, 4.6 + 0.16 * min(len(names), MOST_NAMES)), layout="constrained"
    )
    above, below = figure.subplots(
        2, 1, height_ratios=[1, 0.5 + 0.05 * min(len(names), MOST_NAMES)], sharex=True
    )
    kinds = ("gradients", "", "tab:blue"), ("weights", " before the step", "tab:orange")
    for kind, when, colour in kinds:
        pairs = np.array([step.kinds[kind].relative() for step in steps])
        pairs = np.maximum(np.nan_to_num(pairs, nan=1.0), SMALLEST)
        above.plot(numbers, pairs[:, 0], "o-", color=colour, label=f"{kind}{when}")
        above.fill_between(
            numbers,
            SMALLEST,
            pairs[:, 1],
            color=colour,
            alpha=0.15,
            label="rounding explains",
        )
    above.set_yscale("log")
    above.set_ylabel("distance ÷ norm\n(lowest: none)")
    figure.suptitle(_title(proof), fontsize=9, x=0.01, ha="left")
    above.set_ylim(bottom=SMALLEST)
    above.legend(fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    times = np.array(
        [
            np.nan_to_num(
                step.kinds["gradients"].off / np.maximum(step.kinds["gradients"].limit, 1e-30),
                nan=1e9,
            )
            for step in steps
        ]
    ).T
    image = below.imshow(
        np.log10(np.maximum(times, 1e-3)),
        aspect="auto",
        cmap="RdBu_r",
        vmin=-3,
        vmax=3,
        extent=(numbers[0] - 0.5, numbers[-1] + 0.5, len(names) - 0.5, -0.5),
        interpolation="nearest",
    )
    if len(names) <= MOST_NAMES:
        below.set_yticks(range(len(names)), names, fontsize=7)
    else:
        below.set_ylabel(f"{len(names)} parameters, in the optimizer's order")
    below.set_xlabel("optimizer step")
    bar = figure.colorbar(image, ax=below, ticks=[-3, 0, 3])
    bar.ax.set_yticklabels(["1/1000", "the limit", "1000 ×"], fontsize=7)
    below.set_title("gradient's difference ÷ its limit", fontsize=9, loc="left")
    figure.savefig(path, dpi=110)


def _title(proof: Proof) -> str:
    return "\n".join(textwrap.wrap(proof.line, 120))
