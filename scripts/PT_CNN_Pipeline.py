# %% [markdown]
# # 03, continued · A pipeline of processes
# **The question.** Micro-batches by hand need one process that sees all GPUs. How does a
# pipeline work with a process for each GPU, and on several nodes?
#
# **Predict first.** (1) Process 0 has the first half of the model. When can it go backward?
# (2) GPipe sends all micro-batches forward, then all backward; 1F1B (one forward, one
# backward) goes backward with a micro-batch as soon as it can. Which one is faster? Which
# needs less memory, and on which rank?

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
        "PT_CNN_Pipeline",
        "Train a CNN that is cut into 2, 3 or 4 stages, with a process for each.",
    )
    parser.add_argument(
        "--micro-batches",
        type=flags.positive,
        default=4,
        help="forward passes that a batch is split into (default: 4)",
    )
    parser.add_argument(
        "--schedule",
        type=str.lower,
        choices=SCHEDULES,
        default="1f1b",
        help="the order of forward and backward: gpipe or 1f1b (default: 1f1b)",
    )
    parser.add_argument(
        "--spawn",
        metavar="N",
        help="start N ranks on this machine; 'auto': one a GPU, or two",
    )
    return parser.parse_args(arguments)


# %% [markdown]
# ## Step 1 · Cut the model
# The ranks get the four layers in order. A rank moves only the weights of its own stage to its
# GPU, and computes nothing else. (`torch.distributed.pipelining.pipeline` can cut a model by
# itself, at layers that you name.)


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
    name: str,
    layers: nn.Module,
    rank: int,
    ranks: int,
    device: torch.device,
    micro_batches: int,
) -> ScheduleGPipe | Schedule1F1B:
    """The schedule of this rank, whose `layers` are stage number `rank` of the pipeline."""
    # A sum: train_epoch divides it by the number of images. With scale_grads the schedule
    # would divide it by the number of micro-batches.
    sum_of_losses = nn.CrossEntropyLoss(reduction="sum")
    own_stage = PipelineStage(layers, rank, ranks, device)
    return SCHEDULES[name](own_stage, micro_batches, loss_fn=sum_of_losses, scale_grads=False)


# %% [markdown]
# ## Step 2 · Train
# The first rank passes in the images, the last one the labels: all ranks read the data in the
# same order. The schedule's `step` sends activations to the next rank and gradients back, and
# calls `backward` for each micro-batch. All micro-batches must have the same shape, so a
# smaller last batch is padded, with labels of −100, which the loss ignores.


# %%
def stage_inputs(
    images: torch.Tensor,
    labels: torch.Tensor,
    size: int,
    world: launch.World,
    device: torch.device,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Inputs and target that this rank passes to the schedule, padded to `size` images.

    The inputs are the images on the first rank, and empty on the others. The target is the
    labels on the last rank, and None on the others.
    """
    padding = size - len(labels)
    inputs = ()
    target = None
    if world.rank == 0:
        inputs = (F.pad(images, (0, 0, 0, 0, 0, 0, 0, padding)).to(device),)
    if world.rank == world.size - 1:
        target = F.pad(labels, (0, padding), value=-100).to(device)
    return inputs, target


def train_epoch(
    pipeline: ScheduleGPipe | Schedule1F1B,
    layers: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    world: launch.World,
    device: torch.device,
) -> float:
    """Train this rank's layers for one epoch.

    Returns the mean loss over the epoch's images on the last rank, and 0 on the others.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for images, labels in metrics.progress(loader, world):
        inputs, target = stage_inputs(images, labels, loader.batch_size, world, device)
        losses: list[torch.Tensor] = []  # one for each micro-batch, on the last rank

        optimizer.zero_grad()
        pipeline.step(*inputs, target=target, losses=losses)
        for weight in layers.parameters():
            weight.grad /= len(labels)  # the mean over the images, without the padding
        optimizer.step()

        total += sum(loss.detach() for loss in losses)
    return total.item() / len(loader.dataset)


@torch.no_grad()
def accuracy(
    pipeline: ScheduleGPipe | Schedule1F1B,
    test: DataLoader,
    world: launch.World,
    device: torch.device,
) -> float:
    """The accuracy on the whole test set on the last rank, and 0 on the others."""
    hits = 0
    for images, labels in test:
        inputs, target = stage_inputs(images, labels, test.batch_size, world, device)
        outputs = pipeline.eval(*inputs, target=target)
        if world.rank == world.size - 1:
            hits += (outputs.argmax(1) == target).sum().item()
    return hits / len(test.dataset)


# %% [markdown]
# ## GPipe or 1F1B?
# Prediction (2), on two processes with a virtual GPU each: the wider CNN of the first part,
# and 8 micro-batches of 512 images.

# %% tags=["active-ipynb"]
# import sys
#
# from multigpu import vgpu
#
# sys.path.insert(0, "../lessons/03-model-parallel")
# from experiments import draw_peaks, pipelined_step, print_schedules
#
#
# def simulate(name, micro_batches, batch=4096):
#     """This rank's peak memory in MiB, and its timeline."""
#     (gpu,) = vgpu.start(1, compute=False)
#     dist.init_process_group("vgpu")
#     world = launch.find_world()
#     layers = stage(CNN((1, 28, 28), hidden=320), world.rank, world.size).to(gpu)
#     pipeline = schedule(name, layers, world.rank, world.size, gpu, micro_batches)
#     return pipelined_step(pipeline, world, gpu, batch)
#
#
# peaks = {}
# timelines = {}
# for name in SCHEDULES:
#     by_rank = launch.call(simulate, 2, name, micro_batches=8)
#     peaks[name] = [peak for peak, _ in by_rank]
#     timelines[name] = vgpu.Timeline.of_ranks([timeline for _, timeline in by_rank])
# print_schedules(timelines, peaks)
# draw_peaks(peaks, timelines["1f1b"].label)

# %% tags=["active-ipynb"]
# timelines["gpipe"].plot(title="GPipe: rank 0 waits for the first gradient")

# %% tags=["active-ipynb"]
# timelines["1f1b"].plot(title="1F1B: the same work, in another order")

# %% [markdown]
# The idle shares contain more than the bubble: messages and launches, too. GPipe's rank 0
# waits once, 1F1B's a little before each backward. 1F1B sends activations and gradients at the
# same time, in both directions of the link. Its purpose is memory: it holds 2 micro-batches on
# rank 0, and one on the last rank; GPipe holds all 8. (The buffers for received activations
# exist for all micro-batches, with both schedules.)
#
# ## All together


# %%
def main(args: argparse.Namespace) -> None:
    world = launch.find_world()
    device = devices.pick(world, exact=args.prove)
    store = rendezvous.open_store(world, device)
    dist.init_process_group(
        devices.backend(device),
        store=store,
        rank=world.rank,
        world_size=world.size,
    )

    with rendezvous.fail_together(world):
        if not 2 <= world.size <= 4:
            raise UserError(
                f"the CNN's 4 layers make 2, 3 or 4 stages, not {world.size}: "
                f"start 2, 3 or 4 ranks (--spawn 2)."
            )
        if args.schedule == "1f1b" and args.micro_batches < world.size:
            raise UserError(
                f"--micro-batches {args.micro_batches} is too few for 1F1B "
                f"on {world.size} stages: give {world.size} or more."
            )
        batch = flags.split_batch(args.batch_size, 1, args.micro_batches)
        if world.rank == 0:
            files.writable_folder(args.out)
        if world.local_rank == 0:
            data.fetch(args.data)
    with rendezvous.fail_together(world):
        train, test = data.load(data.fetch(args.data))
    rendezvous.same_everywhere(world, "the training data", data.checksum(train))

    def new_model() -> CNN:
        torch.manual_seed(args.seed)
        return CNN(tuple(train[0][0].shape), data.num_classes(train, test))

    model = new_model()
    layers = stage(model, world.rank, world.size).to(device)
    pipeline = schedule(
        args.schedule, layers, world.rank, world.size, device, batch.micro_batches
    )
    optimizer = torch.optim.SGD(layers.parameters(), args.lr, momentum=0.9)
    if world.rank == 0:
        split = f"{batch.micro_batches} (micro-batches) × {batch.per_micro_batch} (images)"
        print(devices.describe(world, device))
        print(f"{world.size} stages, {args.schedule}; ", end="")
        print(f"global batch {batch.global_size} = {split}\n")
        print(metrics.header(), flush=True)

    history = []
    for epoch in range(args.epochs):
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(args.seed + epoch)
        order = RandomSampler(train, generator=generator)
        loader = DataLoader(train, batch.global_size, sampler=order)
        loss = train_epoch(pipeline, layers, optimizer, loader, world, device)
        right = accuracy(pipeline, DataLoader(test, batch.global_size), world, device)

        # Only the last rank has outputs. It sends its results to all ranks.
        results = torch.tensor([loss, right], dtype=torch.float64, device=device)
        dist.broadcast(results, src=world.size - 1)
        loss, right = results.tolist()
        images_per_s = len(train) / (time.perf_counter() - began)
        metrics.check_loss(loss, epoch, world)
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": right,
            "images_per_s": images_per_s,
        }
        history.append(row)
        if world.rank == 0:
            print(metrics.row(row), flush=True)

    # Collect the weights of all stages in one model.
    stages: list = [None] * world.size
    dist.all_gather_object(stages, layers.cpu().state_dict())
    for rank, weights in enumerate(stages):
        stage(model, rank, world.size).load_state_dict(weights)
    dist.destroy_process_group()

    if world.rank == 0:
        with files.atomic(args.out / "model.pt") as temporary:
            torch.save(model.state_dict(), temporary)
        verdict = None
        if args.prove:
            claim = f"{args.schedule} with {world.size} stages equals one process"
            fresh = new_model().to(device)
            verdict = proof.compare_with_serial(
                claim, model, fresh, train, args, batch_size=batch.global_size
            )
        metrics.report(args.out, world, device, history, verdict, batch_size=batch.global_size)


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it

# %% tags=["active-ipynb"]
# torchrun = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
# !OMP_NUM_THREADS=1 {torchrun} ../scripts/PT_CNN_Pipeline.py --prove --out results/03-pipeline

# %% tags=["active-ipynb"]
# print(metrics.route_row("03 pipeline, 1F1B", "results/03-pipeline"))

# %% [markdown] tags=["footer"]
# [← 03 Model parallelism](PT_CNN_ModelParallel.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/03-model-parallel/README.md) ·
# [04 DDP with mp.spawn →](PT_CNN_DDPSpawn.ipynb)
