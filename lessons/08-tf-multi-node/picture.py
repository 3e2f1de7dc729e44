"""Draw two-workers.png, the picture on this lesson's page.

python lessons/08-tf-multi-node/picture.py
"""

from pathlib import Path

from multigpu import plots

fig = plots.figure(9, 4.6)
axes = fig.add_subplot()


def box(
    left: float,
    top: float,
    width: float,
    height: float,
    text: str,
    colour: str,
    ink: str = "white",
    size: float = 8,
) -> None:
    axes.barh(
        top, width, left=left, height=height, color=colour, edgecolor="white", align="edge"
    )
    axes.text(
        left + width / 2,
        top + height / 2,
        text,
        ha="center",
        va="center",
        fontsize=size,
        color=ink,
    )


def arrow(
    start: tuple[float, float],
    end: tuple[float, float],
    text: str = "",
    style: str = "<->",
    above: float = 0.1,
) -> None:
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": style, "color": "black", "linewidth": 1}
    )
    if text:
        axes.text(
            (start[0] + end[0]) / 2,
            (start[1] + end[1]) / 2 - above,
            text,
            ha="center",
            va="bottom",
            fontsize=7.5,
        )


axes.text(
    5,
    0.1,
    '"cluster": {"worker": ["10.0.0.1:41763", "10.0.0.2:38233"]}',
    ha="center",
    fontsize=9,
    family="monospace",
)
axes.text(
    5,
    0.42,
    "TF_CONFIG: the same list for all, and each worker's own index",
    ha="center",
    fontsize=8,
)
for left, index, name in ((0.2, 0, "worker 0, the chief"), (6.2, 1, "worker 1")):
    axes.text(
        left + 1.8, 0.95, f"node {index}: {name}", ha="center", fontsize=9, weight="bold"
    )
    box(
        left,
        1.05,
        3.6,
        0.5,
        f'TF_CONFIG … "task": {{"type": "worker", "index": {index}}}',
        "#F0E442",
        "black",
        7.5,
    )
    box(
        left,
        1.65,
        3.6,
        0.5,
        f"images {32 * index + 1} to {32 * index + 32} of each batch of 64",
        plots.TRANSFER,
        "black",
    )
    for replica in (0, 1):
        at = left + 1.85 * replica
        box(
            at,
            2.25,
            1.75,
            1.1,
            f"replica {2 * index + replica}\n16 images\nforward, backward",
            plots.COMPUTE,
        )
        box(at, 3.45, 1.75, 0.5, "update", plots.UPDATE, "black")
arrow((3.95, 3.1), (6.05, 3.1), "sum of the gradients:\nNCCL, or gRPC on CPUs")
arrow((3.95, 1.85), (6.05, 1.85), "messages: who has joined,\nwho has failed (gloo)")
arrow((2.0, 4.0), (2.0, 4.5), style="->")
box(
    0.2,
    4.5,
    3.6,
    0.5,
    "prints, and writes last.pt, metrics.json, training.png",
    plots.COLLECTIVE,
    "black",
    7.5,
)
box(6.2, 4.5, 3.6, 0.5, "writes nothing: it holds the same weights", plots.IDLE, "black", 7.5)
axes.set(
    xlim=(0, 10),
    ylim=(5.1, -0.2),
    xticks=[],
    yticks=[],
    title="All workers hold the same list and the same weights; one of them writes",
)
axes.spines[:].set_visible(False)
print(plots.save(fig, Path(__file__).with_name("two-workers.png")).name)
