# %% [markdown]
# # 02 · DataParallel
# **The question.** I have two GPUs. Is one line enough: `model = nn.DataParallel(model)`?
#
# Without two GPUs, this lesson runs on two *virtual* GPUs. They compute real numbers on the
# CPU, raise CUDA's errors, meter their memory, and keep a simulated clock of two V100s.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import multigpu
from multigpu import data, devices, files, flags, launch, metrics, proof
from multigpu.models import CNN


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PT_CNN_DataParallel",
        "Train a CNN with nn.DataParallel: one process, several GPUs.",
    )
    parser.add_argument(
        "--devices",
        type=flags.positive,
        default=max(2, torch.cuda.device_count()),
        help="GPUs to use, virtual ones if there are too few (default: all, at least 2)",
    )
    return parser.parse_args(arguments)


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# from multigpu import lesson, plots, vgpu
#
# lesson.setup("02-data-parallel", ranks=True)
# from experiments import break_even, breakdown, carried, other_gpus, seconds, speedup
#
# first, second = multigpu.gpus(2)
# gpus = [first, second]

# %% [markdown]
# ## Predict first
# Write your answers, then run the cell. The cells below compare them with what happens. Two of
# the questions are about V100s, GPUs of a data centre, which are connected by
# [NVLink](../lessons/README.md#nvlink), and about images of 28×28.

# %% tags=["active-ipynb", "guess"]
# guess_images = 2  # a batch of 10 images on 4 GPUs: how many does the last GPU compute?
# # Which GPU needs more memory in training: "first", "second" or "same"?
# guess_fuller = "same"
# # Are two V100s with DataParallel "faster" or "slower" than one, with a batch of 64?
# guess_small = "faster"
# guess_large = 1.9  # with a batch of 4,096: times as fast as one

# %% [markdown]
# ## Step 1 · By hand
# `nn.DataParallel` does four things. It [*scatters*](../lessons/README.md#scatter) the batch:
# each GPU gets one chunk. It *replicates* the model: each GPU gets a copy of the weights. It
# *applies* each replica to its chunk. It [*gathers*](../lessons/README.md#gather) the outputs
# on the first GPU. By hand, that is a dozen lines. `weight.to(gpu)` replicates, and
# `functional_call` applies: it computes the model's forward with the weights of the replica.


# %%
def by_hand(
    model: nn.Module,
    images: torch.Tensor,
    gpus: list[torch.device],
) -> torch.Tensor:
    """The model's outputs for the images, on the first GPU. Each GPU computes one chunk."""
    chunks = images.chunk(len(gpus))  # scatter
    outputs = []
    for gpu, chunk in zip(gpus, chunks, strict=False):  # a small batch has fewer chunks
        replica = {name: weight.to(gpu) for name, weight in model.named_parameters()}
        output = functional_call(model, replica, chunk.to(gpu))
        outputs.append(output.to(gpus[0]))
    return torch.cat(outputs)  # gather


# %% tags=["active-ipynb"]
# lesson.need(guess_images)
# train, _ = data.load(data.fetch(None))
# images, labels = train[:32]
# for batch, count in ((32, 2), (10, 4)):
#     chunk_sizes = [len(chunk) for chunk in images[:batch].chunk(count)]
#     print(f"{batch} images on {count} GPUs: chunks of {chunk_sizes}")
# lesson.compare("images of the last GPU", guess_images, chunk_sizes[-1], digits=0)

# %% [markdown]
# Where are the gradients after backward? And are they those of one model on the CPU?

# %% tags=["active-ipynb"]
# torch.manual_seed(0)
# serial = CNN()
# F.cross_entropy(serial(images), labels).backward()
#
#
# def check_gradients(name, forward):
#     torch.manual_seed(0)
#     model = CNN().to(first)
#     F.cross_entropy(forward(model), labels.to(first)).backward()
#     places = {str(weight.grad.device) for weight in model.parameters()}
#     differences = [
#         (weight.grad.cpu() - expected.grad).abs().max().item()
#         for weight, expected in zip(model.parameters(), serial.parameters())
#     ]
#     equal = proof.largest(differences) < 1e-7
#     print(f"{name}: gradients on {places}, equal to the serial ones within 1e-7: {equal}")
#
#
# check_gradients("by hand", lambda model: by_hand(model, images.to(first), gpus))
# check_gradients(
#     "nn.DataParallel", lambda model: nn.DataParallel(model, gpus)(images.to(first))
# )

# %% [markdown]
# It is the same arithmetic as on one GPU. `.to()` is an operation like any other, so backward
# goes through it, the other way round: the gradients of the outputs go to the second GPU, and
# those of its weights come back and are added on the first. After backward, gradients are only
# there. The second GPU has copies of the weights for one step, and loses them.
#
# ## Step 2 · Train
# Images and labels go to the first GPU. The loss is computed there, from the gathered outputs,
# and the optimizer updates the weights there.


# %%
def train_epoch(
    model: nn.DataParallel,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
) -> float:
    """Train for one epoch. Returns the mean loss over its images."""
    first = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=first)
    for images, labels in metrics.progress(loader, launch.World()):
        images = images.to(first)
        labels = labels.to(first)

        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

        total += loss.detach() * len(labels)
    return total.item() / len(loader.dataset)


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The accuracy on the whole test set."""
    first = next(model.parameters()).device
    images, labels = test.tensors
    predictions = model(images.to(first)).argmax(1).cpu()
    return (predictions == labels).double().mean().item()


# %% [markdown]
# ## Which GPU needs more memory?
# Larger images now, 28×28, in a batch of 256. The memory meter of each virtual GPU shows what
# it holds before and after backward, and the peak during the step.

# %% tags=["active-ipynb"]
# lesson.need(guess_fuller, choices=("first", "second", "same"))
#
#
# def train_steps(model, batch, gpu, steps=3):
#     """Train for some steps. Returns the memory in the last one, and when it began."""
#     optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
#     images = torch.zeros(batch, 1, 28, 28)
#     labels = torch.zeros(batch, dtype=torch.long, device=gpu)  # so a step sends images only
#     for _ in range(steps):
#         began = vgpu.elapsed()
#         loss = F.cross_entropy(model(images.to(gpu)), labels)
#         before = vgpu.memory_held(model, optimizer)
#         loss.backward()
#         after = vgpu.memory_held(model, optimizer)
#         optimizer.step()
#         optimizer.zero_grad()
#     return before, after, began
#
#
# def parallel_model():
#     return nn.DataParallel(CNN((1, 28, 28)).to(first), gpus)
#
#
# before, after, _ = train_steps(parallel_model(), 256, first)
# bars = {}
# for gpu in gpus:
#     for moment, held in (("before", before), ("after", after)):
#         parts = {part: size / 2**20 for part, size in held[gpu].items() if size}
#         bars[f"{gpu}, {moment} backward"] = parts
# unit = f"MiB ({vgpu.label()})"
# plots.stacked_bars(bars, unit, "What each GPU holds", totals=True, digits=1)

# %% tags=["active-ipynb"]
# peaks = [torch.vgpu.max_memory_allocated(gpu) / 2**20 for gpu in gpus]
# print(f"peak: {first} {peaks[0]:.1f} MiB, {second} {peaks[1]:.1f} MiB")
# more = "first" if peaks[0] > peaks[1] else "second"
# fuller = "same" if peaks[0] == peaks[1] else more
# lesson.compare("which needs more memory", guess_fuller, fuller)

# %% [markdown]
# The first GPU keeps the weights, the gradients and the optimizer's state, and gathers the
# outputs. The second GPU has nothing after backward: its copies of the weights, which count as
# activations, end with the step. The peak is higher than both bars of a GPU, because backward
# also computes the gradients of the activations, and frees them before it ends.
#
# ## Where does the time go?
# Does the second GPU compute all the time? The cell draws one step on the simulated clock (the
# second one; the first warms up). An arrow says to which GPU a transfer goes. The text at the
# right of a lane says for how much of the time the GPU computes (busy), what takes most of the
# rest, and the bubble. White without a transfer below it (launch) means that the GPU waits
# until Python launches the next operation. Hatched (bubble): it waits for the other GPU.

# %% tags=["active-ipynb"]
# began = train_steps(parallel_model(), 256, first, steps=2)[2]
# timeline = vgpu.timeline(since=began)
# busy = timeline.busy(1)
# title = f"One step, batch 256: {second} computes for {busy:.0%} of the time"
# timeline.plot(title=title, contents=carried(timeline))

# %% [markdown]
# No. Most of the time it waits for Python: one thread per replica launches the operations, and
# the threads take turns, because one lock (the GIL) lets only one of them run Python. It also
# waits while the first GPU receives the images from the host, and while that GPU updates the
# weights. The transfers between the GPUs are short.
#
# ## How much faster?
# The next cell starts other virtual GPUs for each link, in the place of the two. They compute
# no numbers, because the simulated clock needs only the shapes. `speedup` divides the time of
# a step on one GPU by the time on both; the images come from the host in each step.
# `breakdown` says what the first GPU's time is used for.

# %% tags=["active-ipynb"]
# lesson.need(guess_small, choices=("faster", "slower"))
# lesson.need(guess_large)
# batches = [2**k for k in range(6, 17, 2)]
# speedups = {}
# for gpu, link in (
#     ("V100-16GB", "NVLink2"),
#     ("V100-16GB", "PCIe3"),
#     ("H100-80GB", "NVLink4"),
# ):
#     with other_gpus(2, gpu=gpu, link=link, compute=False) as pair:
#         name = f"{gpu}, {link}"
#         speedups[name] = [speedup(pair, batch) for batch in batches]
#         print(f"{name}: as fast as one GPU at a batch of {break_even(pair):,}")
#         shown = [f"{batch:,}: {x:.2f}" for batch, x in zip(batches, speedups[name])]
#         print("    " + ", ".join(shown))
#         for batch in (64, 65_536):
#             used = [f"{what} {x:.0%}" for what, x in breakdown(pair, batch).items() if x]
#             print(f"    first GPU, batch of {batch:,}: {', '.join(used)}")

# %% tags=["active-ipynb"]
# small = speedups["V100-16GB, NVLink2"][batches.index(64)]
# large = speedups["V100-16GB, NVLink2"][batches.index(4096)]
# lesson.compare("with a batch of 64", guess_small, "faster" if small > 1 else "slower")
# lesson.compare("speed-up with a batch of 4,096", guess_large, large, unit="×", digits=2)
# change = f"from {small:.1f} to {large:.1f} times as fast"
# title = f"V100s with NVLink: {change}, for batches of 64 and 4,096"
# plots.lines(batches, speedups, "batch", "times as fast as one GPU, simulated", title)

# %% [markdown]
# In a small step, the first GPU computes for less than a fifth of the time. Launching takes
# most of the rest: one GPU, too, waits for launches (lesson 01), and now each operation is
# launched twice. In a large step, the transfers take a fifth of the time with NVLink, and a
# quarter over PCIe, because all images come to the first GPU, and half of them go on to the
# second: the speed-up ends at 1.78 and 1.64. An H100 computes faster, but the simulation gives
# it the same time for a launch, so it needs a larger batch.
#
# How far can you trust this? `benchmarks/vgpu_fidelity.json` compares simulated ratios with
# published ones. None of them is DataParallel's, and they are least exact for tiny batches.
# That the threads launch in turn, one at a time, is put into the simulation.
#
# ## Two traps
# Ten rows go to 4 GPUs. The module's `forward` returns the mean of its rows, as if that were
# the loss, and counts the rows: in an attribute, and in a buffer (a tensor of the module that
# is no weight, such as BatchNorm's running mean).

# %% tags=["active-ipynb", "guess"]
# guess_seen = 10  # 10 rows on 4 GPUs: how many does the module count in the buffer?

# %% tags=["active-ipynb"]
# lesson.need(guess_seen)
#
#
# class WithLoss(nn.Module):
#     def __init__(self):
#         super().__init__()
#         self.rows_seen = 0
#         self.register_buffer("rows_counted", torch.zeros(()))
#
#     def forward(self, rows):
#         self.rows_seen += len(rows)
#         self.rows_counted += len(rows)
#         return rows.mean().reshape(1)
#
#
# with other_gpus(4) as four:
#     rows = torch.arange(10.0, device=four[0]).square()
#     module = nn.DataParallel(WithLoss().to(four[0]), four)
#     of_replicas = module(rows).mean().item()
#     of_rows = rows.mean().item()
#     print(f"mean of the replicas' means {of_replicas:.2f}, mean of all rows {of_rows:.2f}")
#     print(f"rows seen, in an attribute: {module.module.rows_seen} of 10")
#     in_buffer = module.module.rows_counted.item()
#     print(f"rows seen, in a buffer: {in_buffer:.0f} of 10")
# lesson.compare("rows seen, in a buffer", guess_seen, in_buffer, digits=0)

# %% [markdown]
# **A loss inside `forward`** is a mean over each chunk. DataParallel gathers these means, and
# you average them. The chunks have 3, 3, 3 and 1 rows, so the last row counts three times as
# much as each other row. Return the outputs, gather them, then compute the loss: that is
# right, and it is what `train_epoch` does.
#
# **State that `forward` sets** is set on a replica, which is deleted after the step. A buffer
# that `forward` changes in place is different: the first GPU's replica shares it with the
# module, so the module sees the first chunk, and only that. The same happens to BatchNorm's
# running mean.
#
# ## All together


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    launch.single_process_world("PT_CNN_DataParallel")
    world = launch.World()
    gpus = multigpu.gpus(args.devices)
    serial_device = devices.serial_device(gpus, exact=args.prove)
    batch_size = args.batch_size or 64
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    print(f"devices: {', '.join(map(str, gpus))}\n")

    def new_model(device: torch.device) -> nn.Module:
        torch.manual_seed(args.seed)
        return CNN(tuple(train[0][0].shape), data.num_classes(train, test)).to(device)

    model = nn.DataParallel(new_model(gpus[0]), gpus)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    history = []
    print(metrics.header(), flush=True)
    for epoch in range(args.epochs):
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(args.seed + epoch)
        order = RandomSampler(train, generator=generator)
        loss = train_epoch(model, optimizer, DataLoader(train, batch_size, sampler=order))
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

    weights = {name: weight.cpu() for name, weight in model.module.state_dict().items()}
    with files.atomic(args.out / "model.pt") as temporary:
        torch.save(weights, temporary)

    verdict = None
    if args.prove:
        claim = f"DataParallel on {args.devices} GPUs equals one process"
        fresh = new_model(serial_device)
        verdict = proof.compare_with_serial(
            claim, model.module, fresh, train, args, batch_size=batch_size
        )
    metrics.report(
        args.out,
        world,
        gpus[0],
        history,
        verdict,
        devices=args.devices,
        batch_size=batch_size,
    )


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# With virtual GPUs, images/s is the speed of this CPU, which computes for both of them.

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PT_CNN_DataParallel.py --prove --out results/02

# %% [markdown]
# ## What DDP does differently
# PyTorch's documentation recommends `DistributedDataParallel` (DDP) instead, also on one
# machine. It has one process per GPU, so no lock is shared. Each process keeps the weights and
# the optimizer's state on its own GPU. In backward the processes average their gradients: that
# is an *all-reduce*. This model has no buffers, so they send nothing else in a step.

# %% tags=["active-ipynb", "guess"]
# guess_ddp = 850  # from which batch on are two V100s with DDP as fast as one?

# %% tags=["active-ipynb"]
# lesson.need(guess_ddp)
#
#
# def ddp():
#     (gpu,) = vgpu.start(1, compute=False)
#     torch.distributed.init_process_group("vgpu")
#     model = nn.parallel.DistributedDataParallel(CNN((1, 28, 28)).to(gpu))
#     began = train_steps(model, 128, gpu)[2]
#     timeline = vgpu.timeline(since=began)
#     times = [seconds([gpu], batch, parallel=True) for batch in batches]
#     return timeline, times, break_even([gpu], precision=10)
#
#
# timelines, times, limits = zip(*launch.call(ddp, 2))
# steps = {"DataParallel": timeline, "DDP": vgpu.Timeline.of_ranks(timelines)}
# longer = max(step.end - step.start for step in steps.values())
# figure = plots.figure(8, 5)
# for place, (name, step) in enumerate(steps.items(), 1):
#     duration = 1e3 * (step.end - step.start)
#     title = f"{name}, one step of 256 images: {duration:.2f} ms"
#     step.plot(figure.add_subplot(2, 1, place), title, carried(step), until=longer)
# plots.share_legend(figure)
# figure

# %% tags=["active-ipynb"]
# with other_gpus(2, compute=False) as pair:
#     for batch, in_ddp in zip(batches, times[0]):
#         alone = 1e3 * seconds(pair, batch, parallel=False)
#         both = 1e3 * seconds(pair, batch, parallel=True)
#         shown = f"one GPU {alone:.2f}, DataParallel {both:.2f}, DDP {1e3 * in_ddp:.2f}"
#         print(f"{batch:,} images, ms per step: {shown}")
# lesson.compare("DDP as fast as one GPU, batch", guess_ddp, limits[0], digits=0)

# %% [markdown]
# DDP's step is shorter. Each rank is a process with a lock of its own, so the launches of both
# ranks go on at the same time; each GPU reads only its own half of the images from the host;
# no weights are sent. But with 256 images, more than half of the time is still launch: for 128
# images Python launches as many operations as for 256, and those of the all-reduce. So the
# step is no shorter than on one GPU.
#
# **Is one line enough?** For this model it is enough to be right, because the loss is outside
# `forward`, and `forward` sets no state. It is not enough to be fast: two GPUs (V100s, NVLink,
# simulated) are slower than one below about 850 images in a batch, and with DDP below about
# 260. The simulation is least exact for small batches, so on real GPUs the limits will be
# others. DDP takes more lines: each process needs a batch and a sampler of its own, and one of
# them saves. Lessons 04 and 05 write them.

# %% tags=["active-ipynb"]
# print(metrics.route_row("02 DataParallel", "results/02"))  # for the table of all routes

# %% [markdown] tags=["footer"]
# [← 01 One GPU first](PT_CNN_SingleGPU.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/02-data-parallel/README.md) ·
# [03 Model parallelism →](PT_CNN_ModelParallel.ipynb)
