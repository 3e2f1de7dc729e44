# %% [markdown]
# # 03 · Model parallelism on two GPUs: naive, then pipelined
# **The question.** The model does not fit on one GPU. What does it cost to use two? **Predict first.** (1) What takes memory
# in training, and how much of each? (2) The model's first half is on one GPU, its second half on another: which share of
# the time is each of them busy? (3) The batch is cut into 4 pieces, so that both can work at once: which share of the time
# is still lost? (4) Are 32 pieces better than 4?

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
        "PT_CNN_ModelParallel", "Train a CNN whose halves are on two GPUs, by one process."
    )
    parser.add_argument(
        "--pieces",
        type=flags.positive,
        default=4,
        help="micro-batches a batch; 1: naive (default: 4)",
    )
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · One step, in pieces
# With one piece it is lesson 01's step. More of them are called **micro-batches**; their outputs make one loss.


# %%
def step(
    model: nn.Module, optimizer, images: torch.Tensor, labels: torch.Tensor, pieces: int = 1
) -> torch.Tensor:
    """One step of the optimizer. Returns the mean loss, on the labels' device."""
    optimizer.zero_grad()
    outputs = [model(piece) for piece in images.chunk(pieces)]
    loss = F.cross_entropy(torch.cat(outputs), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


# %% [markdown]
# ## Does it fit?
# Prediction (1), for a wider `CNN` (`multigpu/models.py`): images of 28×28, 320 units in `fc1`. Weights, gradients and
# momentum are three of a size. The peak comes where backward reaches conv1: its output, 16 × 28 × 28 numbers an image, is
# there three times, as tanh's output and as the gradients after and before tanh.

# %% tags=["active-ipynb"]
# import difflib
# import inspect
# from multigpu import plots, vgpu
# MiB, WIDE = 2**20, {"image_shape": (1, 28, 28), "hidden": 320}
#
#
# def two_steps(model, first, last, batch):
#     optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
#     for number in (1, 2):
#         print(f"step {number}", end=", ")
#         step(model, optimizer, torch.rand(batch, 1, 28, 28).to(first), torch.zeros(batch, dtype=torch.long).to(last))
#
#
# weights = sum(p.numel() for p in CNN(**WIDE).parameters())
# predicted = {batch: (3 * weights + batch * (3 * 16 + 1) * 28 * 28) * 4 / MiB for batch in (64, 320)}
# for batch in predicted:
#     with vgpu.running(1) as (one,):
#         two_steps(CNN(**WIDE).to(one), one, one, batch)
#         print(f"batch {batch}: {predicted[batch]:.1f} MiB predicted, {torch.vgpu.max_memory_allocated(one) / MiB:.1f} needed")

# %% tags=["active-ipynb"]
# with vgpu.running(1, memory="64MiB") as (one,):
#     try:
#         two_steps(CNN(**WIDE).to(one), one, one, 320)
#     except torch.OutOfMemoryError as error:
#         print(f"{vgpu.timeline().events[-1].phase}:", error)

# %% [markdown]
# The first step went well: the momentum was not there yet. Jobs die like that, some minutes after they seemed to work.
#
# ## Step 2 · Split it
# Two layers to each GPU; the activations travel between them.


# %%
class Halves(CNN):
    def __init__(self, first: torch.device, second: torch.device, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.first, self.second = first, second
        self.conv1.to(first), self.conv2.to(first)
        self.fc1.to(second), self.fc2.to(second)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.conv1(images))
        x = torch.tanh(self.conv2(x)).to(self.second)
        x = torch.tanh(self.fc1(x.flatten(1)))
        return self.fc2(x)


# %% tags=["active-ipynb"]
# before, after = (inspect.getsource(kind.forward).splitlines() for kind in (CNN, Halves))
# print(*difflib.unified_diff(before, after, "CNN", "Halves", n=0, lineterm=""), sep="\n")

# %% [markdown]
# `.to()` is part of the graph: backward sends the gradient the other way. Forget it once, and read the error:

# %% tags=["active-ipynb"]
# class Forgotten(Halves):
#     forward = CNN.forward
#
#
# with vgpu.running(2, memory="64MiB") as (first, second):
#     two_steps(Halves(first, second, **WIDE), first, second, 320)
#     print(", ".join(f"{place}: {torch.vgpu.max_memory_allocated(place) / MiB:.1f} MiB" for place in (first, second)))
#     try:
#         two_steps(Forgotten(first, second, **WIDE), first, second, 8)
#     except RuntimeError as error:
#         print(error)

# %% [markdown]
# ## What does it cost?
# Prediction (2). The width was chosen so that both halves take equally long. Shapes alone are enough for the clock.

# %% tags=["active-ipynb"]
# def simulate(pieces, batch, split=True, **machine):
#     """The simulated seconds of one step, and its timeline. `machine` may have a gpu and a link for vgpu.start."""
#     with vgpu.running(2, compute=False, **machine) as (first, second):
#         model = Halves(first, second, **WIDE) if split else CNN(**WIDE).to(first)
#         optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
#         images = torch.empty(batch, 1, 28, 28, device=first)
#         labels = torch.empty(batch, dtype=torch.long, device=second if split else first)
#         for _ in range(2):  # the first step warms up
#             began = vgpu.elapsed()
#             step(model, optimizer, images, labels, pieces)
#         return vgpu.elapsed() - began, vgpu.timeline(since=began)
#
#
# one, (naive, timeline) = simulate(1, 4096, split=False)[0], simulate(1, 4096)
# print(f"a step of 4,096 images, simulated: one GPU {1e3 * one:.2f} ms, two {1e3 * naive:.2f} ms")
# timeline.plot(title="Naive: one GPU works, the other waits for it")

# %% [markdown]
# Two GPUs, and slower than one. Now pieces, (3): GPU 0 begins the next one while GPU 1 has the last. A plain `.to()` runs
# in the order of both GPUs' other work, so both stop for each transfer; copies on streams of their own would not.

# %% tags=["active-ipynb"]
# simulate(4, 4096)[1].plot(title="Four micro-batches: both work, but not at the start and not at the end")

# %% [markdown]
# With p stages and m pieces, a stage works m of m + p − 1 turns. The share (p − 1)/(m + p − 1) is lost: the **bubble**; with
# two stages, 1/(m + 1). That counts turns of equal length, and nothing else. Is it so?

# %% tags=["active-ipynb"]
# counts = [1, 2, 4, 8, 16, 32]
# idle = {"1/(m + 1)": [1 / (m + 1) for m in counts]}
# for batch in (8192, 1024):
#     lanes = [simulate(m, batch)[1] for m in counts]
#     idle[f"simulated, batch {batch:,}"] = [(lane.idle(0) + lane.idle(1)) / 2 for lane in lanes]
# plots.lines(counts, idle, "micro-batches", "idle share", "The formula is what is lost at least", level=0)

# %% [markdown]
# Prediction (4): the time, with a fast link between the GPUs and with a slow one, beside one GPU of the same kind.

# %% tags=["active-ipynb"]
# times = {}
# for gpu, link in (("V100-16GB", "NVLink2"), ("V100-16GB", "PCIe3")):
#     machine, one = {"gpu": gpu, "link": link}, simulate(1, 4096, split=False, gpu=gpu)[0]
#     times[f"{gpu}, {link}"] = [one / simulate(m, 4096, **machine)[0] for m in counts]
#     print(f"{gpu}, {link}: " + ", ".join(f"{m}: {x:.2f}" for m, x in zip(counts, times[f"{gpu}, {link}"])))
# plots.lines(counts, times, "micro-batches, batch 4,096", "times as fast as one GPU, simulated", "There is a best number")

# %% [markdown]
# Launching an operation costs the same for a small piece, so many pieces cost. PyTorch's tutorial has a best number, too: 6
# pieces, 1.49 times as fast as one GPU. Over PCIe the activations take longer than the computing. There, a second GPU is for
# a model that does not fit, and for nothing else.
#
# ## Step 3 · Train: one process, two GPUs


# %%
def train_epoch(
    model: Halves, optimizer: torch.optim.Optimizer, loader: DataLoader, pieces: int
) -> float:
    """One epoch. Returns the mean loss over its images."""
    total = torch.zeros((), dtype=torch.float64, device=model.second)
    for images, labels in metrics.progress(loader, launch.World()):
        images, labels = images.to(model.first), labels.to(model.second)
        total += step(model, optimizer, images, labels, pieces) * len(labels)
    return total.item() / len(loader.dataset)


@torch.no_grad()
def accuracy(model: Halves, test: TensorDataset) -> float:
    return (
        (model(test.tensors[0].to(model.first)).argmax(1).cpu() == test.tensors[1])
        .double()
        .mean()
        .item()
    )


# %% [markdown]
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    launch.alone("PT_CNN_ModelParallel")
    places = multigpu.gpus(2)
    home = devices.home(places, exact=args.prove)  # where the serial run computes
    args.batch_size, piece = flags.split(args.batch_size, 1, args.pieces)
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    print(f"global batch {args.batch_size} = {args.pieces} (pieces) × {piece} (images)\n")

    def new_model(kind: type[CNN], *places: torch.device) -> CNN:
        torch.manual_seed(args.seed)
        return kind(*places, tuple(train[0][0].shape), data.classes(train, test))

    model = new_model(Halves, *places)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    history = []
    print(metrics.header(), flush=True)
    for epoch in range(args.epochs):
        began = time.perf_counter()
        order = RandomSampler(
            train, generator=torch.Generator().manual_seed(args.seed + epoch)
        )
        loss = train_epoch(
            model, optimizer, DataLoader(train, args.batch_size, sampler=order), args.pieces
        )
        speed = len(train) / (time.perf_counter() - began)
        metrics.finite(loss, epoch, launch.World())
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": accuracy(model, test),
            "images_per_s": speed,
        }
        print(metrics.row(row), flush=True)
        history.append(row)
    with files.atomic(args.out / "model.pt") as temporary:
        torch.save(
            {name: weight.cpu() for name, weight in model.state_dict().items()}, temporary
        )
    what = f"two halves on two GPUs, {args.pieces} pieces a batch, equals one process"
    verdict = (
        proof.against_serial(what, model, new_model(CNN).to(home), train, args)
        if args.prove
        else None
    )
    metrics.report(
        args.out,
        launch.World(),
        places[0],
        history,
        verdict,
        devices=2,
        batch_size=args.batch_size,
    )


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it (images/s is the speed of this CPU, which computes for both virtual GPUs)

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PT_CNN_ModelParallel.py --prove --out results/03

# %% tags=["active-ipynb"]
# print(metrics.line("03 model parallelism", "results/03"))  # the second part, a process a GPU: PT_CNN_Pipeline.ipynb
