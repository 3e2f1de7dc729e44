"""The pictures of lesson 10: bytes, consensus distance, and time on a slow link."""

import statistics
from typing import TYPE_CHECKING

from multigpu import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bytes_picture(rows: dict[str, dict]) -> "Figure":
    """A bar for each strategy: the bytes that a rank sends.

    On CUDA they are predicted, because the kernel does not count NCCL's bytes.
    """
    predicted = any(row["device"] == "cuda" for row in rows.values())
    key = "bytes_predicted" if predicted else "bytes_counted"
    sent = {name: row[key] / 1000 for name, row in rows.items()}
    senders = {name: amount for name, amount in sent.items() if amount}
    title = "Nothing is sent"
    if senders:
        most = "ddp" if "ddp" in sent else max(sent, key=sent.get)
        least = min(senders, key=sent.get)
        ratio = max(senders.values()) / sent[least]
        title = f"{least} sends {sent[most] / sent[least]:.1f} times fewer bytes than {most}"
        if ratio < 1.1:
            what = f"{len(senders)} of {len(sent)} send bytes through the network"
            title = f"{what}, and differ by {ratio - 1:.0%} at most"
    bars = {
        name + ("" if amount else ": 0"): {"sent": amount} for name, amount in sent.items()
    }
    source = "predicted" if predicted else "counted by the kernel"
    rounds = " (async: per round)" if "bagua:async" in rows else ""
    unit = f"kB per step and rank{rounds}, {source}"
    return plots.stacked_bars(bars, unit, title)


def consensus_picture(rows: dict[str, dict]) -> "Figure":
    """The consensus distance by step, of each strategy whose distance exceeds 1e-6.

    The thick line is the norm of the weights of the first of them, to compare with.
    """
    apart = {name: row for name, row in rows.items() if max(row["consensus_distance"]) > 1e-6}
    fig = plots.figure(8, 3.2)
    axes = fig.add_subplot()
    for number, (name, row) in enumerate(apart.items()):
        axes.plot(
            row["consensus_steps"],
            row["consensus_distance"],
            markersize=3,
            linewidth=1,
            label=name,
            **plots.curve_look(number),
        )
    axes.set(xlabel="step", ylabel="consensus distance")
    title = f"The ranks' weights differ in {len(apart)} of {len(rows)} strategies"
    if apart:
        first = next(iter(apart.values()))
        axes.plot(
            first["consensus_steps"],
            first["weights_norm"],
            color=plots.INK,
            linewidth=2,
            label="norm of the weights",
        )
        axes.set_yscale("log")
        # Just after an averaging round the distance is almost 0: begin the axis above that.
        medians = [statistics.median(row["consensus_distance"]) for row in apart.values()]
        axes.set_ylim(bottom=min(medians) / 5)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        largest = max(
            distance / norm
            for row in apart.values()
            for distance, norm in zip(
                row["consensus_distance"], row["weights_norm"], strict=True
            )
        )
        title += f", by at most {largest:.1%} of their norm"
    fig.suptitle(title)
    return fig


def link_picture(rows: dict[str, dict], megabits: float) -> "Figure":
    """Milliseconds per step over a slow link: predicted as bars, measured as points."""
    bars = {
        name: {"predicted": 1e3 * row["link_seconds_predicted"]} for name, row in rows.items()
    }
    unit = f"ms per step at {megabits:g} Mbit/s; bars: predicted, bytes ÷ rate"
    fig = plots.stacked_bars(bars, unit, "")
    axes = fig.axes[0]
    times = measured_milliseconds(rows)
    title = "Predicted: on a slow link the bytes are the time"
    if times:
        positions = [list(rows).index(name) for name in times]
        label = "measured, computing included"
        look = {"markerfacecolor": "white", "markeredgecolor": plots.EDGE}
        axes.plot(times.values(), positions, "D", linestyle="none", label=label, **look)
        fig.legend(loc="outside lower right")
        longest = max(*times.values(), *(bar["predicted"] for bar in bars.values()))
        axes.set_xlim(0, 1.08 * longest)
        slow = "ddp" if "ddp" in times else max(times, key=times.get)
        fast = min(times, key=times.get)
        title = f"Measured: {fast} is {times[slow] / times[fast]:.1f} times as fast as {slow}"
    axes.set_title(title)
    return fig


def measured_milliseconds(rows: dict[str, dict]) -> dict[str, float]:
    return {
        name: 1e3 * row["link_seconds_measured"]
        for name, row in rows.items()
        if "link_seconds_measured" in row
    }
