"""Draw what-moves-when.png, the picture on this lesson's page.

python lessons/10-strategies/picture.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from multigpu import launch, plots, vgpu
from multigpu.models import CNN
from multigpu.strategies.accelerators import resolve
from multigpu.strategies.costs import strategy_for_short_run
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
    """The timeline of the wide CNN's third step: 1,024 images per rank, shapes only."""
    (device,) = vgpu.start(1, link=ETHERNET, compute=False)
    strategy = strategy_for_short_run(name)
    strategy.configure(resolve("vgpu"))
    strategy.connect()
    model = strategy.place(CNN((1, 28, 28), hidden=320))
    model, optimizer = strategy.setup(model, torch.optim.SGD(model.parameters(), 0.05))
    images = torch.empty(1024, 1, 28, 28, device=device)
    labels = torch.empty(1024, dtype=torch.long, device=device)
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
    known = {}  # the entries of all legends, each once
    for axes in figure.axes:
        legend = axes.get_legend()
        texts = [text.get_text() for text in legend.get_texts()]
        known |= dict(zip(texts, legend.legend_handles, strict=True))
        legend.remove()
    known["idle"] = known.pop("idle")  # last in the legend
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
    ms = {name: 1e3 * (timeline.end - timeline.start) for name, timeline in steps.items()}
    for axes in figure.axes:
        axes.set_xlim(0, 1.02 * max(ms.values()))
    figure.axes[-1].texts[-1].set_text(
        "simulated: 2 ranks, V100, 10 Gbit/s, 30 µs, 1,024 images a rank"
    )
    bytegrad = f"bytegrad's step takes {ms['bagua:bytegrad']:.1f} ms"
    figure.suptitle(f"Over 10 Gbit/s: {bytegrad}, ddp's {ms['ddp']:.1f}")
    print(plots.save(figure, Path(__file__).with_name("what-moves-when.png")).name)
    for name, milliseconds in ms.items():
        print(f"{name:34} {milliseconds:5.2f} ms (simulated)")


if __name__ == "__main__":
    main()
