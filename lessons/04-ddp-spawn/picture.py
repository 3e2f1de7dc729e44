"""Draws spawn.png, the picture on this lesson's page: python lessons/04-ddp-spawn/picture.py"""

from pathlib import Path

from multigpu import plots

fig = plots.figure(9, 3.2)
axes = fig.add_subplot()


def box(
    lane: int, left: float, width: float, text: str, colour: str, ink: str = "white"
) -> None:
    axes.barh(lane, width, left=left, color=colour, height=0.5, edgecolor="white")
    axes.text(left + width / 2, lane, text, ha="center", va="center", fontsize=8, color=ink)


def arrow(
    start: tuple[float, float], end: tuple[float, float], text: str, place: tuple[float, float]
) -> None:
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": "->", "color": "black", "linewidth": 1}
    )
    axes.text(*place, text, fontsize=8, ha="left", va="center")


box(0, 0, 1.4, "check flags,\nfetch data", plots.TRANSFER, "black")
box(0, 1.4, 6.2, "waits, and holds the store where the ranks meet", plots.IDLE, "black")
box(0, 7.6, 1.4, "read the file,\nprove", plots.COMPUTE)
for lane in (1, 2):
    box(lane, 1.9, 1.3, "import torch,\nread data", plots.TRANSFER, "black")
    box(lane, 3.2, 3.1, f"train its half of each batch as rank {lane - 1}", plots.COMPUTE)
box(1, 6.3, 0.9, "save", plots.UPDATE, "black")
arrow((1.5, 0.27), (1.9, 0.75), "", (0, 0))
arrow((1.5, 0.27), (1.9, 1.75), "args, pickled", (0.55, 1.25))
arrow((7.0, 0.73), (7.7, 0.27), "model.pt", (7.45, 0.62))
for step in range(4):
    x = 3.9 + 0.7 * step
    axes.annotate(
        "",
        (x, 1.73),
        (x, 1.27),
        arrowprops={"arrowstyle": "<->", "color": plots.COLLECTIVE, "linewidth": 2},
    )
axes.text(
    6.15, 1.5, "gradients, averaged in each step", fontsize=8, va="center", color="black"
)
axes.set(xlim=(-0.05, 9.1), xticks=[], xlabel="time →   (a schematic, nothing here is measured)",
         title="What the ranks have learned comes home in a file")  # fmt: skip
axes.set_yticks(range(3), ["parent", "rank 0", "rank 1"])
axes.invert_yaxis()
axes.spines[:].set_visible(False)
axes.tick_params(length=0)
print(plots.save(fig, Path(__file__).with_name("spawn.png")).name)
