# %% [markdown]
# # 03, continued · A pipeline of processes
# **The question.** Micro-batches by hand want one process that sees all GPUs. How is it done with a process a GPU, and on
# several nodes?
#
# **Predict first.** (1) Process 0 has the first half of the model. When may it go backward? (2) GPipe sends all pieces
# forward, then all backward; 1F1B (one forward, one backward) goes backward with a piece as soon as it can. Which one is
# faster? Which needs less memory, and on which rank?

# %%
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader, RandomSampler

from multigpu import data, devices, files, flags, launch, metrics, proof, rendezvous
from multigpu.errors import UserError
from multigpu.models import CNN

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}

# %% [markdown]
# ## Step 0 · The flags


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PT_CNN_Pipeline", "Train a CNN that is cut into stages, a process each: 2, 3 or 4."
    )
    parser.add_argument(
        "--pieces", type=flags.positive, default=4, help="micro-batches a batch (default: 4)"
    )
    help_ = "who goes backward when: gpipe or 1f1b (default: 1f1b)"
    parser.add_argument(
        "--schedule", type=str.lower, choices=SCHEDULES, default="1f1b", help=help_
    )
    parser.add_argument(
        "--spawn", metavar="N", help="start N ranks on this machine; 'auto': one a GPU, or two"
    )
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · Cut the model
# Four layers, dealt out to the ranks in order. A rank computes its stage only; the others' weights it never moves to its
# GPU. (`torch.distributed.pipelining.pipeline` can cut a model by itself, at layers that it is told the names of.)


# %%
def stage(model: CNN, rank: int, ranks: int) -> nn.Sequential:
    """The layers that a rank computes, with the model's own weights."""
    layers = [
        nn.Sequential(model.conv1, nn.Tanh()),
        nn.Sequential(model.conv2, nn.Tanh(), nn.Flatten()),
        nn.Sequential(model.fc1, nn.Tanh()),
        model.fc2,
    ]
    return nn.Sequential(*layers[4 * rank // ranks : 4 * (rank + 1) // ranks])


def schedule(
    name: str, own: nn.Module, rank: int, ranks: int, device: torch.device, pieces: int
):
    loss = nn.CrossEntropyLoss(
        reduction="sum"
    )  # train_epoch divides by the images; the schedule would, by the pieces
    return SCHEDULES[name](
        PipelineStage(own, rank, ranks, device), pieces, loss_fn=loss, scale_grads=False
    )


# %% [markdown]
# ## Step 2 · Train
# The first rank gives the images, the last one the labels: all go through the data in the same order. The schedule's `step`
# sends activations to the next rank and gradients back, and calls `backward` for each piece. All pieces must have one
# shape, so a last batch that is smaller is filled up, with labels of −100, which the loss leaves out.


# %%
def handed(
    images: torch.Tensor,
    labels: torch.Tensor,
    size: int,
    world: launch.World,
    device: torch.device,
):
    """What this rank hands to the schedule, filled up to `size`: a tuple with the images or without, labels or None."""
    missing = size - len(labels)
    first, last = world.rank == 0, world.rank == world.size - 1
    inputs = (F.pad(images, (0, 0, 0, 0, 0, 0, 0, missing)).to(device),) if first else ()
    return inputs, F.pad(labels, (0, missing), value=-100).to(device) if last else None


def train_epoch(
    run,
    own: nn.Module,
    optimizer,
    loader: DataLoader,
    world: launch.World,
    device: torch.device,
) -> float:
    """One epoch on this rank's layers. Returns the mean loss over its images, on the last rank, and 0 on the others."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for images, labels in metrics.progress(loader, world):
        inputs, target = handed(images, labels, loader.batch_size, world, device)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        run.step(*inputs, target=target, losses=losses)
        for weight in own.parameters():
            weight.grad /= len(labels)  # the mean over the images that are real
        optimizer.step()
        total += sum(loss.detach() for loss in losses)
    return total.item() / len(loader.dataset)


@torch.no_grad()
def accuracy(run, test: DataLoader, world: launch.World, device: torch.device) -> float:
    """The accuracy on the whole test set, on the last rank, and 0 on the others."""
    hits = 0
    for images, labels in test:
        inputs, target = handed(images, labels, test.batch_size, world, device)
        outputs = run.eval(*inputs, target=target)
        hits += (
            (outputs.argmax(1) == target).sum().item() if world.rank == world.size - 1 else 0
        )
    return hits / len(test.dataset)


# %% [markdown]
# ## GPipe or 1F1B?
# Prediction (2), on two processes with a virtual GPU each: the wider CNN of the first part, 8 pieces of 512 images.

# %% tags=["active-ipynb"]
# from multigpu import plots, vgpu
#
#
# def simulate(name, pieces, batch=4096):
#     """This rank's peak memory in MiB, and the timeline of its second step."""
#     world, (place,) = launch.find(), vgpu.start(1, compute=False)
#     dist.init_process_group("vgpu")
#     own = stage(CNN((1, 28, 28), hidden=320), world.rank, world.size).to(place)
#     run = schedule(name, own, world.rank, world.size, place, pieces)
#     images, labels = torch.empty(batch, 1, 28, 28, device=place), torch.empty(batch, dtype=torch.long, device=place)
#     for _ in range(2):
#         dist.barrier()  # all ranks begin the step together
#         torch.vgpu.reset_peak_memory_stats(place)
#         began = vgpu.elapsed()
#         run.step(*[images] * (world.rank == 0), target=labels if world.rank == world.size - 1 else None)
#     return torch.vgpu.max_memory_allocated(place) / 2**20, vgpu.timeline(since=began)
#
#
# ran = {name: launch.call(simulate, 2, name, pieces=8) for name in SCHEDULES}
# whole = {name: vgpu.Timeline.of_ranks([timeline for _, timeline in ranks]) for name, ranks in ran.items()}
# for name, timeline in whole.items():
#     idle = ", ".join(f"{timeline.idle(rank):.0%}" for rank in range(len(timeline.lanes)))
#     peaks = ", ".join(f"{peak:.0f}" for peak, _ in ran[name])
#     print(f"{name}: {1e3 * (timeline.end - timeline.start):.2f} ms simulated; by rank: idle {idle}, peak MiB {peaks}")
# bars = {f"{name}, rank {r}": {"peak": ran[name][r][0]} for r in range(len(ran["1f1b"])) for name in SCHEDULES}
# plots.stacked(bars, f"peak of all memory, MiB ({whole['1f1b'].label})", "1F1B holds fewer pieces at a time")

# %% tags=["active-ipynb"]
# whole["gpipe"].plot(title="GPipe: rank 0 waits for the first gradient")

# %% tags=["active-ipynb"]
# whole["1f1b"].plot(title="1F1B: the same work, in another order")

# %% [markdown]
# The bubble is the same: GPipe's rank 0 waits once, 1F1B's a little before each backward. What differs is how many pieces it
# holds: all 8, or 2. (On the last rank 1F1B holds one; the buffers of what comes in are there for all pieces, either way.)
# And 1F1B sends activations and gradients at the same time, in both directions of the link.
#
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    world = launch.find()
    device = devices.pick(world, exact=args.prove)
    store = rendezvous.meet(world, device)
    dist.init_process_group(
        devices.backend(device), store=store, rank=world.rank, world_size=world.size
    )
    with rendezvous.fail_together(world):
        if not 2 <= world.size <= 4:
            raise UserError(
                f"the CNN's 4 layers make 2, 3 or 4 stages, not {world.size}: start 2, 3 or 4 ranks (--spawn 2)."
            )
        if args.schedule == "1f1b" and args.pieces < world.size:
            raise UserError(
                f"--pieces {args.pieces} are too few for 1F1B on {world.size} stages: give at least as many."
            )
        args.batch_size, piece = flags.split(args.batch_size, 1, args.pieces)
        if world.rank == 0:
            files.writable_folder(args.out)
        if world.local_rank == 0:
            data.fetch(args.data)
    with rendezvous.fail_together(world):
        train, test = data.load(data.fetch(args.data))
    rendezvous.same_everywhere(world, "the training data", data.checksum(train))

    def new_model() -> CNN:
        torch.manual_seed(args.seed)
        return CNN(tuple(train[0][0].shape), data.classes(train, test))

    model = new_model()
    own = stage(model, world.rank, world.size).to(device)
    run = schedule(args.schedule, own, world.rank, world.size, device, args.pieces)
    optimizer, history = torch.optim.SGD(own.parameters(), args.lr, momentum=0.9), []
    say = print if world.rank == 0 else lambda *_, **__: None
    say(devices.describe(world, device))
    split = f"global batch {args.batch_size} = {args.pieces} (pieces) × {piece} (images)"
    say(f"{world.size} stages, {args.schedule}; {split}\n\n{metrics.header()}", flush=True)
    for epoch in range(args.epochs):
        began = time.perf_counter()
        order = RandomSampler(
            train, generator=torch.Generator().manual_seed(args.seed + epoch)
        )
        loss = train_epoch(
            run,
            own,
            optimizer,
            DataLoader(train, args.batch_size, sampler=order),
            world,
            device,
        )
        right = accuracy(run, DataLoader(test, args.batch_size), world, device)
        found = torch.tensor([loss, right], dtype=torch.float64, device=device)
        dist.broadcast(found, src=world.size - 1)  # the last rank alone has outputs
        loss, right = found.tolist()
        speed = len(train) / (time.perf_counter() - began)
        metrics.finite(loss, epoch, world)
        history.append(
            {"epoch": epoch + 1, "loss": loss, "test_accuracy": right, "images_per_s": speed}
        )
        say(metrics.row(history[-1]), flush=True)

    stages: list = [None] * world.size
    dist.all_gather_object(stages, own.cpu().state_dict())
    for rank, weights in enumerate(stages):
        stage(model, rank, world.size).load_state_dict(weights)
    dist.destroy_process_group()
    if world.rank == 0:
        with files.atomic(args.out / "model.pt") as temporary:
            torch.save(model.state_dict(), temporary)
        what = f"{args.schedule} with {world.size} stages equals one process"
        verdict = (
            proof.against_serial(what, model, new_model().to(device), train, args)
            if args.prove
            else None
        )
        metrics.report(args.out, world, device, history, verdict, batch_size=args.batch_size)


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it

# %% tags=["active-ipynb"]
# torchrun = "OMP_NUM_THREADS=1 torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
# !{torchrun} ../scripts/PT_CNN_Pipeline.py --prove --out results/03-pipeline

# %% tags=["active-ipynb"]
# print(metrics.line("03 pipeline, 1F1B", "results/03-pipeline"))
