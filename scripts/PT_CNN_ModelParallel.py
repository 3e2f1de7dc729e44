# %% [markdown]
# # 03 · Model parallelism on two GPUs: naive, then pipelined
# **The question.** A training step does not fit on one GPU. What does it cost to use two?
#
# The memory and the times in this lesson are those of *virtual* GPUs: they meter each tensor
# and keep a simulated clock of two V100s. A training run needs memory for the weights, their
# gradients, the optimizer's state, and the *activations*: the outputs that backward needs.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import multigpu
from multigpu import data, devices, files, flags, launch, metrics, proof
from multigpu.models import CNN


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PT_CNN_ModelParallel",
        "Train a CNN whose halves are on two GPUs, by one process.",
    )
    parser.add_argument(
        "--micro-batches",
        type=flags.positive,
        default=4,
        help="forward passes that a batch is split into; 1: naive (default: 4)",
    )
    return parser.parse_args(arguments)


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# from functools import partial
#
# from multigpu import lesson, plots, vgpu
#
# lesson.setup("03-model-parallel")
# from experiments import FREE_LINK, sgd, shares, timed_step
#
# MIB = 2**20
# WIDE = {"image_shape": (1, 28, 28), "hidden": 320}

# %% [markdown]
# ## Step 1 · One step, in micro-batches
# A [*micro-batch*](../lessons/README.md#micro-batch) is a part of the batch. The function
# computes forward for one after the other, and joins their outputs for one loss. With one
# micro-batch it is lesson 01's step. Later, several of them let two GPUs work at the same
# time.


# %%
def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    micro_batches: int = 1,
) -> torch.Tensor:
    """One step of the optimizer. Returns the mean loss, on the labels' device."""
    optimizer.zero_grad()
    outputs = [model(micro_batch) for micro_batch in images.chunk(micro_batches)]
    loss = F.cross_entropy(torch.cat(outputs), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


# %% [markdown]
# ## Does it fit?
# The model has four layers and 2 million weights. For one image, conv1 gives 16 channels of
# 28×28, conv2 32 channels of 14×14, fc1 320 numbers and fc2 10. A batch has 320
# images of 28×28. Predict first: write your answers, then run the cell.

# %% tags=["active-ipynb", "guess"]
# guess_memory = 24  # MiB that training needs at its peak, with SGD and momentum
# guess_adam = 24  # the same, with Adam

# %% [markdown]
# On paper: weights, gradients and momentum have the same size. Adam keeps two numbers per
# weight instead of one. Backward goes from the last layer to the first, so conv1 and its tanh
# come last, and the peak is there. Conv1's output has 16 × 28 × 28 numbers per image, and
# three tensors of that size are in memory: tanh's output, which forward has kept, the
# gradient of tanh's output, and then the gradient of tanh's input.

# %% tags=["active-ipynb"]
# lesson.need(guess_memory, guess_adam)
#
#
# def two_steps(model, optimizer, first, last, batch, show=False, step=step):
#     for number in (1, 2):
#         if show:
#             print(f"step {number}", end=", ")
#         images = torch.rand(batch, 1, 28, 28).to(first)
#         labels = torch.zeros(batch, dtype=torch.long).to(last)
#         step(model, optimizer, images, labels)
#
#
# needed = {}
# weights = sum(weight.numel() for weight in CNN(**WIDE).parameters())
# for name, optimizer_of, copies in (("SGD", sgd, 3), ("Adam", torch.optim.Adam, 4)):
#     for batch in (64, 320):
#         numbers = copies * weights + batch * (3 * 16 + 1) * 28 * 28  # the 1: the images
#         predicted = 4 * numbers / MIB  # a number has 4 bytes
#         with vgpu.running(1) as (one,):
#             model = CNN(**WIDE).to(one)
#             two_steps(model, optimizer_of(model.parameters()), one, one, batch)
#             peak = torch.vgpu.max_memory_allocated(one) / MIB
#         print(f"{name}, batch {batch}: {predicted:.1f} MiB on paper, {peak:.1f} metered")
#         needed[name] = peak
#
# lesson.compare("peak with SGD", guess_memory, needed["SGD"], unit="MiB", digits=0)
# lesson.compare("peak with Adam", guess_adam, needed["Adam"], unit="MiB", digits=0)

# %% [markdown]
# That is the tensors, and the meter counts nothing else. A real GPU needs more: the CUDA
# context, the workspaces of cuDNN and cuBLAS, and what the caching allocator has reserved but
# does not use. `nvidia-smi` shows all of it, `torch.cuda.max_memory_allocated` the tensors.
#
# What happens on a GPU with 64 MiB? The cell tries it with SGD.

# %% tags=["active-ipynb"]
# with vgpu.running(1, memory="64MiB") as (one,):
#     try:
#         model = CNN(**WIDE).to(one)
#         two_steps(model, sgd(model.parameters()), one, one, 320, show=True)
#     except torch.OutOfMemoryError as error:
#         print(f"{vgpu.timeline().events[-1].phase}:")
#         print(*str(error).split(". "), sep=".\n")

# %% [markdown]
# The first step succeeded, because the momentum did not exist yet. Jobs on a cluster fail in
# the same way, after they seemed to work.
#
# ## The cheapest cure needs no second GPU
# It is *gradient accumulation*: forward and backward for one micro-batch after the other. The
# gradients add up, and the optimizer steps once. `step`, above, does not do that: it keeps the
# activations of all its micro-batches until its one backward. What does each of the two need
# with 5 micro-batches of 64 images? Write your answer, then run the cell.

# %% tags=["active-ipynb", "guess"]
# guess_accumulated = 70  # MiB at the peak with accumulation, SGD, 5 × 64 images

# %% tags=["active-ipynb"]
# lesson.need(guess_accumulated)
#
#
# def accumulated(model, optimizer, images, labels, micro_batches=5):
#     optimizer.zero_grad()
#     micro_batches = zip(images.chunk(micro_batches), labels.chunk(micro_batches))
#     for some_images, some_labels in micro_batches:
#         loss = F.cross_entropy(model(some_images), some_labels, reduction="sum")
#         (loss / len(labels)).backward()  # adds to the gradients, frees the activations
#     optimizer.step()
#
#
# models = []
# for name, way in (("one backward", partial(step, micro_batches=5)), ("five", accumulated)):
#     torch.manual_seed(0)
#     with vgpu.running(1) as (one,):
#         model = CNN(**WIDE).to(one)
#         two_steps(model, sgd(model.parameters()), one, one, 320, step=way)
#         peak = torch.vgpu.max_memory_allocated(one) / MIB
#         print(f"5 micro-batches, {name}: {peak:.1f} MiB metered")
#         models.append(model.cpu())
# print(f"weights equal within 1e-6: {proof.difference(*models) < 1e-6}")
# lesson.compare("peak with accumulation", guess_accumulated, peak, unit="MiB", digits=0)

# %% [markdown]
# It needs little more than half of the 70 MiB, so it fits on the GPU with 64 MiB, and trains
# the same weights. Try it first. It is no help if the activations of one image do not fit:
# then *activation checkpointing* (`torch.utils.checkpoint`) keeps fewer of them, and computes
# the others again in backward. (This course does not try it.) And it is no help if the weights
# do not fit: then divide the model, as in this lesson, or each weight, by
# [*FSDP*](../lessons/README.md#fsdp), which lesson 06 compares with it. The rest of this
# lesson divides its small model, which would not need it, to see what that costs.
#
# ## Step 2 · Split it
# Each GPU holds two layers; the activations are sent from the first to the second.


# %%
class Halves(CNN):
    """The CNN with its convolutions on the GPU `first` and its linear layers on `second`."""

    def __init__(self, first: torch.device, second: torch.device, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.first = first
        self.second = second
        self.conv1.to(first)
        self.conv2.to(first)
        self.fc1.to(second)
        self.fc2.to(second)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.conv1(images))
        x = torch.tanh(self.conv2(x)).to(self.second)  # the one line that differs
        x = torch.tanh(self.fc1(x.flatten(1)))
        return self.fc2(x)


# %% [markdown]
# In `forward` one line differs from the CNN's. `__init__` moves each layer to its GPU, and the
# training loop moves the images to the first GPU and the labels to the second. `.to()` is part
# of the graph: backward sends the gradient in the other direction. Do the 320 images fit now,
# on two GPUs with 64 MiB each?

# %% tags=["active-ipynb"]
# with vgpu.running(2, memory="64MiB") as (first, second):
#     model = Halves(first, second, **WIDE)
#     two_steps(model, sgd(model.parameters()), first, second, 320)
#     peaks = {gpu: torch.vgpu.max_memory_allocated(gpu) / MIB for gpu in (first, second)}
#     text = ", ".join(f"{gpu}: {peak:.1f} MiB" for gpu, peak in peaks.items())
#     print(f"both fit\n{text}, together {sum(peaks.values()):.1f} MiB")

# %% [markdown]
# It fits. Together the two need 86 MiB, more than the 70 of one GPU, because they have their
# peaks at different moments. GPU 1's comes in backward of fc1: it then holds the activations
# that it received, and their gradient, 7.7 MiB each. On one GPU these are free again when
# backward reaches conv1.
#
# ## What does it cost?
# For the times: 4,096 images, two V100s with [NVLink](../lessons/README.md#nvlink). The
# simulated clock needs only the shapes. Write your answers, then run the cell. In the
# timeline, hatched (bubble) means that a GPU waits for the other one.

# %% tags=["active-ipynb", "guess"]
# guess_busy = 50  # % of a step in which GPU 0 computes, with one micro-batch
# guess_waiting = 20  # % in which a GPU waits for the other one, with 4 micro-batches

# %% tags=["active-ipynb"]
# lesson.need(guess_busy)
#
#
# def simulate(micro_batches, batch=4096, split=True, **machine):
#     """The simulated seconds of a step, and its timeline. `machine`: a GPU and a link."""
#     with vgpu.running(2, compute=False, **machine) as (first, second):
#         if split:
#             model = Halves(first, second, **WIDE)
#             vgpu.number_micro_batches(model, model, micro_batches)
#             return timed_step(step, model, first, second, batch, micro_batches)
#         model = CNN(**WIDE).to(first)
#         return timed_step(step, model, first, first, batch, micro_batches)
#
#
# one, _ = simulate(1, split=False)
# naive, timeline = simulate(1)
# print("a step of 4,096 images, simulated:", end=" ")
# print(f"one GPU {1e3 * one:.2f} ms, two {1e3 * naive:.2f} ms")
# halves = [1e3 * naive * timeline.busy(gpu) for gpu in (0, 1)]
# print(f"GPU 0 computes for {halves[0]:.2f} ms, GPU 1 for {halves[1]:.2f} ms")
# lesson.compare("GPU 0 computes", guess_busy, 100 * timeline.busy(0), unit="%", digits=0)
# busy = timeline.busy(0) + timeline.busy(1)
# timeline.plot(title=f"Naive: on average a GPU computes {busy / 2:.0%} of the time")

# %% [markdown]
# Two GPUs are slower than one: only one of them computes at a time, and the transfers are
# added. With micro-batches, GPU 0 starts the next one while GPU 1 computes the previous one.
# The numbers in the boxes are the micro-batches.

# %% tags=["active-ipynb"]
# lesson.need(guess_waiting)
# _, timeline = simulate(4)
# waiting = [timeline.breakdown(gpu)["bubble"] for gpu in (0, 1)]
# mean = sum(waiting) / 2
# lesson.compare("a GPU waits for the other", guess_waiting, 100 * mean, unit="%", digits=0)
# timeline.plot(title=f"Four micro-batches: a GPU waits {mean:.0%} of the time for the other")

# %% [markdown]
# The hatched part is the **bubble**: a [*stage*](../lessons/README.md#stage), the layers on
# one GPU, waits for the other one. Let a slot be the time that a stage takes for one
# micro-batch. With p stages and m micro-batches, the last stage starts p − 1 slots after the
# first one. So forward takes m + p − 1 slots, as does backward, and a stage works in m of
# them. The bubble is this fraction of the time:
#
# `(p − 1) / (m + p − 1)`
#
# With two stages it is `1 / (m + 1)`, here 20%. The formula assumes equal slots, and that
# nothing else takes time. Neither is true here, as the picture shows: GPU 0 computes for
# longer than GPU 1, and a plain `.to()` stops both GPUs during a transfer.
#
# ## How many micro-batches?
# How many are best, on V100s with NVLink? Write your answers, then run the cell. It compares
# two GPUs with one GPU of the same kind, also for V100s with PCIe and for H100s.

# %% tags=["active-ipynb", "guess"]
# guess_best = 32  # the best number of micro-batches, of 1, 2, 4, 8, 16 and 32
# guess_speed = 1.8  # times as fast as one GPU, with that number

# %% tags=["active-ipynb"]
# lesson.need(guess_best, guess_speed)
# counts = [1, 2, 4, 8, 16, 32]
# speedups = {}
# for gpu, link in (
#     ("V100-16GB", "NVLink2"),
#     ("V100-16GB", "PCIe3"),
#     ("H100-80GB", "NVLink4"),
# ):
#     one, _ = simulate(1, split=False, gpu=gpu)
#     steps = [simulate(m, gpu=gpu, link=link) for m in counts]
#     speedup = [one / seconds for seconds, _ in steps]
#     print(f"{gpu}, {link}: " + ", ".join(f"{m}: {x:.2f}" for m, x in zip(counts, speedup)))
#     launches = {m: shares(timeline)["launch"] for m, (_, timeline) in zip(counts, steps)}
#     text = f"{launches[8]:.0%} of the time with 8, {launches[32]:.0%} with 32"
#     print(f"    launches take {text}")
#     speedups[f"{gpu}, {link}"] = speedup
#
# fastest = max(speedups["V100-16GB, NVLink2"])
# best = counts[speedups["V100-16GB, NVLink2"].index(fastest)]
# lesson.compare("best number of micro-batches", guess_best, best, digits=0)
# lesson.compare("times as fast as one GPU", guess_speed, fastest, digits=2)
# title = f"V100s with NVLink: {best} micro-batches are best, {fastest:.2f} times as fast"
# unit = "times as fast as one GPU, simulated"
# plots.lines(counts, speedups, "micro-batches, batch 4,096", unit, title)

# %% [markdown]
# By the formula, more are always better. But each micro-batch costs time, too. The host
# launches all operations again for it, and with 32 a GPU waits for launches for 30% of the
# time. An H100 computes faster, and waits for launches for 31% already with 8. Over PCIe, two
# GPUs are about half as fast as one, because the transfers of the activations take longer than
# the computing. There, use a second GPU only if the step does not fit on one, also with
# accumulation. (A real pair of GPUs has a best number, too: see this lesson's page.)
#
# ## Step 3 · Train: one process, two GPUs
# The images go to the first GPU, the labels to the last one, where the loss is computed. The
# folded cells put all together.


# %%
def train_epoch(
    model: Halves,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    micro_batches: int,
) -> float:
    """Train for one epoch. Returns the mean loss over its images."""
    total = torch.zeros((), dtype=torch.float64, device=model.second)
    for images, labels in metrics.progress(loader, launch.World()):
        images = images.to(model.first)
        labels = labels.to(model.second)
        total += step(model, optimizer, images, labels, micro_batches) * len(labels)
    return total.item() / len(loader.dataset)


@torch.no_grad()
def accuracy(model: Halves, test: TensorDataset) -> float:
    """The accuracy on the whole test set."""
    images, labels = test.tensors
    predictions = model(images.to(model.first)).argmax(1).cpu()
    return (predictions == labels).double().mean().item()


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    launch.single_process_world("PT_CNN_ModelParallel")
    world = launch.World()
    gpus = multigpu.gpus(2)
    serial_device = devices.serial_device(gpus, exact=args.prove)
    batch = flags.split_batch(args.batch_size, 1, args.micro_batches)
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    split = f"{batch.micro_batches} (micro-batches) × {batch.per_micro_batch} (images)"
    print(f"global batch {batch.global_size} = {split}\n")

    def new_model(kind: type[CNN], *gpus: torch.device) -> CNN:
        torch.manual_seed(args.seed)
        return kind(*gpus, tuple(train[0][0].shape), data.num_classes(train, test))

    model = new_model(Halves, *gpus)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    history = []
    print(metrics.header(), flush=True)
    for epoch in range(args.epochs):
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(args.seed + epoch)
        order = RandomSampler(train, generator=generator)
        loader = DataLoader(train, batch.global_size, sampler=order)
        loss = train_epoch(model, optimizer, loader, batch.micro_batches)
        images_per_s = len(train) / (time.perf_counter() - began)
        metrics.check_loss(loss, epoch, world)
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": accuracy(model, test),
            "images_per_s": images_per_s,
        }
        print(metrics.row(row), flush=True)
        history.append(row)

    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    with files.atomic(args.out / "model.pt") as temporary:
        torch.save(weights, temporary)

    verdict = None
    if args.prove:
        claim = "two halves on two GPUs equal one process"
        fresh = new_model(CNN).to(serial_device)
        verdict = proof.compare_with_serial(
            claim, model, fresh, train, args, batch_size=batch.global_size
        )
    metrics.report(
        args.out,
        world,
        gpus[0],
        history,
        verdict,
        devices=2,
        batch_size=batch.global_size,
    )


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# With virtual GPUs, images/s is the speed of this CPU, which computes for both of them.

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PT_CNN_ModelParallel.py --prove --out results/03

# %% [markdown]
# **What does it cost to use two GPUs?** Memory: 86 MiB together instead of 70. Time: without
# micro-batches a step takes 12% longer than on one GPU. With 8 micro-batches and NVLink, two
# GPUs are 1.23 times as fast as one, and over PCIe they take about twice as long. The second
# part, with a process for each GPU, is in [PT_CNN_Pipeline](PT_CNN_Pipeline.ipynb).

# %% tags=["active-ipynb"]
# print(metrics.route_row("03 model parallelism", "results/03"))  # for the table of all routes

# %% [markdown]
# ## To go further: where does the time go?
# With 4 micro-batches the formula gives a bubble of 20%. How large is it with a fast link, a
# slow one, and one that is free: it transfers in no time?

# %% tags=["active-ipynb"]
# print("4 micro-batches, mean of both GPUs; the formula gives a bubble of 20%")
# for link in ("NVLink2", FREE_LINK, "PCIe3"):
#     seconds, timeline = simulate(4, link=link)
#     parts = shares(timeline)
#     idle = 1 - parts.pop("compute")
#     bubble = 1e3 * seconds * parts["bubble"]
#     text = ", ".join(f"{part} {share:.0%}" for part, share in parts.items())
#     name = link if isinstance(link, str) else link.name
#     print(f"{name}: idle {idle:.0%} ({text}); the bubble takes {bubble:.2f} ms")

# %% [markdown]
# The formula is for a free link and equal slots. The link is free in the second line, but the
# slots are not equal: GPU 1 waits for GPU 0 in each slot, and the bubble is larger than 20%.
# With each link the bubble takes the same time. With a slow link the step is longer, so the
# bubble is a smaller fraction of it.
#
# And with other numbers of micro-batches? The formula's bubble goes to zero. Does this one?

# %% tags=["active-ipynb"]
# sweep = [simulate(m) for m in counts]
# free = [simulate(m, link=FREE_LINK) for m in counts]
# curves = {
#     "formula: 1/(m + 1)": [1 / (m + 1) for m in counts],
#     "bubble, free link": [shares(timeline)["bubble"] for _, timeline in free],
#     "idle, NVLink: bubble, transfers, launches": [
#         1 - shares(timeline)["compute"] for _, timeline in sweep
#     ],
# }
# for name, curve in curves.items():
#     print(f"{name}:", ", ".join(f"{m}: {share:.0%}" for m, share in zip(counts, curve)))
# for m, (seconds, timeline) in zip(counts, free):
#     if m in (8, 16):
#         waits = [timeline.breakdown(gpu)["bubble"] for gpu in (0, 1)]
#         launches = shares(timeline)["launch"]
#         text = f"GPU 0 waits {waits[0]:.0%} of the time for the other, GPU 1 {waits[1]:.0%}"
#         print(f"{m}, free link: {1e3 * seconds:.2f} ms; {text}; launches {launches:.0%}")
# for m, (seconds, timeline) in zip(counts, sweep):
#     if m in (1, 32):
#         computing = 1e3 * seconds * (timeline.busy(0) + timeline.busy(1))
#         print(f"with {m} (NVLink), the GPUs compute for {computing:.1f} ms in all")
# title = "With many micro-batches the bubble stops shrinking"
# plots.lines(counts, curves, "micro-batches", "share, simulated", title, level=None)

# %% [markdown]
# No, because the slower stage sets the pace. GPU 0 computes for about 6 ms per step, GPU 1 for
# about 4. So with 8 micro-batches and a free link GPU 1 still waits for more than a quarter of
# the time. Cut a model so that its stages take the same time. With 16, launches begin to
# count, and the step is longer than with 8. With 32 they set the pace on both GPUs: one also
# waits because the other one's work was launched late. The GPUs also compute for longer,
# because for each micro-batch backward reads all weights and adds to all gradients once more.

# %% [markdown] tags=["footer"]
# [← 02 DataParallel](PT_CNN_DataParallel.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/03-model-parallel/README.md) ·
# [03 Pipeline →](PT_CNN_Pipeline.ipynb)
