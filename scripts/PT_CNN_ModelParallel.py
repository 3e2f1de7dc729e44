# %% [markdown]
# # 03 · Model parallelism on two GPUs: naive, then pipelined
# **The question.** The model does not fit on one GPU. What does it cost to use two?
#
# **Predict first.** (1) What takes memory in training, and how much of each? (2) The model's
# first half is on one GPU, its second half on another. For which share of the time is each of
# them busy? (3) The batch is cut into 4 micro-batches, so that both can work at the same time.
# Which share of the time is still lost? (4) Are 32 micro-batches better than 4?

# %%
import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import multigpu
from multigpu import data, devices, files, flags, launch, metrics, proof
from multigpu.models import CNN

# %% [markdown]
# ## Step 0 · The flags


# %%
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


# %% [markdown]
# ## Step 1 · One step, in micro-batches
# With one micro-batch it is lesson 01's step. The outputs of several ones make one loss.


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
# Prediction (1), for a wider `CNN` (`multigpu/models.py`): images of 28×28, 320 units in
# `fc1`. Weights, gradients and momentum have the same size. The peak comes where backward
# reaches conv1. Its output has 16 × 28 × 28 numbers per image, and three tensors of that size
# are in memory: tanh's output, and the gradients after and before tanh.

# %% tags=["active-ipynb"]
# import difflib
# import inspect
# import sys
#
# from multigpu import plots, vgpu
#
# MIB = 2**20
# WIDE = {"image_shape": (1, 28, 28), "hidden": 320}
#
#
# def two_steps(model, first, last, batch):
#     optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
#     for number in (1, 2):
#         print(f"step {number}", end=", ")
#         images = torch.rand(batch, 1, 28, 28).to(first)
#         labels = torch.zeros(batch, dtype=torch.long).to(last)
#         step(model, optimizer, images, labels)
#
#
# weights = sum(weight.numel() for weight in CNN(**WIDE).parameters())
# for batch in (64, 320):
#     numbers = 3 * weights + batch * (3 * 16 + 1) * 28 * 28  # the 1: the images themselves
#     predicted = 4 * numbers / MIB  # a number has 4 bytes
#     with vgpu.running(1) as (one,):
#         two_steps(CNN(**WIDE).to(one), one, one, batch)
#         needed = torch.vgpu.max_memory_allocated(one) / MIB
#         print(f"batch {batch}: {predicted:.1f} MiB predicted, {needed:.1f} needed")

# %% tags=["active-ipynb"]
# with vgpu.running(1, memory="64MiB") as (one,):
#     try:
#         two_steps(CNN(**WIDE).to(one), one, one, 320)
#     except torch.OutOfMemoryError as error:
#         print(f"{vgpu.timeline().events[-1].phase}:", error)

# %% [markdown]
# The first step succeeded, because the momentum did not exist yet. Jobs on a cluster fail in
# the same way, after they seemed to work.
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
        x = torch.tanh(self.conv2(x)).to(self.second)
        x = torch.tanh(self.fc1(x.flatten(1)))
        return self.fc2(x)


# %% tags=["active-ipynb"]
# before = inspect.getsource(CNN.forward).splitlines()
# after = inspect.getsource(Halves.forward).splitlines()
# print(*difflib.unified_diff(before, after, "CNN", "Halves", n=0, lineterm=""), sep="\n")

# %% [markdown]
# `.to()` is part of the graph: backward sends the gradient in the other direction. Leave it
# out once, and read the error:

# %% tags=["active-ipynb"]
# class Forgotten(Halves):
#     forward = CNN.forward
#
#
# with vgpu.running(2, memory="64MiB") as (first, second):
#     two_steps(Halves(first, second, **WIDE), first, second, 320)
#     peaks = {gpu: torch.vgpu.max_memory_allocated(gpu) / MIB for gpu in (first, second)}
#     print(", ".join(f"{gpu}: {peak:.1f} MiB" for gpu, peak in peaks.items()))
#     try:
#         two_steps(Forgotten(first, second, **WIDE), first, second, 8)
#     except RuntimeError as error:
#         print(error)

# %% [markdown]
# ## What does it cost?
# Prediction (2). The width was chosen so that both halves take equally long. The simulated
# clock needs only the shapes.

# %% tags=["active-ipynb"]
# sys.path.insert(0, "../lessons/03-model-parallel")
# from experiments import timed_step
#
#
# def simulate(micro_batches, batch, split=True, **machine):
#     """The simulated seconds of a step, and its timeline. `machine`: a GPU and a link."""
#     with vgpu.running(2, compute=False, **machine) as (first, second):
#         if split:
#             model = Halves(first, second, **WIDE)
#             return timed_step(step, model, first, second, batch, micro_batches)
#         model = CNN(**WIDE).to(first)
#         return timed_step(step, model, first, first, batch, micro_batches)
#
#
# one, _ = simulate(1, 4096, split=False)
# naive, timeline = simulate(1, 4096)
# print("a step of 4,096 images, simulated:", end=" ")
# print(f"one GPU {1e3 * one:.2f} ms, two {1e3 * naive:.2f} ms")
# timeline.plot(title="Naive: one GPU works, the other waits for it")

# %% [markdown]
# Two GPUs, and slower than one. Prediction (3): with micro-batches, GPU 0 starts the next one
# while GPU 1 computes the last one. A plain `.to()` waits for the other work of both GPUs, so
# both stop for each transfer; copies on streams of their own would not.

# %% tags=["active-ipynb"]
# _, timeline = simulate(4, 4096)
# timeline.plot(title="Four micro-batches: both work, but not at the start and not at the end")

# %% [markdown]
# With p stages and m micro-batches, a stage works in m of m + p − 1 time slots. The share (p −
# 1)/(m + p − 1) is lost: the **bubble**; with two stages, 1/(m + 1). The formula assumes slots
# of equal length, and counts nothing else. Is it right?

# %% tags=["active-ipynb"]
# counts = [1, 2, 4, 8, 16, 32]
# idle = {"1/(m + 1)": [1 / (m + 1) for m in counts]}
# for batch in (8192, 1024):
#     timelines = [simulate(m, batch)[1] for m in counts]
#     means = [(timeline.idle(0) + timeline.idle(1)) / 2 for timeline in timelines]
#     idle[f"simulated, batch {batch:,}"] = means
#
# title = "At least the formula's share is lost"
# plots.lines(counts, idle, "micro-batches", "idle share", title, level=0)

# %% [markdown]
# Prediction (4): the speed with a fast and with a slow link between the GPUs, compared with
# one GPU of the same kind.

# %% tags=["active-ipynb"]
# speedups = {}
# for gpu, link in (("V100-16GB", "NVLink2"), ("V100-16GB", "PCIe3")):
#     one, _ = simulate(1, 4096, split=False, gpu=gpu)
#     speedup = [one / simulate(m, 4096, gpu=gpu, link=link)[0] for m in counts]
#     print(f"{gpu}, {link}: " + ", ".join(f"{m}: {x:.2f}" for m, x in zip(counts, speedup)))
#     speedups[f"{gpu}, {link}"] = speedup
#
# unit = "times as fast as one GPU, simulated"
# plots.lines(counts, speedups, "micro-batches, batch 4,096", unit, "There is a best number")

# %% [markdown]
# Launching an operation takes the same time for a small micro-batch, so more of them cost
# more. PyTorch's tutorial found a best number, too: 6 micro-batches, 1.49 times as fast as one
# GPU. Over PCIe the transfer of the activations takes longer than the computing. There, use a
# second GPU only if the model does not fit on one.
#
# ## Step 3 · Train: one process, two GPUs


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


# %% [markdown]
# ## All together


# %%
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


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# With virtual GPUs, images/s is the speed of this CPU, which computes for both of them.

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PT_CNN_ModelParallel.py --prove --out results/03

# %% [markdown]
# The second part, with a process for each GPU, is in PT_CNN_Pipeline.ipynb.

# %% tags=["active-ipynb"]
# print(metrics.route_row("03 model parallelism", "results/03"))  # for the table of all routes

# %% [markdown] tags=["footer"]
# [← 02 DataParallel](PT_CNN_DataParallel.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/03-model-parallel/README.md) ·
# [03 Pipeline →](PT_CNN_Pipeline.ipynb)
