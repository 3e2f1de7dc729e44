# %% [markdown]
# # 01 · One GPU first: baseline, data loading, where the time goes
# **The question.** Training is too slow. Would a second GPU help, and with what?
#
# **Predict first.** (1) A step reads its data, goes forward, goes backward, updates the weights: which of the four takes
# longest, and how many forwards is a backward? (2) Reading an image takes 2 ms, a batch has 64, and computing the step
# takes 60 ms: how much faster is a second GPU? (3) You time a step on a GPU and get a tenth of a millisecond: what is wrong?

# %%
import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import profile
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from multigpu import data, devices, files, flags, launch, metrics, proof
from multigpu.models import CNN


# %% [markdown]
# ## Step 0 · The flags
# The same ones in every lesson. Here `--batch-size` is what the one GPU takes in a step.
# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PT_CNN_SingleGPU", "Train a CNN on one GPU: what all other lessons are compared with."
    )
    parser.add_argument(
        "--workers", type=flags.count, default=0, help="processes that load data (default: 0)"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="tell where a step's time goes, and write a trace",
    )
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · Design the model
# Two convolutions, two linear layers, in `multigpu/models.py`: small enough for a laptop, and the same in every lesson.

# %% tags=["active-ipynb"]
# print(CNN())

# %% [markdown]
# ## Step 2 · Read in the data
# A `DataLoader` draws indices from a sampler, fetches the images, and stacks them into a batch. With `workers` it does so
# in processes of its own, ahead of the training. `pin_memory` puts batches where a GPU can fetch them by itself, while
# the host goes on; then `non_blocking=True` in `.to()` makes sense. The order follows from seed and epoch alone.


# %%
def loader_of(train: Dataset, args: argparse.Namespace, epoch: int, pin: bool) -> DataLoader:
    order = RandomSampler(train, generator=torch.Generator().manual_seed(args.seed + epoch))
    own = (
        torch.Generator()
    )  # a loader draws a number when it starts: not from the stream that the model draws from
    return DataLoader(
        train,
        args.batch_size,
        sampler=order,
        num_workers=args.workers,
        pin_memory=pin,
        generator=own,
    )


# %% [markdown]
# ## Step 3 · Train
# Forward, backward, update. `loss.item()` would make the host wait for the GPU in each step: the sum stays on the device.


# %%
def train_epoch(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> float:
    """One epoch. Returns the mean loss over its images."""
    device = next(model.parameters()).device
    model.train()
    total, images_seen = torch.zeros((), dtype=torch.float64, device=device), 0
    for images, labels in metrics.progress(loader, launch.World()):
        images, labels = (
            images.to(device, non_blocking=True),
            labels.to(device, non_blocking=True),
        )
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(labels)
        images_seen += len(labels)
    return total.item() / images_seen


# %% [markdown]
# ## Step 4 · Evaluate


# %%
@torch.no_grad()
def evaluate(model: torch.nn.Module, test: TensorDataset) -> float:
    """The accuracy on the whole test set."""
    device = next(model.parameters()).device
    model.eval()
    hits = [
        (model(x.to(device)).argmax(1).cpu() == y).sum()
        for x, y in DataLoader(test, batch_size=256)
    ]
    return sum(hits).item() / len(test)


# %% [markdown]
# ## Where a step's time goes
# A GPU works through a queue; the host puts operations into it and goes on at once. Whoever stops the clock without
# `synchronize` has timed the queueing. And the first steps are slow: memory is fetched, kernels are chosen. So: warm up,
# wait for the device at each mark, take the median.


# %%
def now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def phases(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable,
    warm_up: int = 3,
) -> dict:
    """The median seconds that a step spends on data, forward, backward and update."""
    device = next(model.parameters()).device
    model.train()
    batches, marks = iter(loader), []
    while True:
        mark = [now(device)]
        if (batch := next(batches, None)) is None:
            break
        images, labels = (part.to(device) for part in batch)
        mark.append(now(device))
        loss = F.cross_entropy(model(images), labels)
        mark.append(now(device))
        loss.backward()
        mark.append(now(device))
        optimizer.step()
        optimizer.zero_grad()
        mark.append(now(device))
        marks.append(mark)
    spent = (
        torch.tensor(marks[min(warm_up, len(marks) - 1) :], dtype=torch.float64)
        .diff(dim=1)
        .median(dim=0)
        .values
    )
    return dict(zip(("data", "forward", "backward", "update"), spent.tolist(), strict=True))


# %% tags=["active-ipynb"]
# from multigpu import plots
# (train, test), device = data.load(data.fetch(None)), devices.pick(launch.World())
# torch.set_num_threads(1)  # on a CPU, a second thread's core may be busy with something else, and all wait for it
# bars = {}
# for batch in (16, 64, 256):
#     model, args = CNN().to(device), parse(["--batch-size", str(batch)])
#     optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
#     spent = phases(model, optimizer, loader_of(train, args, 0, pin=False), warm_up=1)
#     bars[f"batch {batch}"] = {part: 1e6 * seconds / batch for part, seconds in spent.items()}
# plots.stacked(bars, "µs an image, measured on this machine", "The smaller the batch, the more an image costs")

# %% [markdown]
# **Backward is nearly two forwards**: it computes the gradient of each layer's weights and that of its input, but for the
# first layer's input. **Small batches are dear**: each operation has a price of its own, however little it works on, and
# more GPUs make the batch of each GPU smaller.
#
# torch.profiler looks inside: which operations take the time? Its trace opens in a browser.


# %%
def profiled(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable, trace: Path
) -> str:
    """A table of the operations that take longest. Trains with all of the loader; writes a trace for ui.perfetto.dev."""
    with profile() as recorded:
        phases(model, optimizer, loader)
    with files.atomic(trace) as temporary:
        recorded.export_chrome_trace(str(temporary))
    where = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return f"{recorded.key_averages().table(sort_by=where, row_limit=6, max_name_column_width=40)}\ntrace: {trace}"


# %% tags=["active-ipynb"]
# # NBVAL_IGNORE_OUTPUT
# out = files.writable_folder("results/01-profile")
# print(profiled(model, optimizer, loader_of(train, args, 0, pin=False), out / "trace.json"))

# %% [markdown]
# ## When reading is the slow part
# Prediction (2), on paper: a step takes 128 + 60 = 188 ms. Two GPUs halve the computing and nothing else: 128 + 30 = 158 ms,
# 1.2 times as fast. Four workers read 64 images in 32 ms, while the GPU computes: 60 ms, 3.1 times as fast, with one GPU.
# Now tried: a data set that waits 2 ms for each image, as on a busy network disk.

# %% tags=["active-ipynb"]
# class Distant(Dataset):
#     def __len__(self):
#         return 512
#
#     def __getitem__(self, index):
#         time.sleep(0.002)
#         return train[index]
#
#
# speeds = {}
# for workers in (0, 1, 2):
#     how = {"multiprocessing_context": "fork"} if workers else {}  # a class of a notebook has no file to be imported from
#     began = time.perf_counter()
#     images = sum(len(labels) for _, labels in DataLoader(Distant(), 64, num_workers=workers, **how))
#     speeds[f"workers: {workers}"] = {"data": images / (time.perf_counter() - began)}
# plots.stacked(speeds, "images/s, measured on this machine", "Workers wait side by side")

# %% [markdown]
# Workers help as long as reading means *waiting*, and as long as there are cores where it means computing. They cost
# memory and a start at each epoch (`persistent_workers=True` keeps them). For the digits, which lie in memory, they are a
# loss. `pin_memory` needs a GPU: without one it does nothing.


# %% [markdown]
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    world = launch.alone("PT_CNN_SingleGPU")
    device = devices.pick(world, exact=args.prove)
    args.batch_size = args.batch_size or 64
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    print(devices.describe(world, device), end="\n\n")

    def new_model() -> torch.nn.Module:
        torch.manual_seed(args.seed)
        return CNN(tuple(train[0][0].shape), data.classes(train, test)).to(device)

    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    history = []
    print(metrics.header(), flush=True)
    for epoch in range(args.epochs):
        began = time.perf_counter()
        loss = train_epoch(
            model, optimizer, loader_of(train, args, epoch, pin=device.type == "cuda")
        )
        speed = len(train) / (time.perf_counter() - began)
        metrics.finite(loss, epoch, world)
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": evaluate(model, test),
            "images_per_s": speed,
        }
        print(metrics.row(row), flush=True)
        history.append(row)
    with files.atomic(args.out / "model.pt") as temporary:
        torch.save(model.state_dict(), temporary)
    what = "training with a DataLoader equals the plain loop"
    verdict = (
        proof.against_serial(what, model, new_model(), train, args) if args.prove else None
    )
    if args.profile:  # an epoch more, after all else: it changes the weights
        print(
            profiled(
                model,
                optimizer,
                loader_of(train, args, 0, pin=device.type == "cuda"),
                args.out / "trace.json",
            )
        )
    metrics.report(args.out, world, device, history, verdict, batch_size=args.batch_size)


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# The baseline for all lessons. `--prove` compares the weights with those of a loop that has no DataLoader at all.

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PT_CNN_SingleGPU.py --prove --out results/01

# %% [markdown]
# ## When not to go parallel
# When reading is the slow part: see above. When a step is so short that the operations' own prices rule it: a larger batch
# is cheaper than a second GPU. When the run takes a minute. And before one GPU is busy all the time: two would be idle.

# %% tags=["active-ipynb"]
# print(metrics.line("01 one GPU", "results/01"))  # every lesson ends with such a line, so that routes can be compared
