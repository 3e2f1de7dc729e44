"""Draws two-workers.png and distribute.png: schematics, nothing in them is measured.

python lessons/08-tf-multi-node/picture.py
"""

from pathlib import Path

import numpy as np

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


# ---- how the script's `distribute` divides an epoch -----------------------------------------

IMAGES, BATCH, WORKERS, REPLICAS = 10, 8, 2, 2  # of an epoch, a batch, all, each worker

steps = -(-IMAGES // BATCH)
place = np.arange(steps * BATCH)
numbers = np.resize(np.arange(IMAGES), len(place))
real = place < IMAGES
title = "Each worker gets its replicas' shards of each global batch; padding has weight 0"
axes = plots.schematic([], title, height=2.9)
for step in range(steps):
    y = 1.1 * step
    in_batch = min(BATCH, IMAGES - step * BATCH)
    axes.text(1.75, y, f"batch {step}\n{in_batch} images", ha="right", va="center", fontsize=9)
    for column in range(BATCH):
        worker, rest = divmod(column, BATCH // WORKERS)
        replica, _ = divmod(rest, BATCH // WORKERS // REPLICAS)
        left = 2 + column + 0.5 * worker + 0.15 * replica
        at = step * BATCH + column
        part = "compute" if real[at] else "idle"
        weight = f"1/{in_batch}" if real[at] else "0"
        box(axes, part, left, y, 1, f"image {numbers[at]}\nweight {weight}", height=0.8)
for worker in range(WORKERS):
    left = 2 + worker * (BATCH // WORKERS + 0.5)
    axes.text(left + 2.07, -1.25, f"worker {worker}", ha="center", weight="bold", fontsize=9)
    for replica in range(REPLICAS):
        middle = left + 1 + 2.15 * replica
        name = f"replica {REPLICAS * worker + replica}"
        axes.text(middle, -0.75, name, ha="center", fontsize=9)
caption = "An epoch of 10 images, numbered in their order, in batches of 8; grey: padding"
axes.text(6.3, 1.85, caption, ha="center", fontsize=8)
axes.set(xlim=(0, 11), ylim=(2, -1.6))
print(plots.save(axes.figure, Path(__file__).with_name("distribute.png")).name)
