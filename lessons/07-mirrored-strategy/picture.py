"""Draw mirrored.png, the picture on this lesson's page.

python lessons/07-mirrored-strategy/picture.py
"""

from pathlib import Path

from multigpu import plots

fig = plots.figure(9, 3.4)
axes = fig.add_subplot()


def box(
    lane: int, left: float, width: float, text: str, colour: str, ink: str = "white"
) -> None:
    axes.barh(lane, width, left=left, color=colour, height=0.5, edgecolor="white")
    axes.text(left + width / 2, lane, text, ha="center", va="center", fontsize=8, color=ink)


def arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": "->", "color": "black", "linewidth": 1}
    )


box(0, 0, 1.4, "read batch 1:\n64 images", plots.TRANSFER, "black")
for step in (1, 2):
    left = 1.6 + 3.8 * (step - 1)
    text = "read batch 2,\nahead of its step" if step == 1 else "read batch 3"
    box(0, left, 1.4, text, plots.TRANSFER, "black")
    for lane in (1, 2):
        box(lane, left, 1.9, f"forward, backward:\n32 images, step {step}", plots.COMPUTE)
        box(lane, left + 2.5, 1.1, "update its\ncopy", plots.UPDATE, "black")
        arrow((left - 0.2, 0.27), (left, lane - 0.27))
    x = left + 2.2
    axes.annotate(
        "",
        (x, 2.2),
        (x, 0.8),
        arrowprops={"arrowstyle": "<->", "color": plots.COLLECTIVE, "linewidth": 3},
    )
    axes.text(x, 2.48, "sum of the\ngradients", fontsize=8, ha="center", va="center")
title = "One process: each replica has a copy of every variable, and the copies stay equal"
axes.set(xlim=(-0.05, 9.1), ylim=(2.7, -0.4), xticks=[], title=title)
axes.set_xlabel("time →   (a schematic, nothing here is measured)")
axes.set_yticks(range(3), ["tf.data, on the CPU", "replica 0", "replica 1"])
axes.spines[:].set_visible(False)
axes.tick_params(length=0)
print(plots.save(fig, Path(__file__).with_name("mirrored.png")).name)
