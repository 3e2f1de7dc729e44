# %% [markdown]
# # 02 · DataParallel
# **The question.** I have two GPUs. Is one line enough: `model = nn.DataParallel(model)`?
#
# **Predict first.** (1) With a batch of 32, what does each GPU compute? (2) Which GPU fills up
# first? (3) How much faster is a step, at a batch of 64 and at one of 4,096? (Without GPUs,
# this lesson runs on virtual ones: they compute on the CPU, raise a GPU's errors, meter their
# memory and keep a simulated clock.)

# %%
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

# %% [markdown]
# ## Step 0 · The flags


# %%
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


# %% tags=["active-ipynb"]
# from multigpu import plots, vgpu
#
# first, second = multigpu.gpus(2)
# gpus = [first, second]

# %% [markdown]
# ## Step 1 · By hand
# Scatter the batch, replicate the weights, apply each replica to its chunk of the batch,
# gather the outputs. A dozen lines:


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


# %% [markdown]
# `nn.DataParallel` applies all replicas at the same time, each in a thread. Prediction (1),
# and a comparison of the gradients with those of one model on the CPU:

# %% tags=["active-ipynb"]
# train, _ = data.load(data.fetch(None))
# images, labels = train[:32]
# print([tuple(chunk.shape) for chunk in images.chunk(2)])
#
# torch.manual_seed(0)
# serial = CNN()
# F.cross_entropy(serial(images), labels).backward()
#
#
# def compare(name, forward):
#     torch.manual_seed(0)
#     model = CNN().to(first)
#     F.cross_entropy(forward(model), labels.to(first)).backward()
#     places = {str(weight.grad.device) for weight in model.parameters()}
#     differences = [
#         (weight.grad.cpu() - expected.grad).abs().max().item()
#         for weight, expected in zip(model.parameters(), serial.parameters())
#     ]
#     equal = max(differences) < 1e-7
#     print(f"{name}: gradients on {places}, equal to the serial ones within 1e-7: {equal}")
#
#
# compare("by hand", lambda model: by_hand(model, images.to(first), gpus))
# compare("nn.DataParallel", lambda model: nn.DataParallel(model, gpus)(images.to(first)))

# %% [markdown]
# `.to()` is an operation like any other: backward goes through it, and adds up both replicas'
# gradients **on the first GPU**, where the weights are. The other GPU holds copies, for one
# step. It is the same arithmetic as on one GPU.
#
# ## Step 2 · Train
# Images and labels go to the first GPU; the optimizer updates the weights there. The loss is
# computed from the gathered outputs.


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
# ## Which GPU fills up first?
# Larger images now, 28×28, in a batch of 256. The bars show the memory between forward and
# backward.

# %% tags=["active-ipynb"]
# def three_steps(batch, gpu, wrap):
#     """The memory before the last backward, and the timeline of the last two steps."""
#     model = wrap(CNN((1, 28, 28)).to(gpu))
#     optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
#     images = torch.zeros(batch, 1, 28, 28)
#     labels = torch.zeros(batch, dtype=torch.long)
#     for step in range(3):
#         if step == 1:  # the first step warms up
#             began = vgpu.elapsed()
#         optimizer.zero_grad(set_to_none=False)  # keeps the gradients' memory, for the bars
#         loss = F.cross_entropy(model(images.to(gpu)), labels.to(gpu))
#         held = vgpu.memory_held(model, optimizer)
#         loss.backward()
#         optimizer.step()
#     return held, vgpu.timeline(since=began)
#
#
# held, timeline = three_steps(256, first, lambda model: nn.DataParallel(model, gpus))
# bars = {}
# for gpu, parts in held.items():
#     bars[str(gpu)] = {part: size / 2**20 for part, size in parts.items() if size}
# title = f"Only {first} holds gradients and the optimizer's state"
# plots.stacked_bars(bars, f"MiB ({vgpu.label()})", title)

# %% [markdown]
# On GPU 1 the copy of the weights counts as activations. Now two steps; the longest transfer
# brings images from the host:

# %% tags=["active-ipynb"]
# title = "Each step sends weights and images to GPU 1, which waits while GPU 0 updates"
# timeline.plot(title=title)

# %% [markdown]
# ## How much faster?
# Prediction (3). The virtual GPUs compute no numbers here: the simulated clock needs only the
# shapes. `speedup` divides the time of a step on one GPU by that on both.

# %% tags=["active-ipynb"]
# import sys
#
# sys.path.insert(0, "../lessons/02-data-parallel")
# from experiments import speedup
#
# vgpu.stop()
# batches = [2**k for k in range(6, 17, 2)]
# speedups = {}
# for link in ("NVLink2", "PCIe3"):
#     with vgpu.running(2, link=link, compute=False) as pair:
#         speedups[link] = [speedup(pair, batch) for batch in batches]
#         shown = [f"{batch:,}: {x:.2f}" for batch, x in zip(batches, speedups[link])]
#         print(f"{vgpu.label()}: " + ", ".join(shown))
#
# title = "Below a batch of about 500, two GPUs are slower than one"
# plots.lines(batches, speedups, "batch", "times as fast as one GPU, simulated", title)

# %% [markdown]
# In a small step, the time to launch the operations dominates, and each operation is launched
# twice. In a large step, over PCIe, the transfer dominates: half of the images are sent to GPU
# 1. (The transfer from the host to GPU 0 is not counted here.)
#
# ## Two traps
# **A loss inside `forward`** is averaged over each chunk, and these means are averaged again.
# Ten rows on 4 GPUs are 3, 3, 3 and 1. **State that `forward` sets** is set on a replica, and
# the replica is deleted after the step.

# %% tags=["active-ipynb"]
# class WithLoss(nn.Module):
#     seen = 0
#
#     def forward(self, rows):
#         self.seen += len(rows)
#         return rows.mean().reshape(1)
#
#
# with vgpu.running(4) as four:
#     rows = torch.arange(10.0, device=four[0]).square()
#     module = nn.DataParallel(WithLoss(), four)
#     of_replicas = module(rows).mean().item()
#     of_rows = rows.mean().item()
#     print(f"mean of the replicas' means {of_replicas:.2f}, mean of all rows {of_rows:.2f}")
#     print("rows seen, by the module's own count:", module.module.seen)

# %% [markdown]
# Return the outputs, gather them, then compute the loss: that is right, and it is what
# `train_epoch` does.
#
# ## All together


# %%
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


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# With virtual GPUs, images/s is the speed of this CPU, which computes for both of them.

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PT_CNN_DataParallel.py --prove --out results/02

# %% [markdown]
# Lesson 05's DDP does the same with one process per GPU. It sends only gradients; each GPU
# keeps its weights:

# %% tags=["active-ipynb"]
# def ddp():
#     (gpu,) = vgpu.start(1)
#     torch.distributed.init_process_group("vgpu")
#     _, timeline = three_steps(128, gpu, nn.parallel.DistributedDataParallel)
#     return timeline
#
#
# title = "DDP: no weights are sent, and no GPU waits for an update"
# vgpu.Timeline.of_ranks(launch.call(ddp, 2)).plot(title=title)

# %% tags=["active-ipynb"]
# print(metrics.route_row("02 DataParallel", "results/02"))  # for the table of all routes
