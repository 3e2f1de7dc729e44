"""A proof as JSON, as a page, and as a picture: distances over steps, parameters × steps."""

import io
import textwrap
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from multigpu.files import atomic, write_json
from multigpu.prove.compare import StepDistances
from multigpu.prove.proof import Proof

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The parameters whose names a picture has room for.
MOST_NAMES = 40
# What is equal to the last digit has no logarithm: it is drawn here.
SMALLEST = 1e-9
# Of a page's table: differences and limits are shares of the reference's norm.
COLUMNS = ("parameter", "its", "step", "difference", "limit", "difference ÷ limit")
MOST_ROWS = 20
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>multigpu prove</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ font: 15px/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 1000px }}
  body {{ padding: 0 1rem; overflow-wrap: break-word }}
  pre {{ white-space: pre-wrap; }}
  svg {{ background: #fff; width: 100%; height: auto; }}
  td, th {{ padding: 0 .7rem; text-align: right; }}
  td:first-child, th:first-child {{ text-align: left; }}
</style>
<h1>multigpu prove: {verdict}</h1>
<pre>{text}</pre>
<p>Parallel run: <code>{command}</code><br>Reference: <code>{reference}</code></p>
{picture}
{table}
"""


def write(
    proof: Proof, picture: Path | None, json_file: Path | None, page: Path | None = None
) -> list[str]:
    """Write the files that were asked for; return a line for each."""
    lines = []
    if page:
        with atomic(page) as file:
            file.write_text(as_page(proof), encoding="utf-8")
        lines.append(f"page: {page}")
    if json_file:
        lines.append(f"numbers: {write_json(json_file, as_json(proof))}")
    if picture and proof.comparison and proof.comparison.steps:
        draw(proof).savefig(picture, dpi=110)
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
                f"rank {rank}": [_finite(loss) for loss in rank_step.losses]
                for rank, rank_step in zip(step.ranks, step.parallel, strict=True)
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


def as_page(proof: Proof) -> str:
    """The proof as one HTML file that loads nothing: verdict, cause, picture, parameters."""
    picture, rows = "", []
    if proof.comparison and proof.comparison.steps:
        file = io.StringIO()
        draw(proof).savefig(file, format="svg")
        picture = file.getvalue()
        picture = picture[picture.index("<svg") :]
        rows = _worst(proof.comparison.steps)
    lines = [f"<tr>{''.join(f'<th>{name}' for name in COLUMNS)}"]
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in rows]
    return PAGE.format(
        verdict=escape(proof.verdict),
        text=escape(str(proof)),
        command=escape(proof.command),
        reference=escape(proof.reference or "none"),
        picture=picture,
        table="\n".join(["<table>", *lines, "</table>"]) if rows else "",
    )


def _worst(steps: list[StepDistances]) -> list[tuple[str, ...]]:
    """The rows of COLUMNS that come nearest to their limit, or exceed it most."""
    rows = []
    for step in steps:
        for kind, distances in step.kinds.items():
            for place, name in enumerate(step.names):
                off, limit = distances.off[place], max(distances.limit[place], 1e-30)
                times = off / limit if np.isfinite(off) else np.inf
                shares = (
                    _share(values, distances.scale, place)
                    for values in (distances.off, distances.limit)
                )
                figures = (f"{share:.1e}" for share in shares)
                rows.append((times, (name, kind, str(step.number), *figures, f"{times:.2g}")))
    rows.sort(key=lambda row: -row[0])
    return [cells for _, cells in rows[:MOST_ROWS]]


def draw(proof: Proof) -> "Figure":
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
    figure.suptitle(textwrap.fill(proof.line, 120), fontsize=9, x=0.01, ha="left")
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
    return figure
