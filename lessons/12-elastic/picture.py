"""Draws restart.png and order.png: schematics, nothing in them is measured.

python lessons/12-elastic/picture.py
"""

from collections import Counter
from pathlib import Path

import torch
from torch.distributed.elastic.utils.data import ElasticDistributedSampler

from multigpu import plots
from multigpu.plots import arrow, box

title = "All ranks start again, and go on from the last checkpoint"
axes = plots.schematic(["torchrun", "rank 0", "rank 1", "checkpoints"], title)

box(axes, "idle", 0, 0, 3.2, "watches")
box(axes, "update", 3.2, 0, 0.9, "starts both")
box(axes, "idle", 4.1, 0, 3.9, "watches")
for rank_row in (1, 2):
    for index in range(2):
        steps = f"steps\n{10 * index} … {10 * index + 9}"
        box(axes, "compute", 1.1 * index, rank_row, 1.1, steps)
    box(axes, "data", 4.1, rank_row, 1.1, "load 20")
    box(axes, "compute", 5.2, rank_row, 1.4, "steps 20 … 29")
    box(axes, "compute", 6.6, rank_row, 1.4, "30 … 39")
box(axes, "backward", 2.2, 1, 0.9, "20 … 23,\nlost")
box(axes, "backward", 2.2, 2, 0.75, "20 … 23")
axes.text(3.0, 1.85, "SIGKILL", color=plots.RED, fontsize=8, va="center")
arrow(axes, (4.65, 1.27), (4.65, 1.72))  # rank 0 reads, and sends it to rank 1
for step, x in ((10, 1.1), (20, 2.2), (30, 6.6)):
    arrow(axes, (x, 1.27), (x, 2.72))
    box(axes, "files", x - 0.25, 3, 0.5, str(step))
arrow(axes, (2.5, 2.9), (4.2, 1.3))

axes.set_xlim(-0.05, 8.1)
print(plots.save(axes.figure, Path(__file__).with_name("restart.png")).name)


# ---- who sees which image, if the number of ranks changes in an epoch -----------------------

IMAGES, DONE = 16, 8  # two ranks see the first 8, four ranks the rest
order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(0)).tolist()


def sampled(ranks: int, start: int) -> list[list[int]]:
    """What the sampler gives each of the ranks from image `start` on."""
    samplers = [
        ElasticDistributedSampler(range(IMAGES), ranks, rank, start_index=start)
        for rank in range(ranks)
    ]
    for sampler in samplers:
        sampler.set_epoch(2)  # an order that loses half of the 8, as it does of many images
    return [list(sampler) for sampler in samplers]


ways = {
    "sampler": (
        [images[: DONE // 2] for images in sampled(2, 0)],
        sampled(4, DONE),
    ),
    "script": (
        [order[:DONE][rank::2] for rank in range(2)],
        [order[DONE:][rank::4] for rank in range(4)],
    ),
}
axes = plots.schematic([], "", height=3.4)
results = {}
for place, (name, parts) in enumerate(ways.items()):
    seen = Counter(image for part in parts for images in part for image in images)
    results[name] = sum(seen[image] == 0 for image in range(IMAGES))
    for row, part in enumerate(parts):
        y = 3.4 * place + row
        text = f"{name}: {len(part)} ranks" if row == 0 else f"then {len(part)} ranks"
        axes.text(-0.2, y, text, ha="right", va="center", fontsize=9)
        for rank, images in enumerate(part):
            colour = "white" if rank in plots.WHITE_TEXT_RANKS else "black"
            for image in images:
                axes.barh(y, 1, 0.8, image, color=plots.RANKS[rank], edgecolor=plots.EDGE)
                middle = {"ha": "center", "va": "center", "color": colour}
                axes.text(image + 0.5, y, str(rank), weight="bold", **middle)
    for image in range(IMAGES):
        word = {0: "lost", 1: "", 2: "twice"}[seen[image]]
        look = {"ha": "center", "va": "center", "fontsize": 7.5, "color": plots.RED}
        axes.text(image + 0.5, 3.4 * place + 1.75, word, weight="bold", **look)
lost, none = results.values()
title = f"The sampler loses {lost} of {IMAGES} images, the script's order loses {none}"
axes.set(xlim=(-2.8, IMAGES + 0.1), ylim=(5.6, -0.6), title=title)
axes.set_xticks([image + 0.5 for image in range(IMAGES)], range(IMAGES), fontsize=8)
axes.set_xlabel("image; in each box: the rank that sees it", fontsize=8)
print(plots.save(axes.figure, Path(__file__).with_name("order.png")).name)
