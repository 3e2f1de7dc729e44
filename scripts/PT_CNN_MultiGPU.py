# %% [markdown]
# # 05 · DDP on a cluster: torchrun and Slurm, one node and many
# **The question.** A script trains on one GPU. The cluster has 2 nodes with 2 GPUs each. What
# must change, and do four GPUs learn the same thing as one?
#
# **Predict first.** (1) A global batch of 64 images, 4 ranks: how many images does a rank see
# in a step? (2) After ten epochs, how large is the difference between the weights of a run on
# 2 ranks and those of a run on one? (3) Every rank seeds its shuffle with 0 and nobody calls
# `set_epoch`: what goes wrong?

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
from multigpu.errors import pluralize
from multigpu.models import CNN

# %% [markdown]
# ## DDP in 40 lines
# The smallest program: plain torch, without the course's library. `torchrun` starts it on each
# rank, and `DDP` averages the gradients.

# %% tags=["active-ipynb"]
# from pathlib import Path
#
# print(Path("../lessons/05-ddp-cluster/plain_ddp.py").read_text())

# %% tags=["active-ipynb"]
# ranks = torch.cuda.device_count() or 2
# torchrun = f"torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node={ranks}"
# !OMP_NUM_THREADS=1 {torchrun} ../lessons/05-ddp-cluster/plain_ddp.py

# %% [markdown]
# It trains. What is missing: the same result with any number of ranks (`batch_size=32` is per
# rank here, repeated images count twice, and DDP averages over ranks instead of images);
# evaluation by all ranks; checkpoints; an error on one rank that ends all of them; launchers
# other than torchrun; a proof. The steps below add them.
#
# ## Step 0 · The flags
# `--batch-size` is the **global** batch, all images of one optimizer step. It is split evenly
# over the ranks, and each rank's part into `--accumulate` micro-batches. So the result does
# not depend on the number of GPUs. Prediction (1): 64 / 4 = 16.


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PT_CNN_MultiGPU",
        "Train a CNN with DDP: one process or many, one node or many.",
    )
    parser.add_argument(
        "--accumulate",
        type=flags.positive,
        default=1,
        help="micro-batches of a rank in one step (default: 1)",
    )
    parser.add_argument(
        "--amp",
        action="store_true",
        help="compute in 16 bit where that is safe",
    )
    parser.add_argument(
        "--save-every",
        type=flags.positive,
        metavar="STEPS",
        help="save a checkpoint every STEPS steps, and after each epoch",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FILE",
        help="resume from FILE, or from OUT/last.pt if it exists",
    )
    parser.add_argument(
        "--spawn",
        metavar="N",
        help="start N ranks on this machine; 'auto': one a GPU, or two",
    )
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · Design the model
# `CNN` in `multigpu/models.py`: two convolutions, two linear layers, the same in every lesson.
# To train your own, edit `main` in `scripts/PT_CNN_MultiGPU.py`. This notebook has the same
# text, but torchrun runs the file, never a cell.

# %% tags=["active-ipynb"]
# print(CNN())
# parameters = sum(weight.numel() for weight in CNN().parameters())
# print(f"{parameters:,} parameters, a full copy on every rank")

# %% [markdown]
# ## Step 2 · Set up the ranks
# A launcher starts one process per GPU and gives each a **rank**. All else follows from that
# number: the GPU, the shard of the data, which process prints. `launch.find_world` reads it
# from the variables of torchrun, srun or mpirun. The processes connect to rank 0; after that
# they can call collectives.


# %%
def set_up(args: argparse.Namespace) -> tuple[launch.World, torch.device]:
    world = launch.find_world()  # .rank, .size, .local_rank
    device = devices.pick(world, exact=args.prove)  # cuda:LOCAL_RANK, or the CPU
    store = rendezvous.open_store(world, device)
    dist.init_process_group(
        devices.backend(device),
        store=store,
        rank=world.rank,
        world_size=world.size,
    )
    return world, device


# %% [markdown]
# ## Step 3 · Read in the data
# `DistributedSampler` shuffles all images by seed and epoch, the same on each rank, and gives
# every N-th image to a rank. Prediction (3): without `set_epoch`, every epoch has the order of
# the first. All ranks must make the same number of steps, so the sampler repeats a few images
# to make the shards equal in size. A repeat gets weight 0 below.

# %% tags=["active-ipynb"]
# from multigpu import plots
#
# samplers = [DistributedSampler(range(24), 4, rank, seed=0) for rank in range(4)]
# epochs = []
# for epoch in (0, 1):
#     for sampler in samplers:
#         sampler.set_epoch(epoch)
#     epochs.append([list(sampler) for sampler in samplers])
# plots.shards(epochs, "Every image goes to one rank; set_epoch shuffles again")


# %%
def read_data(
    args: argparse.Namespace, world: launch.World
) -> tuple[TensorDataset, TensorDataset]:
    # All ranks leave a `fail_together` block, or none: no rank waits for one that failed.
    with rendezvous.fail_together(world):
        if world.local_rank == 0:  # one download for each node
            data.fetch(args.data)
    with rendezvous.fail_together(world):
        return data.load(data.fetch(args.data))


# %% [markdown]
# ## Step 4 · Train
# Three things differ from training on one GPU. `DDP` averages the gradients over the ranks
# **during `backward()`**: when it returns, all ranks have the same gradients. `no_sync` delays
# that until the last micro-batch. And the loss is scaled: DDP averages over *ranks*, but the
# mean over *images* is wanted, also in an uneven last batch.


# %%
@dataclass
class Run:
    args: argparse.Namespace
    batch: data.Batch
    world: launch.World
    device: torch.device
    model: DDP
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    checkpoint: checkpoint.Checkpoint


def train_epoch(run: Run, train: TensorDataset, position: dict) -> float:
    """Train for one epoch, from step position["step"] on.

    Returns the mean loss over all images of all ranks.
    """
    args = run.args
    batch = run.batch
    world = run.world
    device = run.device
    run.model.train()

    sampler = DistributedSampler(train, world.size, world.rank, shuffle=True, seed=args.seed)
    sampler.set_epoch(position["epoch"])
    micro_batches = list(BatchSampler(sampler, batch.per_micro_batch, drop_last=False))
    done = position["step"] * batch.micro_batches
    # A loader draws a random number when it starts. With a generator of its own it leaves the
    # random states unchanged: a resumed run starts one loader more, and must draw the same.
    own_generator = torch.Generator()
    loader = DataLoader(
        train,
        batch_sampler=micro_batches[done:],
        pin_memory=device.type == "cuda",
        generator=own_generator,
    )

    # The sum of the losses and the number of images. A checkpoint holds the sums over all
    # ranks, so only rank 0 starts with them.
    sums = position["seen"] if world.rank == 0 else [0.0, 0.0]
    seen = torch.tensor(sums, dtype=torch.float64, device=device)

    for index, (images, labels) in enumerate(metrics.progress(loader, world), start=done):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        step = index // batch.micro_batches
        is_last = (index + 1) % batch.micro_batches == 0 or index + 1 == len(micro_batches)
        real = data.real_rows(len(train), batch, world.rank, index, len(labels), device)

        with nullcontext() if is_last else run.model.no_sync():
            with torch.autocast(device.type, devices.amp_dtype(device), enabled=args.amp):
                losses = F.cross_entropy(run.model(images), labels, reduction="none")
                loss = (losses * real).sum()
            images_in_step = batch.images_in_step(step, len(train))
            run.scaler.scale(loss * world.size / images_in_step).backward()
        seen += torch.stack([loss.detach(), real.sum()])

        if is_last:
            run.scaler.step(run.optimizer)
            run.scaler.update()
            run.optimizer.zero_grad()
            if args.save_every and (step + 1) % args.save_every == 0:
                sums = sum_over_ranks(seen)
                run.checkpoint.save({**position, "step": step + 1, "seen": sums})

    loss_sum, image_count = sum_over_ranks(seen)
    return metrics.check_loss(loss_sum / image_count, position["epoch"], world)


def sum_over_ranks(numbers: torch.Tensor) -> list[float]:
    total = numbers.clone()
    dist.all_reduce(total)
    return total.tolist()


# %% [markdown]
# ## Step 5 · Evaluate
# Each rank takes every N-th test image. Nothing is padded, so each image counts once. The
# ranks may make different numbers of steps, so the loop must not call a collective: it uses
# `model.module`, without DDP. One all-reduce follows it.


# %%
@torch.no_grad()
def evaluate(run: Run, test: TensorDataset) -> float:
    """The accuracy on the whole test set, the same number on every rank."""
    model = run.model.module.eval()  # no dropout; train_epoch turns it on again
    shard = Subset(test, range(run.world.rank, len(test), run.world.size))
    counts = torch.zeros(2, dtype=torch.float64, device=run.device)
    for images, labels in DataLoader(shard, batch_size=256):
        predictions = model(images.to(run.device)).argmax(1).cpu()
        hits = (predictions == labels).sum()
        counts += torch.tensor([hits, len(labels)], device=run.device)
    hits, images = sum_over_ranks(counts)
    return hits / images


# %% [markdown]
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    world, device = set_up(args)
    with rendezvous.fail_together(world):
        batch = flags.split_batch(args.batch_size, world.size, args.accumulate)
        if world.rank == 0:
            files.writable_folder(args.out)
    train, test = read_data(args, world)
    if world.rank == 0:
        per_rank = f"{batch.micro_batches} (micro-batches) × {batch.per_micro_batch} (images)"
        print(devices.describe(world, device))
        print(f"global batch {batch.global_size} = {world.size} (ranks) × {per_rank}\n")

    def new_model() -> torch.nn.Module:
        torch.manual_seed(args.seed)
        return CNN(tuple(train[0][0].shape), data.num_classes(train, test)).to(device)

    model = DDP(new_model(), device_ids=[device.index] if device.type == "cuda" else None)
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trainable, args.lr, momentum=0.9)
    scales_loss = args.amp and devices.amp_dtype(device) == torch.float16
    scaler = torch.amp.GradScaler(device.type, enabled=scales_loss)

    # What a checkpoint holds, and the settings that a resumed run must share with it.
    parts = {"model": model.module, "optimizer": optimizer, "scaler": scaler}
    settings = {
        "--batch-size": batch.global_size,
        "--seed": args.seed,
        "--lr": args.lr,
        "--amp": args.amp,
        "--data (its checksum)": data.checksum(train),
    }
    last = checkpoint.Checkpoint(args.out / "last.pt", parts, settings, world)
    run = Run(args, batch, world, device, model, optimizer, scaler, last)
    # All ranks made the same weights. From here on each rank draws other random numbers.
    torch.manual_seed(args.seed + world.rank)

    start = {"epoch": 0, "step": 0, "seen": [0.0, 0.0], "history": []}
    position = run.checkpoint.load(args.resume) or start
    opening = metrics.resume_header(position, args, last.loaded, world)
    if world.rank == 0:
        print(opening, flush=True)
    epochs = max(args.epochs, position["epoch"])
    for epoch in range(position["epoch"], epochs):
        began = time.perf_counter()
        images = max(0, len(train) - position["step"] * batch.global_size)
        loss = train_epoch(run, train, position)
        images_per_s = images / (time.perf_counter() - began)
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": evaluate(run, test),
            "images_per_s": images_per_s,
        }
        if world.rank == 0:
            print(metrics.row(row), flush=True)
        history = [*position["history"], row]
        position = {**start, "epoch": epoch + 1, "history": history}
        run.checkpoint.save(position)

    dist.destroy_process_group()
    if world.rank == 0:
        verdict = None
        if args.prove:
            claim = f"DDP on {pluralize(world.size, 'rank')} equals one process"
            verdict = proof.compare_with_serial(
                claim,
                model.module,
                new_model(),
                train,
                args,
                batch_size=batch.global_size,
                epochs=epochs,
            )
        metrics.report(
            args.out,
            world,
            device,
            position["history"],
            verdict,
            batch_size=batch.global_size,
        )


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# torchrun's ranks run the file, not these cells. Its proof answers (2). On a cluster: `sbatch
# slurm/PT_CNN_MultiGPU.slurm`.

# %% tags=["active-ipynb"]
# lesson = f"OMP_NUM_THREADS=1 {torchrun} ../scripts/PT_CNN_MultiGPU.py"
# !{lesson} --prove --out results/05

# %% [markdown]
# **Stop and resume.** Three epochs, then a new start that resumes from the checkpoint. The
# proof compares it with a serial run that never stopped. Each rank has two micro-batches this
# time: the global batch stays 64, so nothing else changes.

# %% tags=["active-ipynb"]
# !{lesson} --accumulate 2 --prove --epochs 3 --out results/05-resumed
# !{lesson} --accumulate 2 --prove --resume --out results/05-resumed

# %% [markdown]
# **The trap in the average.** Ten images on 4 ranks: 3, 3, 2 and 2. DDP adds up the ranks'
# means and divides by 4. Is that the mean over the images? *Predict, then run*, with the model
# that was just trained.

# %% tags=["active-ipynb"]
# model = CNN()
# model.load_state_dict(torch.load("results/05/last.pt")["parts"]["model"])
# _, test = data.load(data.fetch(None))
# images, labels = test[:10]
# losses = F.cross_entropy(model(images), labels, reduction="none")
# of_ranks = torch.stack([losses[rank::4].mean() for rank in range(4)]).mean()
# print(f"mean over images {losses.mean():.4f}, mean of the ranks' means {of_ranks:.4f}")

# %% tags=["active-ipynb"]
# print(metrics.route_row("05 DDP", "results/05"))  # for the table of all routes

# %% [markdown] tags=["footer"]
# [← 04 DDP with mp.spawn](PT_CNN_DDPSpawn.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/05-ddp-cluster/README.md) ·
# [06 Model and data parallel →](PT_CNN_HybridParallel.ipynb)
