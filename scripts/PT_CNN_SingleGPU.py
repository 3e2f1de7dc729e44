# %% [markdown]
# # 01 · One GPU first: baseline, data loading, where the time goes
# **The question.** Training is too slow. Would a second GPU help, and with what?
#
# You need Python and a little PyTorch, but no GPU. Everything here runs on the CPU. This first
# lesson also explains words that all other lessons use: the
# [glossary](../lessons/README.md#words) has them.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse
import os
import time
from collections.abc import Callable, Iterable
from itertools import islice, pairwise
from operator import attrgetter
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch.profiler import profile
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from multigpu import data, devices, files, flags, launch, metrics, proof
from multigpu.models import CNN


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PT_CNN_SingleGPU",
        "Train a CNN on one GPU: the baseline for all other lessons.",
    )
    parser.add_argument(
        "--workers",
        type=flags.count,
        default=0,
        help="processes that load data (default: 0)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print the longest operations of a step, and write a trace",
    )
    return parser.parse_args(arguments)


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# from functools import partial
#
# from torch.utils.flop_counter import FlopCounterMode
#
# from multigpu import lesson, plots
# from multigpu.errors import pluralize
# from multigpu.launch.room import available_cores
#
# lesson.setup("01-one-gpu")
# from experiments import QueueDevice, batches_read, clock_readings
# from experiments import seconds_measured, seconds_on_paper
#
# train, test = data.load(data.fetch(None))
# device = devices.pick(launch.World())
# torch.set_num_threads(1)  # with more, all threads wait for one whose core is busy

# %% [markdown]
# ## One step
# The *model* is a small network, a CNN. It reads images of handwritten digits, 8×8 pixels
# each. Its *weights* are the numbers that training changes. Training is a loop of *steps*.
# A step takes a *batch* of images and has four parts:
# - **data**: read the images, and stack them into one tensor;
# - **forward**: compute the model's outputs, and from them the
#   [*loss*](../lessons/README.md#loss), one number that says how wrong the outputs are;
# - **backward**: compute the *gradient* of each weight: how the loss changes with the weight;
# - **update**: the *optimizer* changes each weight a little, so that the loss becomes smaller.
#
# A [*device*](../lessons/README.md#device) computes: the CPU or a GPU. The *host* is the CPU,
# which runs Python. A tensor is in the memory of one device, where all operations on it run;
# `.to(device)` copies it.

# %% tags=["active-ipynb"]
# torch.manual_seed(0)
# model = CNN().to(device)
# optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
# weights = sum(weight.numel() for weight in model.parameters())
# print(f"device: {device}")
# print(f"{weights:,} weights, {len(train):,} images to train with")
#
# for step in range(5):
#     images, labels = train[:64]  # data: the same batch in each step
#     images, labels = images.to(device), labels.to(device)
#     loss = F.cross_entropy(model(images), labels)  # forward
#     loss.backward()  # backward
#     optimizer.step()  # update
#     optimizer.zero_grad()  # otherwise the next gradients would be added to these
#     print(f"step {step}: images {tuple(images.shape)}, loss {loss.item():.2f}")

# %% [markdown]
# 64 images, 1 channel (grey), 8×8 pixels. Real training reads a new batch in each step. In an
# [*epoch*](../lessons/README.md#epoch) each image is read once: 1,437 images in batches of 64
# are 23 steps.
#
# ## Predict first
# Write your answers, then run the cell. The cells below compare them with what happens.

# %% tags=["active-ipynb", "guess"]
# guess_backward = 1.0  # multiplications in backward, for each multiplication in forward
# # A step takes a GPU 70 ms. Python reads its clock before it calls the model, and again after
# # optimizer.step(). How many ms are between the two readings?
# guess_clock = 70
# guess_half = 50  # forward and backward of 32 images: % of the time for 64 (without %)

# %% [markdown]
# ## How much work is a step?
# A convolution and a linear layer multiply and add. `FlopCounterMode` counts the operations in
# forward, and in forward and backward together; half of them are multiplications.

# %% tags=["active-ipynb"]
# lesson.need(guess_backward)
#
#
# def multiplications(with_backward):
#     with FlopCounterMode(display=False) as counter:
#         loss = F.cross_entropy(model(images), labels)
#         if with_backward:
#             loss.backward()
#     counts = counter.get_flop_counts()
#     return {layer: sum(counts[f"CNN.{layer}"].values()) // 2 for layer in layers}
#
#
# layers = [name for name, _ in model.named_children()]
# forward, both = multiplications(False), multiplications(True)
# print(f"{'per image':<10}{'forward':>10}{'backward':>10}")
# for layer in layers:
#     once = forward[layer] // len(images)
#     print(f"{layer:<10}{once:>10,}{both[layer] // len(images) - once:>10,}")
# ratio = sum(both.values()) / sum(forward.values()) - 1
# lesson.compare("multiplications, backward / forward", guess_backward, ratio)

# %% [markdown]
# Backward computes two gradients per layer, and each takes as many multiplications as the
# layer's forward: the gradient of the weights, and the gradient of the layer's input, which
# the layer before it needs. The first layer's input is the images, which need no gradient.
#
# Do the times have the same ratio? First we need a clock that can be trusted.
#
# ## A clock for a GPU
# A GPU works through a *queue*. The host [*launches*](../lessons/README.md#launch) operations:
# it puts them into the queue. `synchronize` waits until all operations in the queue are done.
# `QueueDevice` works in the same way without a GPU: a thread takes operations from a queue,
# and each sleeps as long as it would take. Here a step has 20 ms of forward, 40 ms of backward
# and 10 ms of update.

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_clock)
# seconds = {"forward": 0.02, "backward": 0.04, "update": 0.01}
# operations = {name: partial(time.sleep, length) for name, length in seconds.items()}
# gpu = QueueDevice()
# bars = {}
# for name, wait_after in (
#     ("no synchronize", []),
#     ("after the update only", ["update"]),
#     ("after each part", ["forward", "backward", "update"]),
# ):
#     bars[name] = clock_readings(gpu, operations, wait_after)
#     gpu.synchronize()  # so that the next measurement begins with an empty queue
# found = sum(bars["no synchronize"].values())
# lesson.compare("without synchronize", guess_clock, found, unit="ms", digits=0)
# work = 1e3 * sum(seconds.values())
# title = f"{work:.0f} ms of work: the clock shows {found:.1f} ms without synchronize"
# plots.stacked_bars(bars, "ms on the host's clock, measured", title, totals=True)

# %% [markdown]
# `launch` returns at once, so without `synchronize` the clock shows how long it takes to fill
# the queue. With one `synchronize` at the end the sum is right, but all of it is counted as
# the update. An operation that needs a number from the GPU, such as `loss.item()`, waits for
# the queue, too: it seems slow, but the time is that of the work before it.
#
# So `phases` waits for the device before each reading of the clock. It leaves out the first
# steps, which allocate memory and choose [kernels](../lessons/README.md#kernel), the GPU's
# programs.


# %%
def now(device: torch.device, clock: Callable[[], float]) -> float:
    """The clock's seconds, read when the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return clock()


def phases(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The median seconds that a step spends on data, forward, backward and update."""
    device = next(model.parameters()).device
    model.train()
    batches = iter(loader)
    times = []
    while True:
        began = now(device, clock)
        batch = next(batches, None)
        if batch is None:
            break
        images, labels = (part.to(device) for part in batch)
        data_read = now(device, clock)

        loss = F.cross_entropy(model(images), labels)
        forward_done = now(device, clock)

        loss.backward()
        backward_done = now(device, clock)

        optimizer.step()
        optimizer.zero_grad()
        updated = now(device, clock)
        times.append([began, data_read, forward_done, backward_done, updated])

    durations = [
        [after - before for before, after in pairwise(readings)]
        for readings in times[min(warm_up, len(times) - 1) :]
    ]
    # Python's median, because torch.profiler would count torch's as a part of the step.
    medians = [median(column) for column in zip(*durations, strict=True)]
    return dict(zip(("data", "forward", "backward", "update"), medians, strict=True))


# %% [markdown]
# The batches come from a `DataLoader`. A *sampler* gives it the order of the images, here
# shuffled; the loader reads them and stacks them. With `num_workers`, other processes do this
# ahead of the training: the *workers*. With `pin_memory` the batch is in
# [pinned memory](../lessons/README.md#pinned-memory). A GPU can copy it from there while the
# host goes on, if `.to()` has `non_blocking=True`; a
# [tutorial](https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html) shows when.


# %%
def loader_of(
    train: Dataset,
    batch_size: int,
    seed: int,
    workers: int = 0,
    pin: bool = False,
) -> DataLoader:
    """Batches of the training set for one epoch, in the order that `seed` gives."""
    order = RandomSampler(train, generator=torch.Generator().manual_seed(seed))
    # A loader draws a random number when it starts. With a generator of its own it leaves the
    # model's random numbers as they were.
    own_generator = torch.Generator()
    return DataLoader(
        train,
        batch_size,
        sampler=order,
        num_workers=workers,
        pin_memory=pin,
        generator=own_generator,
    )


# %% [markdown]
# ## Where the time goes
# Other programs use this machine, too. So on the CPU the clock is `thread_time`: it only runs
# while this thread has a core. (With a GPU it is `perf_counter`.) In each of five *rounds*
# each batch size gets one epoch, and `phases` gives the median of its steps. Of each part the
# shortest round counts, as in Python's `timeit`. The second cell also prints the smallest and
# the largest ratio that a single round gives. (About five seconds.)

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_half)
#
#
# def one_epoch(batch_size):
#     model = CNN().to(device)
#     optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
#     loader = loader_of(train, batch_size, seed=0)
#     return phases(model, optimizer, loader, warm_up=1, clock=clock)
#
#
# def computing(step):
#     return step["forward"] + step["backward"]
#
#
# clock = time.thread_time if device.type == "cpu" else time.perf_counter
# rounds = [{size: one_epoch(size) for size in (16, 32, 64, 128)} for _ in range(5)]
# steps = {}
# bars = {}
# for size, parts in rounds[0].items():
#     steps[size] = {part: min(found[size][part] for found in rounds) for part in parts}
#     bars[f"batch {size}"] = {part: 1e6 * best / size for part, best in steps[size].items()}
# times = sum(bars["batch 16"].values()) / sum(bars["batch 128"].values())
# title = f"In a batch of 16 an image takes {times:.2f} times as long as in a batch of 128"
# label = "µs per image, measured: each part's shortest of five rounds"
# plots.stacked_bars(bars, label, title)

# %% tags=["active-ipynb", "nbval-ignore-output"]
# def show(what, ratio):
#     values = [ratio(found) for found in rounds]
#     spread = f"{min(values):.2f} to {max(values):.2f} in single rounds"
#     print(f"{what}: {ratio(steps):.2f} ({spread})")
#     return ratio(steps)
#
#
# def image(step, size):
#     return sum(step[size].values()) / size
#
#
# show("image in a batch of 16 / of 128", lambda t: image(t, 16) / image(t, 128))
# show("backward / forward, batch 64", lambda t: t[64]["backward"] / t[64]["forward"])
# show("data / whole step, batch 64", lambda t: t[64]["data"] / sum(t[64].values()))
# half = show("compute 32 / 64 images", lambda t: computing(t[32]) / computing(t[64]))
# lesson.compare("time of 32 images", guess_half, 100 * half, unit="%", digits=0)

# %% [markdown]
# Backward takes longer than forward, but not by the ratio of the multiplications: a step also
# computes tanh, copies memory, and has a fixed cost per operation. (The profiler, below, lists
# the operations.) Because of the fixed cost, 32 images take more than half the time of 64, and
# an image costs most in a small batch.
#
# ## How much faster could two GPUs be?
# With two GPUs, each goes forward and backward with half of the batch. The rest stays as it
# is, if one process reads all images, as in lessons 02 and 07, and each GPU updates all
# weights. (With one process per GPU, as in lessons 04 and 05, each process reads its own half:
# then only the update stays.)
#
# *Amdahl's law*: if a fraction *s* of the time stays and the rest is divided by *n*, the time
# becomes *s* + (1 − *s*)/*n*. So the training is at most 1 / (*s* + (1 − *s*)/*n*) times as
# fast. With any number of GPUs it stays below 1/*s*: with *s* = 20%, below 5 times.

# %% tags=["active-ipynb", "nbval-ignore-output"]
# def amdahl(s, n):
#     return 1 / (s + (1 - s) / n)
#
#
# whole = sum(steps[64].values())
# stays = steps[64]["data"] + steps[64]["update"]
# s = stays / whole
# parts = ", ".join(f"{part} {1e3 * seconds:.2f}" for part, seconds in steps[64].items())
# print(f"batch 64, ms per step: {parts}")
# print(f"{s:.0%} of the time stays")
# for n in (2, 4, 8, 1000):
#     print(f"{n:,} GPUs: at most {amdahl(s, n):.2f} times as fast")
# with_32 = whole / (stays + computing(steps[32]))
# print(f"2 GPUs, with the measured time of 32 images: {with_32:.2f} times as fast")

# %% [markdown]
# Amdahl's law is a bound: half a batch takes more than half the time, and two GPUs must also
# send each other weights or gradients. Lesson 02 adds that.
#
# ## When reading is the slow part
# Images often come from a busy disk. For example, a batch has 16 images, reading one takes
# 8 ms, and the GPU computes a step in 60 ms. With one GPU and no workers a step takes
# 128 + 60 = 188 ms.

# %% tags=["active-ipynb", "guess"]
# guess_second_gpu = 2  # a second GPU, no workers: how many times as fast?
# guess_workers = 1.5  # one GPU, 4 workers: how many times as fast?

# %% [markdown]
# In this experiment, reading an image sleeps for 8 ms, and computing a step sleeps for 60 ms,
# or for 30 ms with two GPUs. The shorter of two rounds of four steps counts. (Workers read
# ahead, so a round that another program delays can make the next one a little shorter.) "On
# paper" is the result of a formula, which follows. (About ten seconds.)

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_second_gpu, guess_workers)
# read = 16 * 0.008
# found = {}
# for gpus, workers in ((1, 0), (2, 0), (1, 1), (1, 2), (1, 4), (2, 4)):
#     compute = 0.06 / gpus
#     paper = seconds_on_paper(workers, read, compute)
#     found[gpus, workers] = seconds_measured(workers, read, compute)
#     case = f"{pluralize(gpus, 'GPU')}, {pluralize(workers, 'worker')}"
#     result = f"{1e3 * found[gpus, workers]:.0f} ms measured"
#     print(f"{case}: {1e3 * paper:.0f} ms per step on paper, {result}")
# second_gpu = found[1, 0] / found[2, 0]
# four_workers = found[1, 0] / found[1, 4]
# lesson.compare("with a second GPU", guess_second_gpu, second_gpu, unit="×", digits=1)
# lesson.compare("with 4 workers", guess_workers, four_workers, unit="×", digits=1)

# %% [markdown]
# On paper: without workers a step takes read + compute. Workers read the next batches while
# the GPU computes, and *w* workers read *w* batches at the same time: a step takes read/*w* or
# compute, whichever is longer. Two GPUs halve compute. So workers come first; a second GPU
# helps when the first one no longer waits for data.
#
# With one process for each GPU, as in lesson 04, two processes read at the same time. Two
# workers do this for one GPU, too.
#
# Here reading means *waiting*. It can also mean *computing*, as when photos are decoded. Then
# the workers need the cores: a core computes one batch in 128 ms.

# %% tags=["active-ipynb", "nbval-ignore-output"]
# print(pluralize(available_cores(), "core"))
# for workers in (0, 2, 4):
#     paper = seconds_on_paper(workers, read, 0.06, computing=True)
#     result = seconds_measured(workers, read, 0.06, computing=True)
#     case = f"{pluralize(workers, 'worker')}: {1e3 * paper:.0f} ms per step on paper"
#     print(f"{case}, {1e3 * result:.0f} ms measured")

# %% [markdown]
# On two cores, two workers read two batches at a time, and four workers do not read more: on
# paper both take 64 ms. With four cores, four workers need 32 ms, and the step 60. The formula
# assumes that each core is free; other programs make the measured step longer.
#
# The digits are in memory already. Do workers help there? The cell reads three epochs without
# training; the shortest counts. A loader starts new workers in each epoch, unless they stay:
# `persistent_workers=True`.

# %% tags=["active-ipynb", "nbval-ignore-output"]
# for workers, stay in ((0, False), (2, False), (2, True)):
#     loader = DataLoader(train, 64, num_workers=workers, persistent_workers=stay)
#     seconds = []
#     for epoch in range(4):
#         began = time.perf_counter()
#         for images, labels in loader:
#             pass
#         seconds.append(time.perf_counter() - began)
#     case = pluralize(workers, "worker") + (" that stay" if stay else "")
#     print(f"{case}: {len(train) / min(seconds[1:]):,.0f} images/s")

# %% [markdown]
# No: the digits need no reading, so workers only cost time. They start, and they send each
# batch to this process. Workers that stay start once, before the first epoch.
#
# ## Which operations take the time?
# `phases` shows which part of a step is slow; `torch.profiler` shows which operations are.
# Recording them makes a step slower, so compare its times only with each other. The batches
# are read beforehand. The *trace* shows what ran when: open it at ui.perfetto.dev.


# %%
def profiled(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable,
    trace: Path,
    steps: int = 20,
) -> str:
    """A table of the operations that take longest in a step, without the reading.

    Trains with the first `steps` batches of the loader. The trace is for ui.perfetto.dev.
    """
    # Without this the profiler prints lines of its own, when it starts and when it stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    batches = list(islice(loader, steps))
    with profile() as recorded:
        phases(model, optimizer, batches)
    with files.atomic(trace) as temporary:
        recorded.export_chrome_trace(str(temporary))

    on_cpu = next(model.parameters()).device.type == "cpu"
    microseconds = attrgetter("self_cpu_time_total" if on_cpu else "self_device_time_total")
    longest = sorted(recorded.key_averages(), key=microseconds, reverse=True)[:6]
    # The name of a GPU's kernel can have hundreds of characters.
    keys = [operation.key for operation in longest]
    names = [key if len(key) <= 60 else f"{key[:59]}…" for key in keys]
    width = max(len(name) for name in [*names, "operation"])
    lines = [f"{'operation':<{width}}{'calls per step':>16}{'ms per step':>14}"]
    for name, operation in zip(names, longest, strict=True):
        calls = operation.count / len(batches)
        milliseconds = microseconds(operation) / 1e3 / len(batches)
        lines.append(f"{name:<{width}}{calls:>16.1f}{milliseconds:>14.3f}")
    return "\n".join([*lines, f"trace: {trace}"])


# %% tags=["active-ipynb", "nbval-ignore-output"]
# trace = files.writable_folder("results/01-profile") / "trace.json"
# print(profiled(model, optimizer, loader_of(train, 64, seed=0), trace))

# %% [markdown]
# On a CPU the names are those of PyTorch's operations: `convolution_backward` is the backward
# of the convolutions, and `mm` multiplies the matrices of the linear layers. On a GPU they are
# the names of kernels.
#
# ## Train
# `loss.item()` in each step would make the host wait for the GPU, so the sum of the losses
# stays on the device until the epoch's end. The *test set* has 360 other images. The
# *accuracy* is the fraction of them that the model recognizes.


# %%
def train_epoch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
) -> float:
    """Train for one epoch. Returns the mean loss over its images."""
    device = next(model.parameters()).device
    model.train()
    total = torch.zeros((), dtype=torch.float64, device=device)
    images_seen = 0

    for images, labels in metrics.progress(loader, launch.World()):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)

        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

        total += loss.detach() * len(labels)
        images_seen += len(labels)
    return total.item() / images_seen


@torch.no_grad()
def evaluate(model: torch.nn.Module, test: TensorDataset) -> float:
    """The accuracy on the whole test set."""
    device = next(model.parameters()).device
    model.eval()
    hits = 0
    for images, labels in DataLoader(test, batch_size=256):
        predictions = model(images.to(device)).argmax(1).cpu()
        hits += (predictions == labels).sum().item()
    return hits / len(test)


# %% [markdown]
# All together. The *seed* sets the random numbers: the first weights, and the order of the
# images. So a second run, or a run on four GPUs, can be compared with this one.


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    world = launch.single_process_world("PT_CNN_SingleGPU")
    device = devices.pick(world, exact=args.prove)
    pin = device.type == "cuda"
    batch_size = args.batch_size or 64
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    print(devices.describe(world, device), end="\n\n")

    def new_model() -> torch.nn.Module:
        torch.manual_seed(args.seed)
        return CNN(tuple(train[0][0].shape), data.num_classes(train, test)).to(device)

    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    history = []
    print(metrics.header(), flush=True)
    for epoch in range(args.epochs):
        began = time.perf_counter()
        loader = loader_of(train, batch_size, args.seed + epoch, args.workers, pin)
        loss = train_epoch(model, optimizer, loader)
        images_per_s = len(train) / (time.perf_counter() - began)
        metrics.check_loss(loss, epoch, world)
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": evaluate(model, test),
            "images_per_s": images_per_s,
        }
        print(metrics.row(row), flush=True)
        history.append(row)

    with files.atomic(args.out / "model.pt") as temporary:
        torch.save(model.state_dict(), temporary)

    verdict = None
    if args.prove:
        claim = "a DataLoader's run equals the plain loop"
        verdict = proof.compare_with_serial(
            claim, model, new_model(), train, args, batch_size=batch_size
        )

    if args.profile:
        # Profiling goes on training the model: save it and compare it before.
        loader = loader_of(train, batch_size, args.seed, args.workers, pin)
        print(profiled(model, optimizer, loader, args.out / "trace.json"))
    metrics.report(args.out, world, device, history, verdict, batch_size=batch_size)


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# This run is the baseline for all lessons. Each lesson ends with a *proof*: it compares the
# weights with those of a *serial* run, a plain loop in one process. Here that loop has no
# DataLoader. (In the output's first line, gloo, rank and node are words of later lessons.)

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PT_CNN_SingleGPU.py --prove --out results/01

# %% [markdown]
# ## Would a second GPU help?
# 1. Measure the parts of a step, with `synchronize`, warm-up and repeats. The *data* of
#    `phases` is the time for which the step waits for its batch, also with workers. A simpler
#    test: train with one batch again and again, as the first cell does. If that is much faster
#    than with the loader, the GPU waits for data.
# 2. If the GPU waits for data, use workers. In the example, four workers shorten a step from
#    188 to 60 ms, and a second GPU without workers shortens it to 158 ms (on paper).
# 3. If a step is so short that its fixed costs dominate, use a larger batch.
# 4. If the GPU computes nearly all the time, Amdahl's law says how many times as fast two GPUs
#    are at most. The next lessons show how fast they really are.

# %% tags=["active-ipynb"]
# print(metrics.route_row("01 one GPU", "results/01"))  # for the table of all routes

# %% [markdown]
# ## To go further: clocks on a GPU
# While the host waits in `synchronize`, it launches nothing. For a CUDA *event* it does not
# wait: it puts the event into the queue, and the GPU notes the time when it comes to it. The
# program [gpu_clocks.py](../lessons/01-one-gpu/gpu_clocks.py) is for a real GPU. It measures
# ten steps in three ways: without waiting, with `synchronize` at the end, and with an event
# before and after them. `multigpu virtual` runs it here on a simulated V100, and the program
# reads the simulated clock. Which of the three times are wrong with a batch of 4,096 images,
# and which with a batch of 64?

# %% tags=["active-ipynb"]
# options = "--gpus 1 --clock simulated --shapes-only"
# program = "../lessons/01-one-gpu/gpu_clocks.py"
# table = "grep -v -e '^not as' -e '^- '"  # without the report's notes, which are long
# for batch in (4096, 64):
#     !CUDA_VISIBLE_DEVICES=0 multigpu virtual {options} {program} {batch} 2>&1 | {table}

# %% [markdown]
# With 4,096 images the clock without waiting is wrong: the host has launched a step long
# before the GPU has computed it. With 64 images all three are nearly equal, because the GPU
# waits for the host: it computes for about a quarter of the time.
#
# On a machine with a GPU, look at two numbers of `nvidia-smi`; the report's table has numbers
# like them. `GPU-Util` is the fraction of the time in which a kernel runs (here *computes*).
# If it is low, find out what the GPU waits for, before you ask for a second one. A high one
# does not say that the kernels use the whole GPU. `Memory-Usage` is what the tensors need
# (here *peak memory*), what PyTorch keeps for later, and CUDA's own memory.
#
# ## To go further: how far do workers read ahead?
# A worker reads up to `prefetch_factor` batches (2, if you do not say it) before they are
# needed. These batches are in the host's memory. How many does a loader read, if the training
# has taken only the first one? The cell counts them.

# %% tags=["active-ipynb"]
# for workers, ahead in ((1, 2), (4, 2), (4, 8)):
#     count = batches_read(workers, ahead)
#     print(f"{pluralize(workers, 'worker')}, prefetch_factor={ahead}: {count} batches read")

# %% [markdown]
# The first one, and `workers × prefetch_factor` more. A larger factor helps if single batches
# take much longer to read than others. It does not make reading faster on average.

# %% [markdown] tags=["footer"]
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/01-one-gpu/README.md) ·
# [02 DataParallel →](PT_CNN_DataParallel.ipynb)
