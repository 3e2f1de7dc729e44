"""Draws what-moves-when.png, the picture on this lesson's page: python lessons/10-strategies/picture.py"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from multigpu import launch, plots, vgpu
from multigpu.models import CNN
from multigpu.strategies.accelerators import resolve
from multigpu.strategies.costs import by_name
from multigpu.vgpu.sim.presets import Link

ETHERNET = Link("10 Gbit/s", bandwidth=1.25e9, latency=30e-6)
NAMES = {
    "ddp": "ddp, ddp_spawn, gradient_allreduce: gradients, during backward",
    "horovod": "horovod: each gradient as soon as it is there",
    "bagua:bytegrad": "bytegrad, qadam after its warm-up: bytes, and the computing of them",
    "bagua:decentralized": "decentralized: weights, from the first forward on",
    "bagua:decentralized:shift_one": "decentralized, shift_one: weights, with one peer",
    "bagua:low_precision_decentralized": "low_precision_decentralized: bytes, after the step",
}


def one_step(name: str) -> vgpu.Timeline:
    """The third step of the wide CNN, 1,024 images a rank; shapes only."""
    (place,) = vgpu.start(1, link=ETHERNET, compute=False)
    strategy = by_name(name)
    strategy.configure(resolve("vgpu"))
    strategy.connect()
    model = strategy.place(CNN((1, 28, 28), hidden=320))
    model, optimizer = strategy.setup(model, torch.optim.SGD(model.parameters(), 0.05))
    images, labels = (
        torch.empty(1024, 1, 28, 28, device=place),
        torch.empty(1024, dtype=torch.long, device=place),
    )
    for _ in range(3):
        dist.barrier()
        began = vgpu.elapsed()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return vgpu.timeline(since=began)


def main() -> None:
    steps = {name: launch.call(one_step, 2, name)[0] for name in NAMES}  # of rank 0
    figure = plots.figure(8, 8.5)
    for place, (name, timeline) in enumerate(steps.items()):
        axes = figure.add_subplot(len(NAMES), 1, place + 1)
        timeline.lanes[:] = ["rank 0"]
        timeline.plot(axes)
        axes.set_title(
            f"{NAMES[name]}: {1e3 * (timeline.end - timeline.start):.1f} ms",
            fontsize=10,
            loc="left",
        )
    known = {}  # forward … collective of the first, transfer of those that swap
    for axes in figure.axes:
        legend = axes.get_legend()
        known |= dict(
            zip(
                (text.get_text() for text in legend.get_texts()),
                legend.legend_handles,
                strict=True,
            )
        )
        legend.remove()
    known["idle"] = known.pop("idle")
    figure.legend(
        known.values(),
        known,
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=8,
        handlelength=1,
    )
    for axes in figure.axes[:-1]:
        axes.set_xlabel("")
        axes.texts[-1].remove()
    for axes in figure.axes:
        axes.set_xlim(0, 1.02 * max(1e3 * (t.end - t.start) for t in steps.values()))
    figure.axes[-1].texts[-1].set_text(
        "simulated: 2 ranks, V100, 10 Gbit/s, 30 µs, 1,024 images a rank"
    )
    ms = {name: 1e3 * (t.end - t.start) for name, t in steps.items()}
    figure.suptitle(
        f"Over 10 Gbit/s: bytegrad's step takes {ms['bagua:bytegrad']:.1f} ms, ddp's {ms['ddp']:.1f}"
    )
    print(plots.save(figure, Path(__file__).with_name("what-moves-when.png")).name)
    for name, timeline in steps.items():
        print(f"{name:34} {1e3 * (timeline.end - timeline.start):5.2f} ms (simulated)")


if __name__ == "__main__":
    main()
