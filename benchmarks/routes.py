"""All routes in one table: `make bench`, or `python benchmarks/routes.py`.

It writes lessons/routes.md and lessons/four-ways.png. A row of the table has three sources:
- loss, accuracy and proof: a run of the lesson's script, and the proof in its stored notebook;
  for notebooks with cells in their script the notebook's last line, which CI runs again
- the simulated step: the third step of the route on virtual GPUs, shape-only, so the number is
  the same on every machine
- the measured speed: images/s of the lesson's script ÷ lesson 01's, on this machine's CPU

`python benchmarks/routes.py 0` leaves what is measured, and what scripts printed, as it is.
"""

import functools
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu import Timeline, launch, plots
from multigpu.files import atomic
from multigpu.models import CNN
from multigpu.virtual import control

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "lessons" / "routes.md"
sys.path.insert(0, str(ROOT / "scripts"))
BATCH = 4096
MICRO_BATCHES = 4
TRAINING_IMAGES = 1437
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
TORCHRUN += ["--nproc-per-node=2"]
LAUNCHERS = {
    "PT_CNN_Pipeline": TORCHRUN,
    "PT_CNN_MultiGPU": TORCHRUN,
    "PT_CNN_Scaling": TORCHRUN,
    "TF_CNN_MultiNode": TORCHRUN,
}
VIRTUAL = ["-m", "multigpu.cli", "virtual", "--gpus"]
# The scripts without notebook cells: their devices, and how they are started.
TRAINED = {
    "PT_CNN_SingleGPU": ("1 × cpu", []),
    "PT_CNN_DataParallel": ("2 × virtual GPU", [*VIRTUAL, "2"]),
    "PT_CNN_ModelParallel": ("2 × virtual GPU", [*VIRTUAL, "2"]),
    "PT_CNN_Pipeline": ("2 × cpu", TORCHRUN),
    "PT_CNN_DDPSpawn": ("2 × cpu", []),
    "PT_CNN_MultiGPU": ("2 × cpu", TORCHRUN),
    "PT_CNN_HybridParallel": ("4 × virtual GPU", [*VIRTUAL, "4", *TORCHRUN]),
    "TF_CNN_MultiGPU": ("2 × cpu", []),
    "TF_CNN_CustomLoop": ("2 × cpu", []),
    "TF_CNN_MultiNode": ("2 × cpu", TORCHRUN),
    "PTL_multiGPU": ("2 × cpu", TORCHRUN),
    "PTL_Strategies": ("2 × cpu", TORCHRUN),
    "PTL_Precision": ("1 × virtual GPU", [*VIRTUAL, "1"]),
    "PT_CNN_Elastic": ("2 × cpu", TORCHRUN),
    "PT_CNN_Scaling": ("2 × cpu", TORCHRUN),
}
# More flags of the scripts that are trained.
TRAINED_BY = {"PTL_Precision": ["--precision", "16"]}
WIDE = {"image_shape": (1, 28, 28), "hidden": 320}

# ---- simulated ------------------------------------------------------------------------------


def third_step(
    model: nn.Module,
    first: torch.device,
    last: torch.device,
    batch: int = BATCH,
    micro_batches: int = 1,
) -> Timeline:
    """The timeline of a step with the images on the first device, the outputs on the last."""
    from PT_CNN_ModelParallel import step

    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images = torch.empty(batch, 1, 28, 28, device=first)
    labels = torch.empty(batch, dtype=torch.long, device=last)
    for _ in range(3):
        began = control.elapsed()
        step(model, optimizer, images, labels, micro_batches)
    return control.timeline(since=began)


def one_gpu() -> Timeline:
    with control.running(1, compute=False) as (place,):
        return third_step(CNN(**WIDE).to(place), place, place)


def mixed_precision() -> Timeline:
    class Mixed(CNN):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            with torch.autocast("vgpu", torch.float16):
                return super().forward(images).float()

    with control.running(1, compute=False) as (place,):
        return third_step(Mixed(**WIDE).to(place), place, place)


def data_parallel() -> Timeline:
    with control.running(2, compute=False) as places:
        model = nn.DataParallel(CNN(**WIDE).to(places[0]), places)
        return third_step(model, places[0], places[0])


def halves(micro_batches: int = MICRO_BATCHES) -> Timeline:
    from PT_CNN_ModelParallel import Halves

    with control.running(2, compute=False) as (first, second):
        model = Halves(CNN(**WIDE), first, second)
        control.number_micro_batches(model, model, micro_batches)
        return third_step(model, first, second, micro_batches=micro_batches)


def _stage() -> Timeline:
    from PT_CNN_Pipeline import schedule, stage

    rank = launch.find_world().rank
    (place,) = control.start(1, compute=False)
    dist.init_process_group("vgpu")
    own_stage = stage(CNN(**WIDE), rank, 2).to(place)
    run = schedule("1f1b", own_stage, place, MICRO_BATCHES)
    optimizer = torch.optim.SGD(own_stage.parameters(), 0.05, momentum=0.9)
    images = torch.empty(BATCH, 1, 28, 28, device=place)
    labels = torch.empty(BATCH, dtype=torch.long, device=place)
    for _ in range(3):
        # All ranks begin the step together.
        dist.barrier()
        began = control.elapsed()
        optimizer.zero_grad()
        if rank == 0:
            run.step(images)
        else:
            run.step(target=labels)
        optimizer.step()
    return control.timeline(since=began)


def _replica() -> Timeline:
    (place,) = control.start(1, compute=False)
    dist.init_process_group("vgpu")
    return third_step(DDP(CNN(**WIDE).to(place)), place, place, BATCH // 2)


def _replica_of_stages() -> Timeline:
    from PT_CNN_HybridParallel import Halves

    first, second = control.start(2, compute=False)
    dist.init_process_group("vgpu")
    model = DDP(Halves(CNN(**WIDE), (first, second), MICRO_BATCHES))
    return third_step(model, first, second, BATCH // 2)


def _trained() -> Timeline:
    (place,) = control.start(1, compute=False)

    class Wide(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = CNN(**WIDE)
            self.ends = []

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.ends.append(control.elapsed())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    images = torch.empty(BATCH // 2, 1, 28, 28, device=place)
    labels = torch.empty(BATCH // 2, dtype=torch.long, device=place)
    trainer = L.Trainer(
        accelerator="vgpu",
        strategy="ddp",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Wide()
    trainer.fit(module, DataLoader([(images, labels)] * 3, batch_size=None))
    _, began, ended = module.ends
    timeline = control.timeline(since=began)
    return Timeline(timeline.events, timeline.lanes, began, ended, timeline.label)


def two_ranks(function: Callable[[], Timeline]) -> Callable[[], Timeline]:
    return functools.cache(lambda: Timeline.of_ranks(launch.call(function, 2)))


replicas = two_ranks(_replica)


# ---- the routes --------------------------------------------------------------------------
# The route's name in the notebook's last line → its simulation, its script's stem, and the
# flags with which it is measured. The simulation is None for TensorFlow, which has no virtual
# GPUs. The flags are None for routes on virtual GPUs, whose speed is not measured, and for
# lesson 12's, whose steps are lesson 05's.

ROUTES: dict[str, tuple[Callable[[], Timeline] | None, str, list[str] | None]] = {
    "01 one GPU": (one_gpu, "PT_CNN_SingleGPU", []),
    "02 DataParallel": (data_parallel, "PT_CNN_DataParallel", None),
    "03 model parallelism": (halves, "PT_CNN_ModelParallel", None),
    "03 pipeline, 1F1B": (two_ranks(_stage), "PT_CNN_Pipeline", []),
    "04 DDP by mp.spawn": (replicas, "PT_CNN_DDPSpawn", ["--nprocs", "2"]),
    "05 DDP": (replicas, "PT_CNN_MultiGPU", []),
    "06 model and data parallel": (
        two_ranks(_replica_of_stages),
        "PT_CNN_HybridParallel",
        None,
    ),
    "07 MirroredStrategy": (None, "TF_CNN_MultiGPU", ["--devices", "2"]),
    "07 MirroredStrategy, by hand": (None, "TF_CNN_CustomLoop", ["--devices", "2"]),
    "08 TensorFlow, two workers": (None, "TF_CNN_MultiNode", []),
    "09 Lightning-style Trainer": (two_ranks(_trained), "PTL_multiGPU", ["--devices", "2"]),
    "10 every strategy": (replicas, "PTL_Strategies", None),
    "11 16-mixed": (mixed_precision, "PTL_Precision", None),
    "12 elastic": (None, "PT_CNN_Elastic", None),
    "13 scaling": (replicas, "PT_CNN_Scaling", []),
}
# The first two train with strategies that are not exact, the others train other models.
NO_ROUTES = (
    "PTL_Compressed",
    "PTL_Decentralized",
    "PTL_NodeBatch",
    "PT_GPT_Memory",
    "PT_GPT_FSDP",
    "PT_GPT_TensorParallel",
    "PT_GPT_Mesh",
    "PT_Clinic",
    "PT_GPT_ContextExperts",
)


TENSOR_PARALLEL = "lessons/16-tensor-parallel/tensor_parallel.py"
# The routes of the GPT: the ranks, and the program with its flags.
GPT_ROUTES = {
    "GPT, one GPU": (1, "scripts/PT_GPT_Memory.py"),
    "GPT, checkpointing by hand": (1, "scripts/PT_GPT_Memory.py --checkpointing hand"),
    "GPT, ZeRO-1 by hand": (2, "lessons/15-fsdp/zero.py --stage 1"),
    "GPT, ZeRO-2 by hand": (2, "lessons/15-fsdp/zero.py --stage 2"),
    "GPT, ZeRO-3 by hand": (2, "lessons/15-fsdp/zero.py --stage 3"),
    "GPT, fully_shard": (2, "scripts/PT_GPT_FSDP.py"),
    "GPT, HSDP": (4, "scripts/PT_GPT_FSDP.py --group 2"),
    "GPT, tensor parallel by hand": (2, f"{TENSOR_PARALLEL} --way tensor"),
    "GPT, sequence parallel by hand": (2, f"{TENSOR_PARALLEL} --way sequence"),
    "GPT, parallelize_module": (2, "scripts/PT_GPT_TensorParallel.py"),
    "GPT, stages × FSDP × tensor": (8, "scripts/PT_GPT_Mesh.py --mesh 2 1 2 2"),
    "GPT, ring attention": (2, "scripts/PT_GPT_ContextExperts.py"),
}


def printed(stem: str) -> str:
    """Everything that the cells of the lesson's stored notebook printed."""
    notebook = json.loads((ROOT / "notebooks" / f"{stem}.ipynb").read_text())
    return "".join(
        text
        for cell in notebook["cells"]
        for out in cell.get("outputs", ())
        for text in out.get("text", ())
    )


def trained_line(name: str, stem: str) -> str:
    """The row of a script without cells: what a run gives, and its notebook's proof."""
    devices, launcher = TRAINED[stem]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if devices.endswith("cpu") else {}
    with tempfile.TemporaryDirectory() as out:
        script = ROOT / "scripts" / f"{stem}.py"
        subprocess.run(
            [sys.executable, *launcher, script, "--out", out, *TRAINED_BY.get(stem, [])],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | hidden,
        )
        found = json.loads((Path(out) / "metrics.json").read_text())
    verdicts = re.findall(r"^proof: .*: (\w+)\s*$", printed(stem), re.MULTILINE)
    proof = "the reference" if stem == "PT_CNN_SingleGPU" else f"proof {verdicts[-1]}"
    return (
        f"| {name} | {devices} | loss {found['loss']:.2f} | accuracy {found['accuracy']:.2f} "
        f"| {proof} |"
    )


def simulated() -> dict[str, str]:
    """The simulated column: milliseconds per step, and the speed-up over one GPU."""
    times = {}
    for name, (simulate, *_) in ROUTES.items():
        if simulate:
            timeline = simulate()
            times[name] = timeline.end - timeline.start
    one = times["01 one GPU"]
    return {name: f"{1e3 * time:.2f} ms, {one / time:.2f} ×" for name, time in times.items()}


# ---- measured -------------------------------------------------------------------------------


def images_per_s(stem: str, flags: list[str]) -> float:
    """The script's images/s: the median over all epochs except the first.

    A script that writes no images/s prints a line at the end of each epoch, which is timed.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
    }
    with tempfile.TemporaryDirectory() as out:
        script = ROOT / "scripts" / f"{stem}.py"
        same = ["--epochs", "7", "--batch-size", "64", "--out", out]
        command = [sys.executable, *LAUNCHERS.get(stem, ()), script, *flags, *same]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as run:
            ends = [
                time.perf_counter() for line in run.stdout if re.match(r"epoch \d+:", line)
            ]
        if run.returncode:
            raise subprocess.CalledProcessError(run.returncode, command)
        rows = json.loads((Path(out) / "metrics.json").read_text()).get("epochs", [])
    if ends:
        return TRAINING_IMAGES / statistics.median(
            end - began for began, end in itertools.pairwise(ends)
        )
    return statistics.median(row["images_per_s"] for row in rows[1:])


def measured(repeats: int) -> dict[str, str]:
    """The measured column: images/s ÷ lesson 01's in the same turn, median and range."""
    ratios: dict[str, list[float]] = {
        name: [] for name, (*_, flags) in ROUTES.items() if flags is not None
    }
    for _ in range(repeats):
        speeds = {name: images_per_s(ROUTES[name][1], ROUTES[name][2]) for name in ratios}
        for name, speed in speeds.items():
            ratios[name].append(speed / speeds["01 one GPU"])
    return {
        name: f"{statistics.median(values):.2f} × ({min(values):.2f} to {max(values):.2f})"
        for name, values in ratios.items()
    }


def stored_rows() -> dict[str, list[str]]:
    """The cells of each row of the page as it is, by the route's name."""
    rows = [
        line.removeprefix("| ").removesuffix(" |").split(" | ")
        for line in PAGE.read_text().splitlines()
        if re.match(r"\| \d\d ", line)
    ]
    return {row[0]: row for row in rows}


# ---- the page and the picture ---------------------------------------------------------------

TEXT = """# All routes side by side

Written by `python benchmarks/routes.py`. The first columns are what the lessons' scripts and
notebooks print: the same model, data, seed and global batch (64) by each route, with the same
result. Lesson 11's proof compares test losses and accuracies, because weights differ.

- **Simulated**: one step of the wider CNN of lesson 03 with {batch:,} images, on V100s with
  NVLink2, and the speed-up over one GPU. Lesson 11 has one GPU, with matrix products and
  convolutions in float16; lesson 06 has four; the others from 02 on have two. Pipelines
  have {micro_batches} micro-batches. Lesson 10's row is its ddp, by the Trainer.
- **Measured**: images/s of the lesson's script ÷ lesson 01's, alternating, on a CPU with
  {cores} cores, with one thread per process: the median of {repeats} and the range. Two
  ranks are slower here: a batch of 64 small images is little work, and communication costs
  more than it saves. Routes on virtual GPUs are not measured. TensorFlow's two devices are
  parts of one process, with as many threads as cores; TensorFlow has no virtual GPUs, so it
  is not simulated.
- Lesson 12's run here is one that nothing stops: its steps are lesson 05's.

| Route | Devices | Loss | Accuracy | Proof | Simulated step | Measured |
|---|---|---|---|---|---|---|
{rows}

## The GPT of lessons 14 to 19
Its mean loss over the training digits in the sixth epoch, global batch 32, on CPU processes.

| Route | Ranks | Loss | Command |
|---|---|---|---|
{gpt}
"""


def gpt_rows() -> list[str]:
    """The rows of the second table: each route trains once."""
    rows = []
    for name, (ranks, words) in GPT_ROUTES.items():
        launcher = [*TORCHRUN[:-1], f"--nproc-per-node={ranks}"] if ranks > 1 else []
        with tempfile.TemporaryDirectory() as out:
            script, *flags = words.split()
            subprocess.run(
                [sys.executable, *launcher, ROOT / script, *flags, "--out", out],
                check=True,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
            loss = json.loads((Path(out) / "metrics.json").read_text())["loss"]
        program = "python" if ranks == 1 else f"torchrun --nproc-per-node={ranks}"
        rows.append(f"| {name} | {ranks} | {loss:.4f} | `{program} {words}` |")
    return rows


def stored_gpt_rows() -> list[str]:
    """The rows of the second table as it is."""
    return re.findall(r"^\| GPT, .*$", PAGE.read_text(), re.MULTILINE)


def page(repeats: int) -> str:
    steps = simulated()
    gpt = gpt_rows() if repeats else stored_gpt_rows()
    stored = {} if repeats else stored_rows()
    speeds = measured(repeats) if repeats else {name: row[-1] for name, row in stored.items()}
    rows = []
    for name, (_, stem, flags) in ROUTES.items():
        if name in stored:
            line = f"| {' | '.join(stored[name][:5])} |"
        else:
            line = trained_line(name, stem)
        speed = speeds.get(name, "–" if flags is None else "not yet")
        rows.append(f"{line} {steps.get(name, '–')} | {speed} |")
    cores = len(os.sched_getaffinity(0))
    if not repeats:
        cores, repeats = re.search(
            r"with\s+(\d+)\s+cores,.*?median\s+of\s+(\d+)", PAGE.read_text(), re.DOTALL
        ).groups()
    return TEXT.format(
        batch=BATCH,
        micro_batches=MICRO_BATCHES,
        cores=cores,
        repeats=repeats,
        rows="\n".join(rows),
        gpt="\n".join(gpt),
    )


def picture() -> None:
    """One step of four routes on two GPUs, at one scale: the picture of the README."""
    timelines = {
        "DataParallel, one process": data_parallel(),
        "Model parallelism, naive": halves(1),
        f"Pipeline, {MICRO_BATCHES} micro-batches": halves(MICRO_BATCHES),
        "DDP, one process per GPU": replicas(),
    }
    seconds = {name: timeline.end - timeline.start for name, timeline in timelines.items()}
    figure = plots.figure(8, 7)
    for row, (name, timeline) in enumerate(timelines.items()):
        axes = figure.add_subplot(len(timelines), 1, row + 1)
        title = f"{name}: {1e3 * seconds[name]:.1f} ms"
        # Lesson 03 asks for the shares of the time.
        timeline.plot(axes, title, until=max(seconds.values()), shares=False)
    plots.share_legend(figure)
    plots.save(figure, ROOT / "lessons" / "four-ways.png")


if __name__ == "__main__":
    with atomic(PAGE) as temporary:
        temporary.write_text(page(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
    picture()
    print(PAGE.read_text())
