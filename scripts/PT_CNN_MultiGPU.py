# %% [markdown]
# # 05 · DDP on a cluster: torchrun and Slurm, one node and many
# **The question.** A script trains on one GPU. The cluster has 2 nodes with 2 GPUs each. What must change, and do four
# GPUs learn the same thing as one?
#
# **Predict first.** (1) A global batch of 64 images, 4 ranks: how many images does a rank see in a step? (2) After ten
# epochs, how far apart are the weights of a run on 2 ranks and those of a run on one? (3) Every rank seeds its shuffle
# with 0 and nobody calls `set_epoch`: what goes wrong?

# %%
import argparse
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Subset,
    TensorDataset,
)

from multigpu import (
    checkpoint,
    data,
    devices,
    files,
    flags,
    launch,
    metrics,
    proof,
    rendezvous,
)
from multigpu.models import CNN

# %% [markdown]
# ## Step 0 · The flags
# The batch that you state is the **global** one, what the optimizer sees in a step. Each rank takes its share of it, in
# `--accumulate` pieces. So the result does not depend on how many GPUs there were. Prediction (1): 64 / 4 = 16.


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PT_CNN_MultiGPU", "Train a CNN with DDP: one process or many, one node or many."
    )
    parser.add_argument(
        "--accumulate",
        type=flags.positive,
        default=1,
        help="pieces that a rank's share is cut into",
    )
    parser.add_argument(
        "--amp", action="store_true", help="compute in 16 bit where that is safe"
    )
    parser.add_argument(
        "--save-every",
        type=flags.positive,
        metavar="STEPS",
        help="checkpoint within an epoch, too",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FILE",
        help="go on from FILE, or OUT/last.pt if any",
    )
    parser.add_argument(
        "--spawn", metavar="N", help="start N ranks on this machine; 'auto': one a GPU, or two"
    )
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · Design the model
# `CNN` in `multigpu/models.py`: two convolutions, two linear layers, the same in every lesson. To train your own, edit
# `main` in `scripts/PT_CNN_MultiGPU.py`: this notebook has the same text, but torchrun runs the file, never a cell.

# %% tags=["active-ipynb"]
# print(CNN())
# print(f"{sum(p.numel() for p in CNN().parameters()):,} parameters, a full copy on every rank")

# %% [markdown]
# ## Step 2 · Set up the ranks
# A launcher starts one process a GPU and gives each a **rank**. All else follows from that number: the GPU, the share of
# the data, who prints. `launch.find` reads it from the variables of torchrun, srun or mpirun. The processes meet at
# rank 0's address; from then on they can call collectives.


# %%
def set_up(args: argparse.Namespace) -> tuple[launch.World, torch.device]:
    world = launch.find()  # .rank, .size, .local_rank
    device = devices.pick(world, exact=args.prove)  # cuda:LOCAL_RANK, or the CPU
    store = rendezvous.meet(world, device)
    dist.init_process_group(
        devices.backend(device), store=store, rank=world.rank, world_size=world.size
    )
    return world, device


# %% [markdown]
# ## Step 3 · Read in the data
# `DistributedSampler` shuffles all images by seed and epoch, the same on each rank, and deals them out like cards. Leave
# `set_epoch` out, and every epoch has the order of the first: (3). So that all ranks make the same number of steps, it
# deals the first cards twice where they do not come out even. Such a copy gets weight 0 below.

# %% tags=["active-ipynb"]
# from multigpu import plots
# samplers = [DistributedSampler(range(24), num_replicas=4, rank=rank, seed=0) for rank in range(4)]
# epochs = []
# for epoch in (0, 1):
#     [sampler.set_epoch(epoch) for sampler in samplers]
#     epochs.append([list(sampler) for sampler in samplers])
# plots.shares(epochs, "Every image goes to one rank, and set_epoch deals anew")


# %%
def read_data(
    args: argparse.Namespace, world: launch.World
) -> tuple[TensorDataset, TensorDataset]:
    with rendezvous.fail_together(
        world
    ):  # all ranks leave this block, or none: nobody waits for a rank that gave up
        if world.local_rank == 0:
            data.fetch(args.data)  # one rank a node fetches …
    with rendezvous.fail_together(world):
        return data.load(data.fetch(args.data))  # … and the others find it there


# %% [markdown]
# ## Step 4 · Train
# Three things differ from training on one GPU. `DDP` averages the gradients over the ranks **during `backward()`**: when
# it returns, all ranks hold the same. `no_sync` puts that off until the last piece. And the loss is scaled: DDP averages
# over *ranks*, we want the mean over *images*, also in a last batch that is uneven.


# %%
@dataclass
class Run:
    args: argparse.Namespace
    world: launch.World
    device: torch.device
    model: DDP
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    checkpoint: checkpoint.Checkpoint


def train_epoch(run: Run, train: TensorDataset, at: dict) -> float:
    """One epoch, from step at["step"] on. Returns the mean loss over all images of all ranks."""
    args, world, device = run.args, run.world, run.device
    run.model.train()
    sampler = DistributedSampler(train, world.size, world.rank, shuffle=True, seed=args.seed)
    sampler.set_epoch(at["epoch"])
    pieces = list(BatchSampler(sampler, args.piece, drop_last=False))
    done = at["step"] * args.accumulate
    own = torch.Generator()  # a loader draws a number when it starts: from the global stream, it would shift --resume
    loader = DataLoader(
        train, batch_sampler=pieces[done:], pin_memory=device.type == "cuda", generator=own
    )
    seen = torch.tensor(
        at["seen"] if world.rank == 0 else [0.0, 0.0], dtype=torch.float64, device=device
    )
    for i, (images, labels) in enumerate(metrics.progress(loader, world), start=done):
        images, labels = (
            images.to(device, non_blocking=True),
            labels.to(device, non_blocking=True),
        )
        step, last = (
            i // args.accumulate,
            (i + 1) % args.accumulate == 0 or i + 1 == len(pieces),
        )
        batch = min(
            args.batch_size, len(train) - step * args.batch_size
        )  # images in this global batch
        real = (
            i * args.piece + torch.arange(len(labels), device=device)
        ) * world.size + world.rank < len(train)
        with nullcontext() if last else run.model.no_sync():
            with torch.autocast(device.type, devices.amp_dtype(device), enabled=args.amp):
                loss = (
                    F.cross_entropy(run.model(images), labels, reduction="none") * real
                ).sum()
            run.scaler.scale(loss * world.size / batch).backward()
        seen += torch.stack([loss.detach(), real.sum()])
        if last:
            run.scaler.step(run.optimizer)
            run.scaler.update()
            run.optimizer.zero_grad()
            if args.save_every and (step + 1) % args.save_every == 0:
                run.checkpoint.save({**at, "step": step + 1, "seen": everywhere(seen)})
    loss, images = everywhere(seen)
    return metrics.finite(loss / images, at["epoch"], world)


def everywhere(numbers: torch.Tensor) -> list[float]:
    total = numbers.clone()  # a rank alone knows its own images only
    dist.all_reduce(total)
    return total.tolist()


# %% [markdown]
# ## Step 5 · Evaluate
# Each rank takes every N-th test image. Nothing is padded, so each counts once. The ranks may make different numbers of
# steps, so there is no collective in the loop: it goes around DDP, through `model.module`. One all-reduce ends it.


# %%
@torch.no_grad()
def evaluate(run: Run, test: TensorDataset) -> float:
    """The accuracy on the whole test set, the same number on every rank."""
    model = run.model.module.eval()  # no dropout from here on; train_epoch puts it back
    right = torch.zeros(2, dtype=torch.float64, device=run.device)
    for images, labels in DataLoader(
        Subset(test, range(run.world.rank, len(test), run.world.size)), batch_size=256
    ):
        hits = model(images.to(run.device)).argmax(1).cpu() == labels
        right += torch.tensor([hits.sum(), len(hits)], device=run.device)
    hits, images = everywhere(right)
    return hits / images


# %% [markdown]
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    world, device = set_up(args)
    say = print if world.rank == 0 else lambda *_, **__: None  # one voice: rank 0's
    with rendezvous.fail_together(world):
        args.batch_size, args.piece = flags.split(args.batch_size, world.size, args.accumulate)
        if world.rank == 0:
            files.writable_folder(args.out)
    train, test = read_data(args, world)
    say(devices.describe(world, device))
    say(
        f"global batch {args.batch_size} = {world.size} (ranks) × {args.accumulate} (pieces) × {args.piece} (images)\n"
    )

    def new_model() -> torch.nn.Module:
        torch.manual_seed(args.seed)
        return CNN(tuple(train[0][0].shape), data.classes(train, test)).to(device)

    model = DDP(new_model(), device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], args.lr, momentum=0.9
    )
    scaler = torch.amp.GradScaler(
        device.type, enabled=args.amp and devices.amp_dtype(device) == torch.float16
    )
    parts = {"model": model.module, "optimizer": optimizer, "scaler": scaler}
    same = {
        "--batch-size": args.batch_size,
        "--seed": args.seed,
        "--lr": args.lr,
        "--amp": args.amp,
    }
    same["--data (its checksum)"] = data.checksum(train)
    last = checkpoint.Checkpoint(args.out / "last.pt", parts, same, world)
    run = Run(args, world, device, model, optimizer, scaler, last)
    torch.manual_seed(
        args.seed + world.rank
    )  # the weights are made; from here on, a rank has numbers of its own

    start = {"epoch": 0, "step": 0, "seen": [0.0, 0.0], "history": []}
    at = run.checkpoint.load(args.resume) or start
    say(metrics.opening(at, args, last.loaded, world), flush=True)
    args.epochs = max(args.epochs, at["epoch"])
    for epoch in range(at["epoch"], args.epochs):
        began, images = time.perf_counter(), max(0, len(train) - at["step"] * args.batch_size)
        loss = train_epoch(run, train, at)
        speed = images / (time.perf_counter() - began)
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": evaluate(run, test),
            "images_per_s": speed,
        }
        say(metrics.row(row), flush=True)
        at = {**start, "epoch": epoch + 1, "history": [*at["history"], row]}
        run.checkpoint.save(at)

    dist.destroy_process_group()
    if world.rank == 0:
        what = f"DDP with world size {world.size} equals one process"
        verdict = (
            proof.against_serial(what, model.module, new_model(), train, args)
            if args.prove
            else None
        )
        metrics.report(
            args.out, world, device, at["history"], verdict, batch_size=args.batch_size
        )


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# torchrun's ranks run the file, not these cells. Its proof answers (2). On a cluster: `sbatch slurm/PT_CNN_MultiGPU.slurm`.

# %% tags=["active-ipynb"]
# ranks = torch.cuda.device_count() or 2
# torchrun = f"OMP_NUM_THREADS=1 torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node={ranks}"
# !{torchrun} ../scripts/PT_CNN_MultiGPU.py --prove --out results/05

# %% [markdown]
# **Stopped, and gone on.** Three epochs, then a new start that goes on from the checkpoint. The proof compares it with a
# serial run that never stopped. Two pieces a rank this time: the batch stays 64, so nothing else changes.

# %% tags=["active-ipynb"]
# !{torchrun} ../scripts/PT_CNN_MultiGPU.py --accumulate 2 --prove --epochs 3 --out results/05-resumed
# !{torchrun} ../scripts/PT_CNN_MultiGPU.py --accumulate 2 --prove --resume --out results/05-resumed

# %% [markdown]
# **The trap in the average.** Ten images on 4 ranks: 3, 3, 2 and 2. DDP adds up the ranks' means and divides by 4. Is that
# the mean over the images? *Predict, then run*, with the model that was just trained.

# %% tags=["active-ipynb"]
# model, (_, test) = CNN(), data.load(data.fetch(None))
# model.load_state_dict(torch.load("results/05/last.pt")["parts"]["model"])
# losses = F.cross_entropy(model(test[:10][0]), test[:10][1], reduction="none")
# of_ranks = torch.stack([losses[rank::4].mean() for rank in range(4)]).mean()
# print(f"mean over images {losses.mean().item():.4f}, mean of the ranks' means {of_ranks.item():.4f}")

# %% tags=["active-ipynb"]
# print(metrics.line("05 DDP", "results/05"))  # every lesson ends with such a line, so that routes can be compared
