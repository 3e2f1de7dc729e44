"""All routes side by side: `make bench`, or `python benchmarks/routes.py`. Writes lessons/routes.md and lessons/four-ways.png.

A row of the table has three sources:
- loss, accuracy and proof are what the lesson's stored notebook ends with; CI executes the notebooks afresh
- the simulated step: the third step of the route on virtual GPUs, with shapes only, so the same number everywhere
- the measured speed: images/s of the lesson's script beside lesson 01's, on this machine's CPU, in turns

`python benchmarks/routes.py 0` leaves the measured column as it is.
"""

import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu import launch, plots, vgpu
from multigpu.files import atomic
from multigpu.models import CNN

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "lessons" / "routes.md"
sys.path.insert(0, str(ROOT / "scripts"))
BATCH, PIECES, WIDE = 4096, 4, {"image_shape": (1, 28, 28), "hidden": 320}

# ---- simulated --------------------------------------------------------------------------------------------------


def third_step(
    model: nn.Module,
    first: torch.device,
    last: torch.device,
    batch: int = BATCH,
    pieces: int = 1,
):
    """The timeline of a step whose images are on the first device and whose outputs are on the last."""
    from PT_CNN_ModelParallel import step

    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images, labels = (
        torch.empty(batch, 1, 28, 28, device=first),
        torch.empty(batch, dtype=torch.long, device=last),
    )
    for _ in range(3):
        began = vgpu.elapsed()
        step(model, optimizer, images, labels, pieces)
    return vgpu.timeline(since=began)


def one_gpu() -> vgpu.Timeline:
    with vgpu.running(1, compute=False) as (place,):
        return third_step(CNN(**WIDE).to(place), place, place)


def mixed_precision() -> vgpu.Timeline:
    class Mixed(CNN):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            with torch.autocast("vgpu", torch.float16):
                return super().forward(images).float()

    with vgpu.running(1, compute=False) as (place,):
        return third_step(Mixed(**WIDE).to(place), place, place)


def data_parallel() -> vgpu.Timeline:
    with vgpu.running(2, compute=False) as places:
        return third_step(
            nn.DataParallel(CNN(**WIDE).to(places[0]), places), places[0], places[0]
        )


def halves(pieces: int = PIECES) -> vgpu.Timeline:
    from PT_CNN_ModelParallel import Halves

    with vgpu.running(2, compute=False) as (first, second):
        return third_step(Halves(first, second, **WIDE), first, second, pieces=pieces)


def _stage() -> vgpu.Timeline:
    from PT_CNN_Pipeline import schedule, stage

    rank, (place,) = launch.find().rank, vgpu.start(1, compute=False)
    dist.init_process_group("vgpu")
    own = stage(CNN(**WIDE), rank, 2).to(place)
    run, optimizer = (
        schedule("1f1b", own, rank, 2, place, PIECES),
        torch.optim.SGD(own.parameters(), 0.05, momentum=0.9),
    )
    images, labels = (
        torch.empty(BATCH, 1, 28, 28, device=place),
        torch.empty(BATCH, dtype=torch.long, device=place),
    )
    for _ in range(3):
        dist.barrier()  # all ranks begin the step together
        began = vgpu.elapsed()
        optimizer.zero_grad()
        run.step(images) if rank == 0 else run.step(target=labels)
        optimizer.step()
    return vgpu.timeline(since=began)


def _replica() -> vgpu.Timeline:
    (place,) = vgpu.start(1, compute=False)
    dist.init_process_group("vgpu")
    return third_step(DDP(CNN(**WIDE).to(place)), place, place, BATCH // 2)


def _replica_of_stages() -> vgpu.Timeline:
    from PT_CNN_HybridParallel import Halves

    first, second = vgpu.start(2, compute=False)
    dist.init_process_group("vgpu")
    return third_step(DDP(Halves(first, second, PIECES, **WIDE)), first, second, BATCH // 2)


def _trained() -> vgpu.Timeline:
    (place,) = vgpu.start(1, compute=False)

    class Wide(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.ends = CNN(**WIDE), []

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.ends.append(vgpu.elapsed())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    share = BATCH // 2
    batch = (
        torch.empty(share, 1, 28, 28, device=place),
        torch.empty(share, dtype=torch.long, device=place),
    )
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
        False,
    )
    module = Wide()
    L.Trainer(accelerator="vgpu", strategy="ddp", max_steps=3, **quiet).fit(
        module, DataLoader([batch] * 3, batch_size=None)
    )
    timeline = vgpu.timeline(since=module.ends[-2])
    return vgpu.Timeline(
        timeline.events, timeline.lanes, module.ends[-2], module.ends[-1], timeline.label
    )


def two_ranks(function: Callable[[], vgpu.Timeline]) -> Callable[[], vgpu.Timeline]:
    return functools.cache(lambda: vgpu.Timeline.of_ranks(launch.call(function, 2)))


replicas = two_ranks(_replica)


# ---- the routes, by the name that the notebook's last line has: simulated how, measured with which flags --------
# None: TensorFlow knows no virtual GPUs; and their own speed is nothing to measure.

ROUTES: dict[str, tuple[Callable[[], vgpu.Timeline] | None, str, list[str] | None]] = {
    "01 one GPU": (one_gpu, "PT_CNN_SingleGPU", []),
    "02 DataParallel": (data_parallel, "PT_CNN_DataParallel", None),
    "03 model parallelism": (halves, "PT_CNN_ModelParallel", None),
    "03 pipeline, 1F1B": (two_ranks(_stage), "PT_CNN_Pipeline", ["--spawn", "2"]),
    "04 DDP by mp.spawn": (replicas, "PT_CNN_DDPSpawn", ["--nprocs", "2"]),
    "05 DDP": (replicas, "PT_CNN_MultiGPU", ["--spawn", "2"]),
    "06 model and data parallel": (
        two_ranks(_replica_of_stages),
        "PT_CNN_HybridParallel",
        None,
    ),
    "07 MirroredStrategy": (None, "TF_CNN_MultiGPU", ["--devices", "2"]),
    "07 MirroredStrategy, by hand": (None, "TF_CNN_CustomLoop", ["--devices", "2"]),
    "08 TensorFlow, two workers": (None, "TF_CNN_MultiNode", ["--spawn", "2"]),
    "09 Lightning-style Trainer": (two_ranks(_trained), "PTL_multiGPU", ["--devices", "2"]),
    "10 every strategy": (replicas, "PTL_Strategies", None),
    "11 16-mixed": (mixed_precision, "PTL_Precision", None),
}
NO_ROUTES = ("PTL_NodeBatch",)  # it learns something else


def printed(stem: str) -> str:
    """All that the cells of the lesson's stored notebook have printed."""
    notebook = json.loads((ROOT / "notebooks" / f"{stem}.ipynb").read_text())
    return "".join(
        text
        for cell in notebook["cells"]
        for out in cell.get("outputs", ())
        for text in out.get("text", ())
    )


def stored_line(stem: str) -> str:
    """The line of the table with which the lesson's stored notebook ends."""
    return re.findall(r"^\| \d\d .* \|$", printed(stem), re.MULTILINE)[-1]


def simulated() -> dict[str, str]:
    """The simulated column: milliseconds of a step, and how many times as fast as one GPU that is."""
    seconds = {
        name: (timeline := how()).end - timeline.start
        for name, (how, *_) in ROUTES.items()
        if how
    }
    return {
        name: f"{1e3 * s:.2f} ms, {seconds['01 one GPU'] / s:.2f} ×"
        for name, s in seconds.items()
    }


# ---- measured ---------------------------------------------------------------------------------------------------


def images_per_s(stem: str, more: list[str]) -> float:
    """The median over all epochs but the first."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as out:
        flags = [*more, "--epochs", "7", "--batch-size", "64", "--out", out]
        command = [sys.executable, ROOT / "scripts" / f"{stem}.py", *flags]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        rows = json.loads((Path(out) / "metrics.json").read_text())["epochs"]
    return statistics.median(row["images_per_s"] for row in rows[1:])


def measured(repeats: int) -> dict[str, str]:
    """The measured column: images/s ÷ those of lesson 01 in the same turn, as a median and a range."""
    ratios: dict[str, list[float]] = {
        name: [] for name, (*_, more) in ROUTES.items() if more is not None
    }
    for _ in range(repeats):
        speeds = {name: images_per_s(ROUTES[name][1], ROUTES[name][2]) for name in ratios}
        for name, speed in speeds.items():
            ratios[name].append(speed / speeds["01 one GPU"])
    return {
        n: f"{statistics.median(r):.2f} × ({min(r):.2f} to {max(r):.2f})"
        for n, r in ratios.items()
    }


def stored_measured() -> dict[str, str]:
    rows = [
        line.split(" | ")
        for line in PAGE.read_text().splitlines()
        if re.match(r"\| \d\d ", line)
    ]
    return {row[0].removeprefix("| "): row[-1].removesuffix(" |") for row in rows}


# ---- the page and the picture -----------------------------------------------------------------------------------

TEXT = """# All routes side by side

Written by `python benchmarks/routes.py`. The first columns are the lines with which the lessons' notebooks end: the same
model, data, seed and global batch (64) by each route, so they should agree, and they do. `vgpu` is a virtual GPU.

- **Simulated**: one step of the wider CNN of lesson 03, {batch:,} images in all, on V100s with NVLink2, and how many times
  as fast as one GPU that is. Pipelines have {pieces} micro-batches. Lesson 06 has four GPUs, lesson 11 one, with its
  matrix products and convolutions in float16; the others from 02 on two. Lesson
  10's row is its ddp, by the Trainer.
- **Measured**: images/s of the lesson's script ÷ those of lesson 01, on a CPU with {cores} cores, a thread a process, in turns:
  the median of {repeats} and the range. Batches of 64 small images are too little work for two: what ranks say to each
  other costs more than it saves. Virtual GPUs' own speed says nothing, so it is left out. TensorFlow's two parts of the
  CPU are one process, with as many threads as there are cores; it knows no virtual GPUs, so nothing is simulated.

| Route | Devices | Loss | Accuracy | Proof | Simulated step | Measured |
|---|---|---|---|---|---|---|
{rows}
"""


def page(repeats: int) -> str:
    steps = simulated()
    speeds = measured(repeats) if repeats else stored_measured()
    rows = [
        f"{stored_line(stem)} {steps.get(name, '–')} | {speeds.get(name, 'not yet' if more is not None else '–')} |"
        for name, (_, stem, more) in ROUTES.items()
    ]
    cores = len(os.sched_getaffinity(0))
    if not repeats:
        cores, repeats = re.search(
            r"with (\d+) cores,.*?the median of (\d+)", PAGE.read_text(), re.DOTALL
        ).groups()
    return TEXT.format(
        batch=BATCH, pieces=PIECES, cores=cores, repeats=repeats, rows="\n".join(rows)
    )


def picture() -> None:
    """One step of four routes on two GPUs, at one scale: the picture of the front page."""
    ways = {
        "DataParallel: one process deals out images and weights": data_parallel(),
        "Model parallelism, naive: half of the layers each": halves(1),
        "The same in four pieces": halves(4),
        "DDP: a process a GPU, all-reduce of the gradients": replicas(),
    }
    figure = plots.figure(8, 6)
    for row, (title, timeline) in enumerate(ways.items()):
        timeline.plot(figure.add_subplot(len(ways), 1, row + 1), title=title)
    for axes in figure.axes[1:-1]:
        axes.get_legend().remove()
        axes.set_title(axes.get_title(), pad=6)
    for axes in figure.axes[:-1]:
        axes.set_xlabel(" ")
    for axes in figure.axes:
        axes.set_xlim(0, max(other.get_xlim()[1] for other in figure.axes))
    plots.save(figure, ROOT / "lessons" / "four-ways.png")


if __name__ == "__main__":
    with atomic(PAGE) as temporary:
        temporary.write_text(page(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
    picture()
    print(PAGE.read_text())
