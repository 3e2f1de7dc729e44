"""Draws one-step.png, the picture on this lesson's page: python lessons/05-ddp-cluster/picture.py"""

from pathlib import Path

from multigpu import plots
from multigpu.files import atomic

fig = plots.figure(9, 3.8)
axes = fig.add_subplot()
for rank in range(4):
    axes.barh(rank, 0.85, left=0, color=plots.RANKS[rank], height=0.5)
    dark = rank in (1, 3)
    axes.text(0.425, rank, f"16 of 64\nimages: {rank}, {rank + 4}, …", ha="center", va="center", fontsize=7.5,
              color="black" if dark else "white")  # fmt: skip
    for left, width, what in ((1.0, 1.0, "forward"), (2.0, 2.0, "backward")):
        axes.barh(rank, width, left=left, color=plots.COMPUTE, height=0.5, edgecolor="white")
        axes.text(left + 0.08, rank, what, va="center", color="white", fontsize=8)
    axes.barh(rank, 0.8, left=4.55, color=plots.UPDATE, height=0.5)
    axes.text(4.95, rank, "update", ha="center", va="center", color="black", fontsize=8)
for bucket, (left, width) in enumerate(((2.9, 0.7), (4.0, 0.5)), start=1):
    axes.plot(
        [left] * 2, [-0.3, 3.5], color="black", linewidth=0.8, linestyle="--"
    )  # it starts when the last one is there
    for rank in range(4):
        axes.barh(rank + 0.38, width, left=left, height=0.2, color=plots.COLLECTIVE, hatch="///", edgecolor="white")
        axes.text(left + width / 2, rank + 0.38, f"all-reduce {bucket}", ha="center", va="center", fontsize=6,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip
axes.axhline(1.64, color="black", linestyle=":", linewidth=1)
axes.text(5.45, 0.5, "node 0", va="center", fontsize=9)
axes.text(5.45, 2.5, "node 1", va="center", fontsize=9)
axes.set(xlim=(-0.05, 5.85), xticks=[], xlabel="time →   (a schematic, nothing here is measured)",
         title="One step of DDP: ranks differ in what they read, and agree before they update")  # fmt: skip
axes.set_yticks(range(4), [f"rank {rank}" for rank in range(4)])
axes.invert_yaxis()
axes.spines[:].set_visible(False)
axes.tick_params(length=0)
path = Path(__file__).with_name("one-step.png")
with atomic(path) as temporary:
    fig.savefig(temporary)
print(path.name)
