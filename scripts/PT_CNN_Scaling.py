# %% [markdown]
# # 13 · Scaling: measured here, predicted to 1,024 GPUs
# **The question.** A training takes a week on one GPU. The cluster has hundreds. How many GPUs
# should I ask for, and how do I know it before the job runs?
#
# [DDP](../lessons/README.md#ddp), [all-reduce](../lessons/README.md#all-reduce) and
# [bucket](../lessons/README.md#bucket) are lesson 05's words.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from multigpu import data, devices, files, flags, launch, metrics, plots, proof, rendezvous
from multigpu.errors import pluralize
from multigpu.models import CNN


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PT_CNN_Scaling",
        "Train a CNN with DDP, and measure its steps: one point of a scaling curve.",
    )
    parser.add_argument(
        "--weak",
        action="store_true",
        help="--batch-size is the batch of each rank, not the global batch",
    )
    parser.add_argument(
        "--gather",
        action="store_true",
        help="draw scaling.png of all runs in the folder that OUT is in",
    )
    parser.add_argument(
        "--spawn",
        metavar="N",
        help="start N ranks on this machine; 'auto': one for each GPU, without a GPU two",
    )
    return parser.parse_args(arguments)


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# import os
# import textwrap
#
# from IPython.display import Image
#
# from multigpu import lesson
# from multigpu.scaling import laws, predict, report
#
# lesson.setup("13-scaling", ranks=True)
# from experiments import PUBLISHED, Case, guide, measured_steps, published_rows
#
# cores = len(os.sched_getaffinity(0))

# %% [markdown]
# ## Two ways to grow
# - **Strong scaling**: the step's images stay the same, each GPU gets fewer. The result comes
#   sooner.
# - **Weak scaling**: each GPU's images stay the same, the global batch grows. More is done in
#   the same time. (A larger batch is another training: its learning rate must follow.)
#
# The **speed-up** on n GPUs is images/s ÷ images/s on one; the **efficiency** is speed-up ÷ n.
#
# ## Predict first
# A step of the CNN has 256 images of 28×28: strong scaling. Write your answers, then run the
# cell.

# %% tags=["active-ipynb", "guess"]
# guess_two = 1.8  # times as fast: 2 processes instead of 1, the same 256 images
# guess_four = 2.5  # the same with 4 processes

# %% [markdown]
# ## Measured on this machine
# Measure both kinds of scaling here. One set of four processes measures all cases in turn,
# several times. The first round warms up and does not count. Other programs can only make a
# step longer, so the shortest step of a case counts, as in lesson 01. The range says how busy
# the machine was. (About ten seconds.)

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_two, guess_four)
# steps = measured_steps(images=256, rounds=5)
# print(f"{cores} cores; one thread for each process")
# for (kind, n), seconds in steps.items():
#     shortest, longest = 1e3 * min(seconds), 1e3 * max(seconds)
#     print(f"{kind}, {pluralize(n, 'process')}: {shortest:.0f} ms (to {longest:.0f})")

# %% tags=["active-ipynb", "nbval-ignore-output"]
# def speed_ups(kind):
#     """images/s of 1, 2 and 4 processes ÷ those of one process, by the shortest steps."""
#     found = {}
#     for n in (1, 2, 4):
#         grown = n if kind == "weak" else 1
#         found[n] = grown * min(steps[kind, 1]) / min(steps[kind, n])
#     return found
#
#
# strong = speed_ups("strong")
# lesson.compare("2 processes, times as fast", guess_two, strong[2], unit="×", digits=1)
# lesson.compare("4 processes, times as fast", guess_four, strong[4], unit="×", digits=1)
# for fewer, more in ((1, 2), (2, 4)):
#     if max(steps["strong", more]) >= min(steps["strong", fewer]):
#         print(f"{fewer} and {more} processes: the ranges overlap: this can be chance")

# %% [markdown]
# ### Four processes, how many cores?
# Is it communication that slows down four processes? A control answers: the same steps, but
# nothing is averaged (`no_sync`). On fewer than four cores the processes share them: that is
# what these four lose. With four cores or more, the control is near 4×, and the rest is memory
# bandwidth and the cores' clock.
#
# What DDP loses beyond the control is averaging: copies into buckets, waiting, communication.
# Both figures are relative to one process that averages nothing. (Above, the one process ran
# DDP, so the same four processes have another speed-up there.)
#
# A speed-up slightly above the number of processes, or of cores, comes from the cache: a
# smaller batch fits better into a core's cache. Far above it, other programs have disturbed
# the steps of one process.

# %% tags=["active-ipynb", "nbval-ignore-output"]
# alone = min(steps["silent", 1])
# for n in (2, 4):
#     apart = f"{alone / min(steps['silent', n]):.2f}×"
#     with_ddp = f"{alone / min(steps['strong', n]):.2f}×"
#     print(f"{n} processes that never communicate: {apart}, with DDP {with_ddp}")
#     if min(steps["strong", n]) < min(steps["silent", n]):
#         print("faster with DDP: other programs disturbed the control, so measure again")
# print(f"this machine has {cores} cores")

# %% [markdown]
# **Compare a speed-up with its upper bound.** On your cluster the bound is about n, or what a
# control of your own gives. If the speed-up is far below it, look first whether the ranks
# share cores, a disk or a GPU, then at the network. (Measure the network alone, with
# nccl-tests: `all_reduce_perf -b 1M -e 256M -f 2 -g 8` prints the bandwidth of all-reduces on
# a node with 8 GPUs. Not tried here.)

# %% [markdown]
# ## The two laws
# A share s of the time is serial: it cannot be divided over the GPUs.
#
# - **Amdahl**: s is a share of the time on one GPU. For the same work, n GPUs are
#   1 / (s + (1 − s)/n) times as fast: at most 1/s times.
# - **Gustafson**: s is a share of the time on n GPUs. In the same time they do n − s (n − 1)
#   times the work of one.

# %% tags=["active-ipynb"]
# for n in (2, 8, 64, 1024):
#     same_work, more_work = laws.amdahl(0.05, n), laws.gustafson(0.05, n)
#     print(f"{n:>5} GPUs, 5% serial: Amdahl {same_work:6.1f}×, Gustafson {more_work:6.1f}×")
# print(f"the most that 5% allow, by Amdahl: {1 / 0.05:.0f}×")

# %% [markdown]
# The next cell fits each law to the points that this machine gave: which serial share would
# explain them? The dashed curve is Amdahl's law with the fitted share.

# %% tags=["active-ipynb", "nbval-ignore-output"]
# weak = speed_ups("weak")
# share = laws.fit_amdahl(list(strong), list(strong.values()))
# scaled_share = laws.fit_gustafson(list(weak), list(weak.values()))
# print(f"serial share by Amdahl, strong scaling: {share:.0%}")
# print(f"serial share by Gustafson, weak scaling: {scaled_share:.0%}")
# fitted = f"Amdahl, {share:.0%} serial"
# curves = {
#     "linear": list(strong),
#     "strong, measured": list(strong.values()),
#     fitted: [laws.amdahl(share, n) for n in strong],
#     "weak, measured": list(weak.values()),
# }
# title = f"4 processes on {cores} cores are {strong[4]:.1f} times as fast as one"
# axes = ("processes", "times as fast")
# plots.lines(list(strong), curves, *axes, title, level=None, dashed=fitted)

# %% [markdown]
# **A fit says how much, never why.** On a machine with fewer cores than processes, much of the
# share is the missing cores, not serial work. The two are shares of different times. (Above
# 100%: n processes do less in the same time than one.)
#
# ## Predicted to 1,024 GPUs
# The fit is not used here: the serial share of a laptop says nothing about a cluster. A
# cluster is computed from its parts. The command `multigpu scaling` adds up a step of DDP:
#
# - **ideal**: 1/n of one GPU's time, by the cost model of the
#   [virtual GPUs](../lessons/README.md#virtual-gpu): in fp32, but on A100s and H100s
#   convolutions are in TF32, as is torch's default;
# - **computing too small**: with fewer images, kernels reach a smaller share of a GPU's speed;
# - **copies into buckets**: of each gradient into DDP's bucket, and of the average out of it;
# - **latency of the all-reduces**: after backward the GPU waits for them, and each takes some
#   time even for a single byte;
# - **bandwidth inside a node**, or **between nodes**: the GPU waits longer, because their
#   bytes take time on the link;
# - **stragglers**: the slowest of n ranks. A rank's steps are assumed to vary by 2%
#   (`--spread`, a standard deviation);
# - **input pipeline**: the wait for data, if `--workers` is given.
#
# A curve *bends* where the efficiency falls below 80%, and the command names what costs most
# there. *Predict: ResNet-50 trains on A100s, 8 a node, with 8,192 images in a step of all of
# them. On how many of 8, 16, 32, 64, 128, 256, 512 and 1,024 GPUs is it still 80% efficient?*

# %% tags=["active-ipynb", "guess"]
# guess_bend = 64  # GPUs at most, if the efficiency must be 80%

# %% tags=["active-ipynb"]
# lesson.need(guess_bend)
# counts = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
# cluster = "--gpu A100-80GB --link NVLink3 --between-nodes HDR200 --global-batch 8192"
# gpus = ",".join(map(str, counts))
# Path("results/13").mkdir(parents=True, exist_ok=True)
# numbers = Path("results/13/predicted.json")
# !multigpu scaling --model resnet50 {cluster} --gpus {gpus} --json {numbers}
# rows = json.loads(numbers.read_text())["rows"]
# large = {row["gpus"]: row["estimates"][0] for row in rows}
# bend = max(n for n in counts if large[n]["efficiency"] >= 0.8)
# lesson.compare("GPUs with 80% efficiency", guess_bend, bend, digits=0)

# %% [markdown]
# The column "linear" is the *null model*: n GPUs are n times as fast as one. The column
# "efficiency" is "images/s" divided by "linear".
#
# 8,192 images do not fit into one A100, nor do 1,024: the speed-up is relative to a GPU with
# enough memory. A real one accumulates micro-batches (lesson 05). The next cell's first lines
# are the memory, and what accumulating costs at most.
#
# Where does the time go? The bars show the parts of a step: the ideal time, whose share is the
# efficiency, and the time that each cause adds.

# %% tags=["active-ipynb"]
# bars = {}
# ends = []
# for n in (16, 64, 256, 1024):
#     parts = {"ideal": 100 * large[n]["efficiency"]}
#     for cause, seconds in large[n]["losses_s"].items():
#         if seconds:
#             parts[cause] = 100 * seconds / large[n]["seconds"]
#     bars[f"{n:,} GPUs"] = parts
#     ends.append(f"{1e3 * large[n]['seconds']:,.1f} ms")
# for row in rows[:3]:
#     print(f"{row['per_gpu']:>5} images on a GPU: {row['memory_bytes'] / 2**30:.0f} GiB")
# node = bars["16 GPUs"]  # each has 512 images
# speed = node["ideal"] / (node["ideal"] + node["computing too small"])
# print(f"one GPU with 512 images at a time: {speed:.0%} of the images/s with 8,192")
# last = bars["1,024 GPUs"]
# share = last["computing too small"] + last["copies into buckets"]
# title = f"8 images on each of 1,024 GPUs: {share:.0f}% of a step is small kernels and copies"
# unit = "% of a step; at the end of a bar: a step's time; simulated"
# plots.stacked_bars(bars, unit, title, totals=True, ends=ends)

# %% [markdown]
# With 8 images a GPU, kernels are too small to fill it: they reach a smaller share of its
# speed, and the host launches some of them too late. DDP adds two launches for each weight
# tensor, into its bucket and out of it. A larger global batch helps, more GPUs do not.
#
# With a slower network or a smaller model, something else bends the curve. And a faster GPU
# scales *worse*: there is less computation to hide the all-reduces behind. Each GPU has 64
# images, 32 of the small CNN. V100s and H100s get the A100's NVLink3, so that only the GPU
# differs: such machines do not exist.

# %% tags=["active-ipynb"]
# networks = {"resnet50": "Ethernet10", "vgg16": "Ethernet25", "cnn": "HDR200"}
# for model, network in networks.items():
#     found = predict(model, "A100-80GB", link="NVLink3", between_nodes=network)
#     print(textwrap.fill(f"{model}, {network}: {report.bend(found)}", 95))
# for gpu in ("V100-16GB", "A100-80GB", "H100-80GB"):
#     (row,) = predict("vgg16", gpu, "NVLink3", "Ethernet25", gpus=(64,)).rows
#     print(f"vgg16 on 64 {gpu}, Ethernet25: {row.estimates[0].efficiency:.0%} efficiency")

# %% [markdown]
# ### Can one node tell?
# Amdahl's law has one serial share for all numbers of GPUs. The next cell solves the law for
# s, point by point. Then it uses the share of 8 GPUs for 1,024, as if only one node had been
# measured: once with the assumed stragglers of 2%, once without any.

# %% tags=["active-ipynb"]
# nodes = {"link": "NVLink3", "between_nodes": "HDR200"}
# strong_scaling = {**nodes, "gpus": counts, "global_batch": 8192}
# shares = {}
# for spread in (0.02, 0.0):
#     found = predict("resnet50", "A100-80GB", **strong_scaling, spread=spread)
#     ratios = {row.gpus: row.estimates[0].speed_up for row in found.rows}
#     by_gpus = {n: laws.fit_amdahl([n], [ratios[n]]) for n in counts[1:]}
#     by_node = f"with the share of 8 GPUs {laws.amdahl(by_gpus[8], 1024):.0f}×"
#     print(f"stragglers {spread:.0%}: 1,024 GPUs predicted {ratios[1024]:.0f}×, {by_node}")
#     shares[f"stragglers {spread:.0%}"] = [100 * share for share in by_gpus.values()]
# title = "Most of what 8 GPUs lose is the assumed stragglers"
# plots.lines(counts[1:], shares, "GPUs", "serial share in %, simulated", title, level=None)

# %% [markdown]
# The share is not a constant of this training, with or without stragglers. How far the share
# of 8 GPUs misleads depends on the assumption: most of that share is stragglers. (This is one
# training with one batch.)
#
# ## Is it true? The published clusters
# Horovod's authors measured 512 GPUs, four a node, 25 Gb/s between nodes, 64 images a GPU.
# They name the family of the GPU, Pascal, and not its link: here it is a P100 with PCIe 3.
#
# **One GPU is measured, not simulated**: TensorFlow's benchmarks have 154 images/s for VGG-16
# on one P100, so 64 images take 416 ms. With `--step-ms 416 --step-samples 64`, `multigpu
# scaling` would compute with such a step. No efficiency below was used to fit anything.
#
# *Predict what they measured for VGG-16. In a ring all-reduce, a node sends the 553 MB of
# gradients twice. All-reduces overlap with backward, which is about two thirds of a step.*

# %% tags=["active-ipynb", "guess"]
# guess_vgg = 90  # % of the 512-fold speed of one GPU: VGG-16 on 512 GPUs, as published

# %% tags=["active-ipynb"]
# lesson.need(guess_vgg)
# ((published, predicted, cause),) = published_rows(PUBLISHED[1:2]).values()
# ((_, simulated, _),) = published_rows(PUBLISHED[1:2], calibrate=False).values()
# print(f"VGG-16 on 512 GPUs: published {published:.0%}, what costs most: {cause}")
# print(f"predicted with one measured GPU {predicted:.0%}, without {simulated:.0%}")
# lesson.compare("efficiency, published", guess_vgg, 100 * published, unit="%", digits=0)

# %% [markdown]
# The measured P100 is 1.4 times as fast as the simulated one. So less of the all-reduces hides
# behind its backward. `python benchmarks/scaling.py` has more clusters, with two null models:
# "linear", and a constant.

# %% tags=["active-ipynb"]
# table = json.loads(Path("../benchmarks/scaling.json").read_text())
# for row in table["rows"]:
#     numbers = f"published {row['published']:.0%}, predicted {row['predicted']:.0%}"
#     print(f"{row['name']:<32} {numbers}, without one GPU {row['uncalibrated']:.0%}")
# models = {
#     "predicted, one GPU measured": "error",
#     "predicted, no GPU measured": "uncalibrated_error",
#     "linear": "null_error",
#     f"always {table['constant']:.0%}, the median of all five": "constant_error",
#     "the median of the other four": "others_error",
# }
# for model, key in models.items():
#     print(f"mean error, {model}: {100 * table[key]:.0f} points")

# %% [markdown]
# **That a prediction is worth something, these five do not show.** A constant, chosen when all
# five are known, is as good. Sorted by efficiency, only the lowest is in its right place. And
# without a measured GPU the error is larger. So measure one GPU first, and take a prediction
# as a reason to measure two nodes, not as a result.
#
# All predictions but the last are too high. They leave out that all-reduces take memory
# bandwidth and multiprocessors from the computation, and that other jobs use the same
# switches. And TensorFlow's replicas of 2017 perhaps hid less of their all-reduces than DDP.
#
# ## How many GPUs to ask for
# You wait for **queue + run**. On more GPUs the run is shorter and the wait is longer. The
# training of the first question takes a week on one GPU; let it scale as ResNet-50 does above.
# These waiting times are invented. For yours, `sacct -X -o AllocTRES%40,Submit,Start` lists
# past jobs, and `squeue --start` says what Slurm expects for a job in the queue.

# %% tags=["active-ipynb"]
# queue_hours = {8: 0.2, 16: 0.5, 32: 1.5, 64: 6, 128: 16, 256: 48}

# %% tags=["active-ipynb", "guess"]
# guess_ask = 64  # GPUs with which the result comes first

# %% tags=["active-ipynb"]
# lesson.need(guess_ask)
# week = 7 * 24  # hours on one GPU
# totals = {}
# for n, queue in queue_hours.items():
#     run = week / large[n]["speed_up"]
#     totals[n] = queue + run
#     total = f"{totals[n]:4.1f} h, {n * run:.0f} GPU hours"
#     print(f"{n:>4} GPUs: {queue:4.1f} h queue + {run:4.1f} h run = {total}")
# best = min(totals, key=totals.get)
# lesson.compare("GPUs to ask for", guess_ask, best, digits=0)

# %% [markdown]
# Ask for fewer, if the efficiency is below what your site expects: other users wait for the
# GPU hours that are lost. As time limit, ask for a little more than the time that you predict:
# short jobs fit into gaps and start sooner.
#
# ## The guide
# Which lesson's method fits a training? Each answer is computed: first from the memory of one
# GPU, then from the efficiency on all of them. The guide decides at 80%, with no GPU measured,
# and a prediction can be much too high (above: 96%, published 71%). So measure one node and
# two nodes before you ask for all. Where the weights do not fit, it computes memory alone:
# lesson 06 compares [FSDP](../lessons/README.md#fsdp) with stages.
#
# The cases compute in bf16 (lesson 11): for the same figures, add `--precision bf16` to the
# command. In bf16 a GPU computes faster, but launches and copies take as long as before. So
# ResNet-50 is less efficient on 64 GPUs than in the table above. (About five seconds.)

# %% tags=["active-ipynb"]
# cases = {
#     "the course's CNN, 64 images a step": Case("cnn", 64, gpus=8),
#     "ResNet-50, 256 images a step": Case("resnet50", 256, gpus=1),
#     "ResNet-50, 8,192 images a step": Case("resnet50", 8192, gpus=64),
#     "VGG-16, 4,096 images a step, 10 Gb/s": Case(
#         "vgg16", 4096, gpus=64, between="Ethernet10"
#     ),
#     "BERT-large, 4,096 sequences a step": Case("bert:large", 4096, gpus=8),
#     "GPT, 1.7e9 weights, 512 sequences a step": Case("gpt:24x2304x24", 512, gpus=32),
#     "GPT, 22e9 weights, 512 sequences a step": Case("gpt:48x6144x48", 512, gpus=64),
# }
# for name, case in cases.items():
#     method, reason = guide(case)
#     print(f"{name}, {pluralize(case.gpus, 'GPU')}\n    {method} ({reason})")

# %% [markdown]
# The page of this lesson has the whole guide as a table.
#
# ## The program: measure a point on your cluster
# One job for each number of GPUs. The program trains as lesson 05's does, and keeps the time
# of each step of the first rank. The first epoch warms up, and an epoch's last batch can be
# smaller: both are left out. On a GPU it waits for the end of each step. So the host cannot
# launch the next step before, as it does in a normal training: a step of small kernels can
# take longer here. (The exercise's question 3 waits only before and after all steps.)


# %% jupyter={"source_hidden": true}
def set_up(args: argparse.Namespace) -> tuple[launch.World, torch.device]:
    world = launch.find_world()
    device = devices.pick(world, exact=args.prove)
    store = rendezvous.open_store(world, device)
    dist.init_process_group(
        devices.backend(device),
        store=store,
        rank=world.rank,
        world_size=world.size,
    )
    return world, device


# %%
def train_epoch(
    model: DDP,
    optimizer: torch.optim.Optimizer,
    train: TensorDataset,
    batch: data.Batch,
    world: launch.World,
    sampler: DistributedSampler,
) -> tuple[float, list[float]]:
    """Train for one epoch; return the mean loss of all images, and each step's seconds."""
    device = next(model.parameters()).device
    seen = torch.zeros(2, dtype=torch.float64, device=device)
    ends = [time.perf_counter()]
    loader = DataLoader(train, batch_size=batch.per_micro_batch, sampler=sampler)
    for step, (images, labels) in enumerate(metrics.progress(loader, world)):
        images = images.to(device)
        labels = labels.to(device)
        real = data.real_rows(len(train), batch, world.rank, step, len(labels), device)

        optimizer.zero_grad()
        losses = F.cross_entropy(model(images), labels, reduction="none")
        loss = (losses * real).sum()
        (loss * world.size / batch.images_in_step(step, len(train))).backward()
        optimizer.step()

        seen += torch.stack([loss.detach(), real.sum()])
        if device.type == "cuda":
            torch.cuda.synchronize()  # without it, the clock would stop at the launch
        ends.append(time.perf_counter())
    dist.all_reduce(seen)
    loss_sum, images_seen = seen.tolist()
    seconds = [end - begin for begin, end in pairwise(ends)]
    return loss_sum / images_seen, seconds[:-1] or seconds


# %% jupyter={"source_hidden": true}
@torch.no_grad()
def evaluate(model: DDP, test: TensorDataset, world: launch.World) -> float:
    device = next(model.parameters()).device
    shard = Subset(test, range(world.rank, len(test), world.size))
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in DataLoader(shard, batch_size=256):
        predictions = model.module(images.to(device)).argmax(1)
        hits = (predictions == labels.to(device)).sum()
        counts += torch.stack([hits, torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    hits, images = counts.tolist()
    return hits / images


# %% [markdown]
# As a job array, each task is one point of the curve. A task that has ended draws the points
# that there are so far; if another task has ended meanwhile, it draws again.


# %% jupyter={"source_hidden": true}
def curves_of(runs: list[dict]) -> dict[str, dict[int, float]]:
    """The speed-ups of strong and of weak scaling: {kind: {ranks: speed-up}}.

    A kind without a run of one rank has none.
    """
    curves = {}
    for kind in ("strong", "weak"):
        points = {run["world_size"]: run for run in runs if run.get("scaling") == kind}
        if 1 in points:
            one = points[1]["images_per_s"]
            curves[kind] = {n: points[n]["images_per_s"] / one for n in sorted(points)}
    return curves


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    figure = plots.figure()
    axes = figure.add_subplot()
    for index, (kind, ratios) in enumerate(curves.items()):
        look = plots.curve_look(index)
        axes.plot(list(ratios), list(ratios.values()), label=f"{kind} scaling", **look)
        text = ", ".join(f"{n}: {ratio:.2f}×" for n, ratio in ratios.items())
        print(f"{kind} scaling by ranks: {text}")
    ranks = sorted({n for ratios in curves.values() for n in ratios})
    axes.plot(ranks, ranks, label="linear", color=plots.INK, linestyle=":")
    title = f"{pluralize(max(ranks), 'rank')}: images/s ÷ those of one rank"
    axes.set(xlabel="ranks", ylabel="times as fast, measured", title=title, xticks=ranks)
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    print(f"figure: {plots.save(figure, path)}", flush=True)


def gather(folder: Path) -> None:
    """Draw FOLDER/scaling.png from the metrics.json of all runs in FOLDER."""
    drawn: list[Path] = []
    while (found := sorted(folder.glob("*/metrics.json"))) != drawn:
        drawn = found
        curves = curves_of([json.loads(path.read_text()) for path in drawn])
        if curves:
            draw(curves, folder / "scaling.png")
        else:
            print(f"{folder}: no run with one rank yet, so no speed-up")


# %% [markdown]
# What remains: divide the batch and load the data, train and measure, report.


# %% jupyter={"source_hidden": true}
def prepare(
    args: argparse.Namespace, world: launch.World
) -> tuple[data.Batch, TensorDataset, TensorDataset]:
    """The batch of each rank, and the data, which one rank of each node downloads."""
    with rendezvous.fail_together(world):
        size = args.batch_size
        if args.weak:
            size = (size or 64) * world.size
        batch = flags.split_batch(size, world.size)
        if world.rank == 0:
            files.writable_folder(args.out)
    with rendezvous.fail_together(world):
        if world.local_rank == 0:  # one download for each node
            data.fetch(args.data)
    with rendezvous.fail_together(world):
        train, test = data.load(data.fetch(args.data))
    return batch, train, test


# %%
def train_and_measure(
    args: argparse.Namespace,
    model: DDP,
    train: TensorDataset,
    test: TensorDataset,
    batch: data.Batch,
    world: launch.World,
) -> tuple[list[dict], list[float]]:
    """Train all epochs. Returns a row of the table for each, and the measured seconds."""
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    sampler = DistributedSampler(train, world.size, world.rank, seed=args.seed)
    images_in_step = batch.images_in_step(0, len(train))
    history = []
    measured = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss, seconds = train_epoch(model, optimizer, train, batch, world, sampler)
        if epoch > 0:
            measured += seconds
        row = {
            "epoch": epoch + 1,
            "loss": metrics.check_loss(loss, epoch, world),
            "test_accuracy": evaluate(model, test, world),
            "images_per_s": images_in_step / statistics.median(seconds),
        }
        history.append(row)
        if world.rank == 0:
            print(metrics.row(row), flush=True)
    return history, measured or seconds


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    world, device = set_up(args)
    batch, train, test = prepare(args, world)
    kind = "weak" if args.weak else "strong"
    if world.rank == 0:
        print(devices.describe(world, device))
        per_rank = f"{world.size} (ranks) × {batch.per_micro_batch} (images)"
        print(f"{kind} scaling: global batch {batch.global_size} = {per_rank}\n")
        print(metrics.header(), flush=True)

    def new_model() -> torch.nn.Module:
        torch.manual_seed(args.seed)
        return CNN(tuple(train[0][0].shape), data.num_classes(train, test)).to(device)

    model = DDP(new_model(), device_ids=[device.index] if device.type == "cuda" else None)
    history, measured = train_and_measure(args, model, train, test, batch, world)
    dist.destroy_process_group()
    if world.rank != 0:
        return

    verdict = None
    if args.prove:
        claim = f"DDP on {pluralize(world.size, 'rank')} equals one process"
        verdict = proof.compare_with_serial(
            claim, model.module, new_model(), train, args, batch_size=batch.global_size
        )
    middle = statistics.median(measured)
    print(f"{len(measured)} steps: median {1e3 * middle:.2f} ms", end=", ")
    print(f"{1e3 * min(measured):.2f} to {1e3 * max(measured):.2f} ms")
    metrics.report(
        args.out,
        world,
        device,
        history,
        verdict,
        batch_size=batch.global_size,
        scaling=kind,
        step_seconds=measured,
        # With fewer images than a batch, the steps that were measured have only those.
        images_per_s=batch.images_in_step(0, len(train)) / middle,
    )
    if args.gather:
        gather(args.out.parent)


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# **Run it.** The first run measures one rank, the second two ranks, with the digits in batches
# of 64. The second one trains ten epochs, and its proof compares its weights with those of one
# process that trains alone. Then it draws both points. Is the speed-up of these small batches
# as high as that of 256 images? (About ten seconds.)

# %% tags=["active-ipynb", "nbval-ignore-output"]
# script = "../scripts/PT_CNN_Scaling.py"
# ranks = torch.cuda.device_count() or 2
# torchrun = f"torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node={ranks}"
# !OMP_NUM_THREADS=1 python {script} --epochs 2 --out results/13/1
# !OMP_NUM_THREADS=1 {torchrun} {script} --out results/13/2 --prove --gather
# Image("results/13/scaling.png")

# %% [markdown]
# Two ranks can be slower than one: for 64 small images, communication can cost more than the
# second rank saves.
#
# On a cluster, `sbatch slurm/PT_CNN_Scaling.slurm` measures 1, 2 and 4 GPUs as a job array,
# and its last task draws the curve.

# %% tags=["active-ipynb"]
# print(metrics.route_row("13 scaling", "results/13/2"))  # for the table of all routes

# %% [markdown]
# **How many GPUs, and how do you know before the job runs?** Measure a step on one GPU,
# predict with it (`--step-ms`), measure one node and two nodes, and compare. Then ask for the
# number of GPUs at which queue + run is shortest.
#
# ## To go further
# With the same global batch, a shorter step is a sooner result. With a larger batch, more
# images/s may give none: above a *critical batch size*, a larger batch hardly saves steps
# ([McCandlish et al., 2018](https://arxiv.org/abs/1812.06162)). So compare the time to the
# accuracy that you need. This was not tried here.

# %% [markdown] tags=["footer"]
# [← 12 Elastic training](PT_CNN_Elastic.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/13-scaling/README.md)
