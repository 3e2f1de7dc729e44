# %% [markdown]
# # 01 · One GPU first: baseline, data loading, where the time goes
# **The question.** Training is too slow. Would a second GPU help, and with what?
#
# **Predict first.** (1) A step reads its data, goes forward, goes backward and updates the
# weights. Which of the four takes longest, and how many forwards is a backward? (2) Reading an
# image takes 2 ms, a batch has 64 images, and computing the step takes 60 ms. How much faster
# is training with a second GPU? (3) You time a step on a GPU and get a tenth of a millisecond.
# What is wrong?

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
# Every lesson has these flags. Here `--batch-size` is the number of images that the one GPU
# takes in a step.


# %%
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


# %% [markdown]
# ## Step 1 · Design the model
# Two convolutions and two linear layers, in `multigpu/models.py`: small enough for a laptop,
# and the same in every lesson.

# %% tags=["active-ipynb"]
# print(CNN())

# %% [markdown]
# ## Step 2 · Read in the data
# A `DataLoader` draws indices from a sampler, fetches the images, and stacks them into a
# batch. With `num_workers` it does so in processes of its own, ahead of the training.
# `pin_memory` puts a batch into memory that a GPU can read while the host goes on;
# `non_blocking=True` in `.to()` needs it. The order follows from the seed and the epoch alone.


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
# ## Step 3 · Train
# Forward, backward, update. `loss.item()` in each step would make the host wait for the GPU,
# so the sum of the losses stays on the device.


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


# %% [markdown]
# ## Step 4 · Evaluate


# %%
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
# ## Where a step's time goes
# A GPU works through a queue: the host puts an operation into it and goes on at once. A clock
# that is stopped without `synchronize` has measured the time to fill the queue. The first
# steps are slow, because memory is allocated and kernels are chosen. So: warm up, wait for the
# device before each reading of the clock, and take the median.


# %%
def now(device: torch.device) -> float:
    """The time in seconds, read when the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def phases(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable,
    warm_up: int = 3,
) -> dict[str, float]:
    """The median seconds that a step spends on data, forward, backward and update."""
    device = next(model.parameters()).device
    model.train()
    batches = iter(loader)
    times = []
    while True:
        began = now(device)
        batch = next(batches, None)
        if batch is None:
            break
        images, labels = (part.to(device) for part in batch)
        data_read = now(device)

        loss = F.cross_entropy(model(images), labels)
        forward_done = now(device)

        loss.backward()
        backward_done = now(device)

        optimizer.step()
        optimizer.zero_grad()
        updated = now(device)
        times.append([began, data_read, forward_done, backward_done, updated])

    measured = times[min(warm_up, len(times) - 1) :]
    durations = torch.tensor(measured, dtype=torch.float64).diff(dim=1)
    medians = durations.median(dim=0).values.tolist()
    return dict(zip(("data", "forward", "backward", "update"), medians, strict=True))


# %% tags=["active-ipynb"]
# from multigpu import plots
#
# train, test = data.load(data.fetch(None))
# device = devices.pick(launch.World())
# torch.set_num_threads(1)  # with more, all threads wait for one whose core is busy
#
# bars = {}
# for batch_size in (16, 64, 256):
#     model = CNN().to(device)
#     optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
#     seconds = phases(model, optimizer, loader_of(train, batch_size, seed=0), warm_up=1)
#     microseconds = {phase: 1e6 * s / batch_size for phase, s in seconds.items()}
#     bars[f"batch {batch_size}"] = microseconds
#
# title = "The smaller the batch, the more an image costs"
# plots.stacked_bars(bars, "µs an image, measured on this machine", title)

# %% [markdown]
# **Backward takes nearly as long as two forwards**: it computes the gradient of each layer's
# weights and the gradient of each layer's input, except for the first layer's input. **Small
# batches are expensive**: each operation has a fixed cost, and more GPUs make the batch of
# each GPU smaller.
#
# torch.profiler shows which operations take the time. Its trace opens in a browser.


# %%
def profiled(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable,
    trace: Path,
) -> str:
    """A table of the longest operations.

    Trains with all batches of the loader, and writes a trace for ui.perfetto.dev.
    """
    with profile() as recorded:
        phases(model, optimizer, loader)
    with files.atomic(trace) as temporary:
        recorded.export_chrome_trace(str(temporary))

    column = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    averages = recorded.key_averages()
    table = averages.table(sort_by=column, row_limit=6, max_name_column_width=40)
    return f"{table}\ntrace: {trace}"


# %% tags=["active-ipynb"]
# # NBVAL_IGNORE_OUTPUT
# trace = files.writable_folder("results/01-profile") / "trace.json"
# print(profiled(model, optimizer, loader_of(train, 256, seed=0), trace))

# %% [markdown]
# ## When reading is the slow part
# Prediction (2), on paper: a step takes 128 + 60 = 188 ms. Two GPUs halve the computing and
# nothing else: 128 + 30 = 158 ms, 1.2 times as fast. Four workers read 64 images in 32 ms,
# while the GPU computes: 60 ms, 3.1 times as fast, with one GPU. Now try it: a data set that
# waits 2 ms for each image, as on a busy network disk.

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
#     # A new process cannot import a class of a notebook. A forked one has it already.
#     context = "fork" if workers else None
#     loader = DataLoader(Distant(), 64, num_workers=workers, multiprocessing_context=context)
#     began = time.perf_counter()
#     images_read = sum(len(labels) for _, labels in loader)
#     speeds[f"workers: {workers}"] = {"data": images_read / (time.perf_counter() - began)}
# title = "Workers wait at the same time"
# plots.stacked_bars(speeds, "images/s, measured on this machine", title)

# %% [markdown]
# Workers help as long as reading means *waiting*. Where reading means computing, they help as
# long as there are free cores. They cost memory, and time to start at each epoch
# (`persistent_workers=True` keeps them). The digits are in memory, so workers slow them down.
# `pin_memory` has no effect without a GPU.


# %% [markdown]
# ## All together


# %%
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
        # Profiling trains the model for another epoch: save it and compare it before.
        loader = loader_of(train, batch_size, args.seed, args.workers, pin)
        print(profiled(model, optimizer, loader, args.out / "trace.json"))
    metrics.report(args.out, world, device, history, verdict, batch_size=batch_size)


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# The baseline for all lessons. `--prove` compares the weights with those of a loop that has no
# DataLoader.

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PT_CNN_SingleGPU.py --prove --out results/01

# %% [markdown]
# ## When not to go parallel
# When reading is the slow part: see above. When a step is so short that the operations' fixed
# costs dominate: a larger batch is cheaper than a second GPU. When the run takes a minute. And
# as long as one GPU is not busy all the time: two would be idle.

# %% tags=["active-ipynb"]
# print(metrics.route_row("01 one GPU", "results/01"))  # for the table of all routes

# %% [markdown] tags=["footer"]
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/01-one-gpu/README.md) ·
# [02 DataParallel →](PT_CNN_DataParallel.ipynb)
