"""Draws ring.png, exact.png, compressed.png and decentralized.png.

python lessons/10-strategies/picture.py

The first one is a schematic of `ring` in PTL_Strategies. The others are simulations of one
step on two ranks, at one time scale.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import multigpu
from multigpu import Link, launch, plots
from multigpu.models import CNN
from multigpu.strategies import strategy_by_name
from multigpu.strategies.accelerators import resolve
from multigpu.strategies.bagua import bytegrad, low_precision

ETHERNET = Link("10 Gbit/s", bandwidth=1.25e9, latency=30e-6)
# The picture → the strategies in it → what all transfers and collectives of their step carry,
# as the docstrings of the strategies say: the simulation knows only tensors.
PICTURES = {
    "exact": {"ddp": "gradients", "horovod": "gradients"},
    "compressed": {"ddp": "gradients", "bagua:bytegrad": "gradients as bytes"},
    # On two ranks decentralized:shift_one sends what decentralized sends: it is not drawn.
    "decentralized": {
        "bagua:decentralized": "weights",
        "bagua:low_precision_decentralized": "changes of the weights, as bytes",
    },
}


def quantising(function: Callable) -> Callable:
    """The function, whose operations the timeline draws as quantising."""

    def marked(*args: torch.Tensor) -> torch.Tensor:
        with multigpu.marked("quantise"):
            return function(*args)

    return marked


def one_step(name: str, link: Link = ETHERNET) -> multigpu.Timeline:
    """As one of two ranks: the wide CNN's third step, 1,024 images per rank, shapes only.

    It destroys the process group at the end, so that it can be called again.
    """
    for module in (bytegrad, low_precision):
        module.compress = quantising(module.compress)
        module.decompress = quantising(module.decompress)
    with multigpu.gpus(2, link=link, shapes_only=True):
        strategy = strategy_by_name(name)
        strategy.configure(resolve("gpu"))
        strategy.connect()
        model = strategy.place(CNN((1, 28, 28), hidden=320))
        model, optimizer = strategy.setup(model, torch.optim.SGD(model.parameters(), 0.05))
        images = torch.empty(1024, 1, 28, 28, device=strategy.device)
        labels = torch.empty(1024, dtype=torch.long, device=strategy.device)
        for _ in range(3):
            strategy.barrier()
            began = multigpu.elapsed()
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        timeline = multigpu.timeline(since=began)
        strategy.barrier()
        strategy.close()
        del model, optimizer
        dist.destroy_process_group()
    return timeline


def _step_seconds(names: Sequence[str], gbits: Sequence[float]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        for gbit in gbits:
            link = Link(f"{gbit} Gbit/s", gbit * 1e9 / 8, ETHERNET.latency)
            timeline = one_step(name, link)
            seconds[name].append(timeline.end - timeline.start)
    return seconds


def print_steps(
    names: Sequence[str], gbits: Sequence[float] = (10, 25, 50, 100)
) -> list[list[float]]:
    """Print the simulated ms of the same step on two ranks, by the link between them.

    Returns the milliseconds: a list for each name, with a number for each link.
    """
    by_rank = launch.call(_step_seconds, 2, names, gbits)
    print("Gbit/s:".ljust(34), *(f"{gbit:5}" for gbit in gbits))
    steps = []
    for name in names:
        of_ranks = zip(*(seconds[name] for seconds in by_rank), strict=True)
        steps.append([1e3 * max(step) for step in of_ranks])
        print(f"{name:34}", *(f"{ms:5.2f}" for ms in steps[-1]), "ms")
    return steps


def draw_ring(n: int = 3) -> None:
    """Draw which ranks' numbers are in the sum of each chunk, after each hop of a ring."""
    axes = plots.schematic([f"rank {rank}" for rank in range(n)], "", height=2.9)
    # have[rank][chunk]: the ranks whose numbers are in it.
    have = [[{rank} for _ in range(n)] for rank in range(n)]
    for moment in range(2 * (n - 1) + 1):
        hop = moment - 1  # moment 0 is before the first hop
        came = dict.fromkeys(range(n))
        if hop >= 0:
            sent = [have[rank][(rank - hop) % n] for rank in range(n)]
            for rank in range(n):
                came[rank] = into = (rank - hop - 1) % n
                # A sum has all numbers that came; a chunk with fewer is replaced.
                have[rank][into] = have[rank][into] | sent[rank - 1]
        left = moment * (n + 0.5)
        action = "added" if hop < n - 1 else "distributed"
        heading = "at first" if hop < 0 else f"hop {hop}: {action}"
        axes.text(left + n / 2, -0.65, heading, ha="center", fontsize=8.5, weight="bold")
        for rank in range(n):
            for chunk in range(n):
                ranks = have[rank][chunk]
                part = "idle" if len(ranks) < n else "compute"
                part = "transfer" if came[rank] == chunk else part
                text = "+".join(map(str, sorted(ranks)))
                plots.box(axes, part, left + chunk, rank, 1, text, size=7)
    axes.set(xlim=(-0.2, (2 * n - 1) * (n + 0.5) - 0.3), ylim=(n - 0.6, -0.9))
    title = f"{n} ranks, {n} chunks: after {2 * (n - 1)} hops each rank has each sum"
    axes.set_title(title)
    note = (
        "in each chunk: the ranks whose numbers are in its sum; hatched: received in this hop"
    )
    axes.set_xlabel(note, fontsize=8)
    print(plots.save(axes.figure, Path(__file__).with_name("ring.png")).name)


def main() -> None:
    draw_ring()
    drawn = dict.fromkeys(name for names in PICTURES.values() for name in names)
    steps = {
        name: multigpu.Timeline.of_ranks(launch.call(one_step, 2, name)) for name in drawn
    }
    seconds = {name: timeline.end - timeline.start for name, timeline in steps.items()}
    for picture, names in PICTURES.items():
        figure = plots.figure(8, 4.6)
        for place, (name, carried) in enumerate(names.items()):
            title = f"{name.removeprefix('bagua:')}: {1e3 * seconds[name]:.1f} ms"
            if name != "ddp":
                title += f", {seconds['ddp'] / seconds[name]:.2f} times as fast as ddp"
            steps[name].plot(
                figure.add_subplot(len(names), 1, place + 1),
                title,
                contents=lambda event, carried=carried: carried,
                until=max(seconds.values()),
            )
        plots.share_legend(figure)
        print(plots.save(figure, Path(__file__).with_name(f"{picture}.png")).name)
    for name, duration in seconds.items():
        print(f"{name:34} {1e3 * duration:5.2f} ms (simulated)")


if __name__ == "__main__":
    main()
