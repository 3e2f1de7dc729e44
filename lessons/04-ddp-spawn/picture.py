"""Draws spawn.png, the picture on this page: a schematic, nothing in it is measured.

python lessons/04-ddp-spawn/picture.py
"""

from pathlib import Path

from multigpu import plots

figure = plots.figure(9, 3.2)
axes = figure.add_subplot()


def box(
    lane: int, left: float, width: float, text: str, colour: str, ink: str = "black"
) -> None:
    """A coloured box on a lane, with a text in the middle."""
    axes.barh(lane, width, left=left, color=colour, height=0.5, edgecolor="white")
    axes.text(left + width / 2, lane, text, ha="center", va="center", fontsize=8, color=ink)


def arrow(
    start: tuple[float, float],
    end: tuple[float, float],
    style: str = "->",
    colour: str = "black",
    width: float = 1,
) -> None:
    look = {"arrowstyle": style, "color": colour, "linewidth": width}
    axes.annotate("", end, start, arrowprops=look)


def label(x: float, y: float, text: str) -> None:
    axes.text(x, y, text, fontsize=8, ha="left", va="center")


box(0, 0, 1.4, "check flags,\nfetch data", plots.TRANSFER)
box(0, 1.4, 6.2, "waits; holds the store through which the ranks find each other", plots.IDLE)
box(0, 7.6, 1.4, "read the file,\nprove", plots.COMPUTE, ink="white")
for lane in (1, 2):
    work = f"train with its half of each batch, as rank {lane - 1}"
    box(lane, 1.9, 1.3, "import torch,\nread data", plots.TRANSFER)
    box(lane, 3.2, 3.1, work, plots.COMPUTE, ink="white")
box(1, 6.3, 0.9, "save", plots.UPDATE)

arrow((1.5, 0.27), (1.9, 0.75))
arrow((1.5, 0.27), (1.9, 1.75))
label(0.55, 1.25, "args, pickled")
arrow((7.0, 0.73), (7.7, 0.27))
label(7.45, 0.62, "model.pt")
for step in range(4):
    x = 3.9 + 0.7 * step
    arrow((x, 1.27), (x, 1.73), style="<->", colour=plots.COLLECTIVE, width=2)
label(6.15, 1.5, "gradients, averaged in each step")

axes.set(
    xlim=(-0.05, 9.1),
    xticks=[],
    xlabel="time →   (a schematic, nothing here is measured)",
    title="The result of the ranks comes back in a file",
)
axes.set_yticks(range(3), ["parent", "rank 0", "rank 1"])
axes.invert_yaxis()
axes.spines[:].set_visible(False)
axes.tick_params(length=0)
print(plots.save(figure, Path(__file__).with_name("spawn.png")).name)
