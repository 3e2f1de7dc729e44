"""Draws two-workers.png, the picture on this page: a schematic, nothing in it is measured.

python lessons/08-tf-multi-node/picture.py
"""

from pathlib import Path

from multigpu import plots
from multigpu.plots import arrow, box

title = "All workers hold the same list and the same weights; one of them writes"
axes = plots.schematic([], title, height=4.6)


def between(left: float, right: float, y: float, text: str) -> None:
    """An arrow with two heads between the workers, with a text above."""
    arrow(axes, (left, y), (right, y), "<->")
    axes.text((left + right) / 2, y - 0.1, text, ha="center", va="bottom", fontsize=7.5)


addresses = '"cluster": {"worker": ["10.0.0.1:41763", "10.0.0.2:38233"]}'
axes.text(5, 0.1, addresses, ha="center", fontsize=9, family="monospace")
caption = (
    "TF_CONFIG: the cluster spec, the same for all, and the task, each worker's own index"
)
axes.text(5, 0.42, caption, ha="center", fontsize=8)
for left, index, name in ((0.2, 0, "worker 0, the chief"), (6.2, 1, "worker 1")):
    heading = f"node {index}: {name}"
    axes.text(left + 1.8, 0.95, heading, ha="center", fontsize=9, weight="bold")
    task = f'TF_CONFIG … "task": {{"type": "worker", "index": {index}}}'
    box(axes, "files", left, 1.3, 3.6, task, size=7.5)
    images = f"images {32 * index + 1} to {32 * index + 32} of each batch of 64"
    box(axes, "data", left, 1.9, 3.6, images)
    for replica in (0, 1):
        at = left + 1.85 * replica
        text = f"replica {2 * index + replica}\n16 images\nforward, backward"
        box(axes, "compute", at, 2.8, 1.75, text, height=1.1)
        box(axes, "update", at, 3.7, 1.75, "update")
between(3.95, 6.05, 3.1, "sum of the gradients:\nNCCL, or gRPC on CPUs")
between(3.95, 6.05, 1.85, "messages: who has joined,\nwho has failed (gloo)")
arrow(axes, (2.0, 4.0), (2.0, 4.5))
files = "prints, and writes last.pt, metrics.json, training.png"
box(axes, "files", 0.2, 4.75, 3.6, files, size=7.5)
box(axes, "idle", 6.2, 4.75, 3.6, "writes nothing: it holds the same weights", size=7.5)
axes.set(xlim=(0, 10), ylim=(5.1, -0.2))
print(plots.save(axes.figure, Path(__file__).with_name("two-workers.png")).name)
