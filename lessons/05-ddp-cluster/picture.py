"""Draws one-step.png, the picture on this lesson's page: python lessons/05-ddp-cluster/picture.py"""

from pathlib import Path

from multigpu import plots

TH = ("st", "nd", "rd", "th")
fig = plots.figure(9, 4.2)
axes = fig.add_subplot()


def box(
    rank: float, left: float, width: float, text: str, colour: str, ink: str = "white", **look
) -> None:
    axes.barh(
        rank, width, left=left, color=colour, **{"height": 0.5, "edgecolor": "white"} | look
    )
    patch = (
        {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if "hatch" in look else None
    )
    size = 7 if patch else 8
    axes.text(
        left + width / 2,
        rank,
        text,
        ha="center",
        va="center",
        fontsize=size,
        color=ink,
        bbox=patch,
    )


for rank in range(4):
    box(
        rank,
        0,
        0.9,
        f"16 of 64 images:\nthe {rank + 1}{TH[rank]}, {rank + 5}th, …",
        plots.TRANSFER,
        "black",
    )
    box(rank, 1.0, 0.9, "forward", plots.COMPUTE)
    box(rank, 1.9, 1.0, "last layers backward", plots.COMPUTE)
    box(rank, 2.9, 1.1, "first layers backward", plots.COMPUTE)
    box(rank, 4.62, 0.75, "update", plots.UPDATE, "black")
    for left, width, number in ((2.9, 0.85, 1), (4.0, 0.6, 2)):
        box(
            rank + 0.38,
            left,
            width,
            f"bucket {number}",
            plots.COLLECTIVE,
            "black",
            height=0.22,
            hatch="///",
        )
for left, text in (
    (2.9, "the gradients of the last layers are there:\nthe all-reduce of bucket 1 begins"),
    (4.0, "bucket 2"),
):
    axes.plot([left] * 2, [-0.35, 3.55], color="black", linewidth=0.8, linestyle="--")
    axes.text(
        left, -0.42, text, ha="center" if left < 3 else "left", va="bottom", fontsize=7.5
    )
axes.axhline(1.67, color="black", linestyle=":", linewidth=1)
axes.text(5.5, 0.5, "node 0", va="center", fontsize=9)
axes.text(5.5, 2.5, "node 1", va="center", fontsize=9)
axes.set(xlim=(-0.05, 5.95), ylim=(3.7, -0.95), xticks=[], xlabel="time →   (a schematic, nothing here is measured)",
         title="One step of DDP: ranks differ in what they read, and agree before they update")  # fmt: skip
axes.set_yticks(range(4), [f"rank {rank}" for rank in range(4)])
axes.spines[:].set_visible(False)
axes.tick_params(length=0)
print(plots.save(fig, Path(__file__).with_name("one-step.png")).name)
