# %% [markdown]
# # 02 · DataParallel
# **The question.** I have two GPUs. Is one line enough: `model = nn.DataParallel(model)`?
#
# **Predict first.** (1) With a batch of 32, what does each GPU compute? (2) Which GPU fills up first? (3) How much faster is
# a step, at a batch of 64 and at one of 4,096? (Without GPUs, this lesson runs on virtual ones: they compute on the CPU,
# raise a GPU's errors, meter their memory and keep a simulated clock.)

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
        "PT_CNN_DataParallel", "Train a CNN with nn.DataParallel: one process, several GPUs."
    )
    help_ = "GPUs to use, virtual ones where there are not as many (default: all, at least 2)"
    parser.add_argument(
        "--devices", type=flags.positive, default=max(2, torch.cuda.device_count()), help=help_
    )
    return parser.parse_args(arguments)


# %% tags=["active-ipynb"]
# from multigpu import plots, vgpu
# first, second = multigpu.gpus(2)

# %% [markdown]
# ## Step 1 · By hand
# Scatter the batch, replicate the weights, apply each replica to its piece, gather the outputs. A dozen lines:


# %%
def by_hand(
    model: nn.Module, images: torch.Tensor, places: list[torch.device]
) -> torch.Tensor:
    """The model's outputs for the images, each device computing its piece; gathered on the first device."""
    outputs = []
    for place, piece in zip(places, images.chunk(len(places)), strict=False):  # scatter
        replica = {
            name: weight.to(place) for name, weight in model.named_parameters()
        }  # replicate
        outputs.append(
            functional_call(model, replica, piece.to(place))
        )  # apply; the real one has a thread a device
    return torch.cat([output.to(places[0]) for output in outputs])  # gather


# %% tags=["active-ipynb"]
# (train, _), places = data.load(data.fetch(None)), [first, second]
# images, labels = train[:32]
# print([tuple(piece.shape) for piece in images.chunk(2)])  # prediction (1)
#
# torch.manual_seed(0)
# serial = CNN()
# F.cross_entropy(serial(images), labels).backward()
#
#
# def compare(name, forward):
#     torch.manual_seed(0)
#     model = CNN().to(first)
#     F.cross_entropy(forward(model)(images.to(first)), labels.to(first)).backward()
#     pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), serial.parameters())]
#     apart = max((a.cpu() - b).abs().max().item() for a, b in pairs)
#     print(f"{name}: gradients on {set(str(a.device) for a, _ in pairs)}, the serial ones to 1e-7: {apart < 1e-7}")
#
#
# compare("by hand", lambda model: lambda images: by_hand(model, images, places))
# compare("nn.DataParallel", lambda model: nn.DataParallel(model, places))

# %% [markdown]
# `.to()` is an operation like any other: backward goes through it, and adds up both replicas' gradients **on the first
# device**, where the weights live. The other device holds copies, for one step. It is the same arithmetic as on one GPU.
#
# ## Step 2 · Train
# Input and labels go to the first device, the optimizer knows only its weights. The loss is taken on the gathered output.


# %%
def train_epoch(
    model: nn.DataParallel, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> float:
    """One epoch. Returns the mean loss over its images."""
    first = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=first)
    for images, labels in metrics.progress(loader, launch.World()):
        images, labels = images.to(first), labels.to(first)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(labels)
    return total.item() / len(loader.dataset)


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    first = next(model.parameters()).device
    return (
        (model(test.tensors[0].to(first)).argmax(1).cpu() == test.tensors[1])
        .double()
        .mean()
        .item()
    )


# %% [markdown]
# ## Which GPU fills up first?
# Larger images now, 28×28, in a batch of 256. The bars show the moment between forward and backward.

# %% tags=["active-ipynb"]
# def three_steps(batch, place, wrap):
#     """The memory between forward and backward of the last step, and the timeline of the last two."""
#     model = wrap(CNN((1, 28, 28)).to(place))
#     optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
#     images, labels = torch.zeros(batch, 1, 28, 28), torch.zeros(batch, dtype=torch.long)
#     for step in range(3):
#         began = vgpu.elapsed() if step == 1 else began if step else 0
#         optimizer.zero_grad(set_to_none=False)
#         loss = F.cross_entropy(model(images.to(place)), labels.to(place))
#         held = vgpu.memory_held(model, optimizer)
#         loss.backward()
#         optimizer.step()
#     return held, vgpu.timeline(since=began)
#
#
# held, timeline = three_steps(256, first, lambda model: nn.DataParallel(model, places))
# bars = {str(device): {part: size / 2**20 for part, size in parts.items() if size} for device, parts in held.items()}
# plots.stacked(bars, f"MiB ({vgpu.label()})", f"{first} holds the gradients and the optimizer's state as well")

# %% [markdown]
# On GPU 1 the copy of the weights counts as activations. Now two steps; the longest transfer brings images from the host:

# %% tags=["active-ipynb"]
# timeline.plot(title="Each step sends weights and images to GPU 1, and GPU 1 waits while GPU 0 updates")

# %% [markdown]
# ## How much faster?
# Prediction (3). No numbers are computed here: shapes are enough for the simulated clock.

# %% tags=["active-ipynb"]
# def seconds(places, batch, parallel):
#     model = CNN((1, 28, 28)).to(places[0])
#     forward = nn.DataParallel(model, places) if parallel else model
#     optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
#     images = torch.empty(batch, 1, 28, 28, device=places[0])
#     labels = torch.zeros(batch, dtype=torch.long, device=places[0])
#     for _ in range(2):  # the first step warms up
#         began = vgpu.elapsed()
#         optimizer.zero_grad()
#         F.cross_entropy(forward(images), labels).backward()
#         optimizer.step()
#     return vgpu.elapsed() - began
#
#
# vgpu.stop()
# batches, speedups = [2**k for k in range(6, 17, 2)], {}
# for link in ("NVLink2", "PCIe3"):
#     with vgpu.running(2, link=link, compute=False) as pair:
#         speedups[link] = [seconds(pair, batch, False) / seconds(pair, batch, True) for batch in batches]
#         print(f"{vgpu.label()}: " + ", ".join(f"{batch:,}: {x:.2f}" for batch, x in zip(batches, speedups[link])))
# plots.lines(batches, speedups, "batch", "times as fast as one GPU, simulated", "Below a batch of some 500, two are slower")

# %% [markdown]
# A small step is ruled by what does not shrink: each operation is launched twice. A large one, over PCIe, by what grows
# with it: half of the images are on their way to GPU 1. (That they first come from the host is left out here.)
#
# ## Two traps
# **A loss inside `forward`** is averaged over each piece, and the pieces are averaged again. Ten rows on 4 devices are 3, 3, 3
# and 1. **State that `forward` sets** is set on a replica, which is thrown away.

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
#     print(f"mean of the pieces' means {module(rows).mean().item():.2f}, mean of all rows {rows.mean().item():.2f}")
#     print("rows seen, by the module's own count:", module.module.seen)

# %% [markdown]
# Return outputs, gather, then take the loss: that is right, and it is what `train_epoch` does.
#
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    launch.alone("PT_CNN_DataParallel")
    places = multigpu.gpus(args.devices)
    home = devices.home(places, exact=args.prove)  # where the serial run computes
    args.batch_size = args.batch_size or 64
    files.writable_folder(args.out)
    train, test = data.load(data.fetch(args.data))
    print(f"devices: {', '.join(map(str, places))}\n")

    def new_model(place: torch.device) -> nn.Module:
        torch.manual_seed(args.seed)
        return CNN(tuple(train[0][0].shape), data.classes(train, test)).to(place)

    model = nn.DataParallel(new_model(places[0]), places)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    history = []
    print(metrics.header(), flush=True)
    for epoch in range(args.epochs):
        began = time.perf_counter()
        order = RandomSampler(
            train, generator=torch.Generator().manual_seed(args.seed + epoch)
        )
        loss = train_epoch(model, optimizer, DataLoader(train, args.batch_size, sampler=order))
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
            {name: weight.cpu() for name, weight in model.module.state_dict().items()},
            temporary,
        )
    what, size = (
        f"DataParallel on {args.devices} GPUs equals one process",
        {"batch_size": args.batch_size},
    )
    verdict = (
        proof.against_serial(what, model.module, new_model(home), train, args)
        if args.prove
        else None
    )
    metrics.report(
        args.out, launch.World(), places[0], history, verdict, devices=args.devices, **size
    )


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it (images/s is the speed of this CPU, which computes for both virtual GPUs)

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PT_CNN_DataParallel.py --prove --out results/02

# %% [markdown]
# Lesson 05's DDP does the same with a process a GPU: weights stay, gradients alone travel:

# %% tags=["active-ipynb"]
# def ddp():
#     (place,) = vgpu.start(1)
#     torch.distributed.init_process_group("vgpu")
#     return three_steps(128, place, nn.parallel.DistributedDataParallel)[1]
#
#
# vgpu.Timeline.of_ranks(launch.call(ddp, 2)).plot(title="DDP: no weights travel, and no GPU waits for an update")

# %% tags=["active-ipynb"]
# print(metrics.line("02 DataParallel", "results/02"))  # every lesson ends with such a line, so that routes can be compared
