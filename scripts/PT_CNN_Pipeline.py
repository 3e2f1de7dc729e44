# %% [markdown]
# # 03, continued · A pipeline of processes
# **The question.** One process with all GPUs works on one node only. How does a
# [pipeline](../lessons/README.md#pipeline) work with a process per GPU? And in which order
# should each process compute its micro-batches?
#
# The processes are [ranks](../lessons/README.md#rank). Each rank computes one
# [stage](../lessons/README.md#stage), as each GPU did in the first notebook. But autograd
# works inside one process: it sends no gradients to another rank.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# from datetime import timedelta
#
# from multigpu import lesson, plots
#
# lesson.setup("03-model-parallel", ranks=True)
# from experiments import (
#     FREE_LINK,
#     draw_peaks,
#     equal_stages,
#     on_one_gpu,
#     phases,
#     shares,
#     simulated,
# )

# %% [markdown]
# ## Two orders
# A batch of 8 [micro-batches](../lessons/README.md#micro-batch) goes through two stages, in
# one of two orders:
# - [GPipe](../lessons/README.md#gpipe): a stage takes all micro-batches forward, then all
#   backward.
# - [1F1B](../lessons/README.md#1f1b) (one forward, one backward): a stage takes a micro-batch
#   backward as soon as its gradient has come.
#
# From its forward to its backward, a micro-batch's
# [activations](../lessons/README.md#activation) stay in memory. The optimizer's step comes
# after the last backward.
#
# ## Step 1 · Cut the model
# The ranks get the four layers in order. A rank moves only its own stage to its GPU.


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


# %% [markdown]
# ## Step 2 · GPipe by hand
# Two ranks exchange [messages](../lessons/README.md#message): `dist.isend` sends a tensor and
# does not wait, `dist.recv` waits for one. Rank 0 sends activations, and rank 1 sends their
# gradients back. Each rank has its order as a text: F1 is the forward of micro-batch 1, B1
# its backward. In the first notebook autograd computed backward from the last micro-batch
# to the first. Here each micro-batch has a graph of its own, and the rank's order says whose
# backward comes next.
#
# NCCL moves the messages between two ranks of a group one after the other, in the order of
# the calls: if one rank sends first and the other one too, both wait. So the gradients go
# through a second group, `dist.new_group()`. gloo, which sends between processes on the CPU,
# has no such rule.


# %%
def first_stage(
    layers: nn.Module, order: str, images: list[torch.Tensor], back: dist.ProcessGroup
) -> list[int]:
    """Compute rank 0's stage for all micro-batches, in an order such as "F1 F2 B1 B2".

    Gradients come through the group `back`. Returns the number of micro-batches that are held
    after each of these actions.
    """
    outputs, sends, held = {}, {}, []
    for action in order.split():
        number = int(action[1:])
        if action[0] == "F":
            outputs[number] = layers(images[number - 1])
            sends[number] = dist.isend(outputs[number].detach(), dst=1)
        else:
            output = outputs.pop(number)
            gradient = torch.empty(output.shape, device=output.device)
            dist.recv(gradient, src=1, group=back)
            output.backward(gradient)
            sends.pop(number).wait()
        held.append(len(outputs))
    return held


def last_stage(
    layers: nn.Module,
    order: str,
    labels: list[torch.Tensor],
    back: dist.ProcessGroup,
    shape: tuple[int, ...],
) -> list[int]:
    """Compute rank 1's stage, as `first_stage` does. Activations have the shape `shape`."""
    losses, inputs, held = {}, {}, []
    sent = None  # the gradient that is under way
    for action in order.split():
        number = int(action[1:])
        if action[0] == "F":
            inputs[number] = torch.empty(shape, device=labels[0].device)
            dist.recv(inputs[number], src=0)
            outputs = layers(inputs[number].requires_grad_())
            losses[number] = F.cross_entropy(outputs, labels[number - 1], reduction="sum")
        else:
            losses.pop(number).backward()
            if sent is not None:
                sent.wait()
            sent = dist.isend(inputs.pop(number).grad, dst=0, group=back)
        held.append(len(losses))
    sent.wait()
    return held


# %% [markdown]
# Two processes with [gloo](../lessons/README.md#gloo), and 8 micro-batches of 8 images.
# `launch.call` starts them, runs the function in each, and returns what they return. Are the
# gradients equal to those of one process with the whole batch?
#
# Predict first: write your answers, then run the cell.

# %% tags=["active-ipynb", "guess"]
# guess_gpipe = 2  # with GPipe: micro-batches whose activations rank 0 holds, at most
# guess_1f1b = 1  # the same, with 1F1B

# %% tags=["active-ipynb"]
# lesson.need(guess_gpipe)
# train, _ = data.load(data.fetch(None))
# images, labels = train[:64]
#
#
# def by_hand(orders):
#     """This rank's gradients, and how many micro-batches it held after each action."""
#     dist.init_process_group("gloo", timeout=timedelta(seconds=20))
#     world = launch.find_world()
#     torch.manual_seed(0)
#     layers = stage(CNN(), world.rank, world.size)
#     order, back = orders[world.rank], dist.new_group()
#     if world.rank == 0:
#         held = first_stage(layers, order, images.chunk(8), back)
#     else:
#         # recv fills a tensor that exists already, so rank 1 must know the shape of what rank
#         # 0 sends: 8 images of a micro-batch, and 512 activations (32 channels of 4×4) each.
#         held = last_stage(layers, order, labels.chunk(8), back, shape=(8, 512))
#     return [weight.grad / len(images) for weight in layers.parameters()], held
#
#
# def check(orders):
#     """Run both ranks, compare their gradients; return what each rank held."""
#     ranks = launch.call(by_hand, 2, orders)
#     gradients = [gradient for own, _ in ranks for gradient in own]
#     torch.manual_seed(0)
#     serial = CNN()
#     F.cross_entropy(serial(images), labels).backward()
#     pairs = zip(gradients, serial.parameters(), strict=True)
#     difference = proof.largest((own - weight.grad).abs().max() for own, weight in pairs)
#     print(f"gradients equal to one process's within 1e-7: {difference < 1e-7}")
#     return [held for _, held in ranks]
#
#
# orders = {"gpipe": ["F1 F2 F3 F4 F5 F6 F7 F8 B1 B2 B3 B4 B5 B6 B7 B8"] * 2}
# held = {"gpipe": check(orders["gpipe"])}
# print("micro-batches held at most, by rank:", *map(max, held["gpipe"]))
# lesson.compare("GPipe, rank 0 holds", guess_gpipe, max(held["gpipe"][0]), digits=0)

# %% [markdown]
# ## Step 3 · 1F1B by hand
# Only the order changes. Rank 1 goes backward with each micro-batch at once. Rank 0 is one
# micro-batch ahead, so that the next activations are there when rank 1 needs them.

# %% tags=["active-ipynb"]
# lesson.need(guess_1f1b)
# orders["1f1b"] = [
#     "F1 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 F8 B7 B8",
#     "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8",
# ]
# held["1f1b"] = check(orders["1f1b"])
# print("micro-batches held at most, by rank:", *map(max, held["1f1b"]))
# lesson.compare("1F1B, rank 0 holds", guess_1f1b, max(held["1f1b"][0]), digits=0)
# curves = {
#     "GPipe, rank 0": held["gpipe"][0],
#     "1F1B, rank 0": held["1f1b"][0],
#     "1F1B, rank 1": held["1f1b"][1],
# }
# most, fewer, _ = map(max, curves.values())
# title = f"Rank 0 holds up to {most} micro-batches with GPipe, {fewer} with 1F1B"
# actions = range(1, len(held["gpipe"][0]) + 1)
# options = {"level": None, "powers": False}
# plots.lines(actions, curves, "actions done", "micro-batches held", title, **options)

# %% [markdown]
# With both orders, all micro-batches have gone backward before the optimizer's step, so the
# gradients are those of one process. The pipeline is empty then: this is the
# [flush](../lessons/README.md#flush).
#
# ## Step 4 · torch's tool
# `torch.distributed.pipelining` has both orders, for any number of stages. On GPUs use it, and
# not the functions above ("To go further" says why).


# %%
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
# ## Is 1F1B faster?
# Each rank has a [virtual GPU](../lessons/README.md#virtual-gpu), and simulates a step of the
# first notebook's wide CNN: 8 micro-batches of 512 images. Two cases have equal stages
# instead, with 16 linear layers each. With a free link the messages take no time. The formula
# for the [bubble](../lessons/README.md#bubble), 1/(m + 1), gives 11%. Write your answers, then
# run the cell. (The two orders by hand run, too, for the next section.)

# %% tags=["active-ipynb", "guess"]
# guess_equal = 1.5  # 1F1B with equal stages and a free link: times as fast as GPipe
# guess_nvlink = 1.5  # 1F1B with the CNN's stages and NVLink: times as fast as GPipe

# %% tags=["active-ipynb"]
# lesson.need(guess_equal, guess_nvlink)
# cases = {
#     "gpipe, equal stages, free link": (equal_stages, "gpipe", FREE_LINK),
#     "1f1b, equal stages, free link": (equal_stages, "1f1b", FREE_LINK),
#     "gpipe, CNN, free link": (stage, "gpipe", FREE_LINK),
#     "1f1b, CNN, free link": (stage, "1f1b", FREE_LINK),
#     "gpipe, CNN, NVLink": (stage, "gpipe", "NVLink2"),
#     "1f1b, CNN, NVLink": (stage, "1f1b", "NVLink2"),
# }
# by_hand_cases = {
#     f"{name} by hand": (stage, order, "NVLink2") for name, order in orders.items()
# }
# steps, timelines = simulated(cases | by_hand_cases, schedule, (first_stage, last_stage))
# seconds = {case: timeline.end - timeline.start for case, timeline in timelines.items()}
#
# print("simulated; the formula gives a bubble of 11%")
# for case in cases:
#     bubble = shares(timelines[case])["bubble"]
#     print(f"{case}: {1e3 * seconds[case]:.2f} ms, bubble {bubble:.0%}")
# one = on_one_gpu()
# faster = one / seconds["1f1b, CNN, NVLink"]
# print(f"one GPU, CNN: {1e3 * one:.2f} ms; 1f1b with NVLink is {faster:.2f} times as fast")
# equal = seconds["gpipe, equal stages, free link"] / seconds["1f1b, equal stages, free link"]
# nvlink = seconds["gpipe, CNN, NVLink"] / seconds["1f1b, CNN, NVLink"]
# lesson.compare("speed-up over GPipe, equal stages", guess_equal, equal)
# lesson.compare("speed-up over GPipe, CNN, NVLink", guess_nvlink, nvlink)

# %% [markdown]
# With equal stages and a free link, both orders take the same time, and the bubble is nearly
# the formula's: the order does not change it. The CNN's stages are not equal, so with both
# orders the bubble is larger, and 1F1B is slightly faster. ("To go further" says why.)
#
# With NVLink, two ranks are 1.35 times as fast as one GPU, and one process with two GPUs was
# 1.23 times as fast: there a transfer stops both GPUs. Here rank 0 computes while it sends.
#
# ## What does 1F1B save?
# GPipe holds 8 micro-batches, and 1F1B 2. So is the peak a quarter of GPipe's? Write your
# answer, then run the cell.

# %% tags=["active-ipynb", "guess"]
# guess_memory = 25  # % of GPipe's peak memory that 1F1B needs on rank 0, by hand

# %% tags=["active-ipynb"]
# lesson.need(guess_memory)
# metered = {
#     "gpipe": steps["gpipe, CNN, NVLink"],
#     "1f1b": steps["1f1b, CNN, NVLink"],
#     "gpipe by hand": steps["gpipe by hand"],
#     "1f1b by hand": steps["1f1b by hand"],
# }
# for name, ranks in metered.items():
#     print(f"{name}: peak MiB {ranks[0].peak:.0f} on rank 0, {ranks[1].peak:.0f} on rank 1")
#
# share = metered["1f1b"][0].peak / metered["gpipe"][0].peak
# hand = metered["1f1b by hand"][0].peak / metered["gpipe by hand"][0].peak
# lesson.compare("1F1B's peak by hand", guess_memory, 100 * hand, unit="%", digits=0)
# message = 512 * 32 * 14 * 14 * 4 / 2**20  # MiB: the activations that rank 0 sends
# for name in SCHEDULES:
#     more = metered[name][0].peak - metered[f"{name} by hand"][0].peak
#     print(f"{name}: the tool needs {more:.1f} MiB more: {more / message:.1f} messages")
# title = f"1F1B's peak on rank 0: {hand:.0%} of GPipe's by hand, {share:.0%} with the tool"
# draw_peaks(metered, title)

# %% [markdown]
# Count what rank 0 needs at its peak, in backward, as in the first notebook. A micro-batch has
# 512 images:
# - for each micro-batch that it holds, the outputs of both tanhs: 512 × (16 × 28 × 28 +
#   32 × 14 × 14) numbers of 4 bytes, 36.75 MiB;
# - with both orders, in the backward of one micro-batch, two gradients of conv1's size
#   (24.5 MiB each) and the gradient that has come from rank 1 (12.25 MiB);
# - with both orders, the images of the whole batch (12.25 MiB). The weights are small.
#
# So by hand, the peak falls from 8 × 36.75 + 73.5 to 2 × 36.75 + 73.5 MiB. torch's tool has a
# buffer for the gradient of each micro-batch, with both orders; by hand there is one buffer.
# The meter counts the tensors alone. A real GPU needs more, as in the first notebook.
#
# **In which order?** 1F1B, because it saves memory. With equal stages and a free link it saves
# no time.
#
# ## Step 5 · Train
# The first rank passes the images to the schedule, and the last one the labels. So all ranks
# must read the data in the same order. The schedule's `step` sends activations to the next
# rank and gradients back, and calls `backward` for each micro-batch. All micro-batches must
# have the same shape, so a smaller last batch is padded, with labels of −100, which the loss
# ignores. The folded cells put all together.


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


# %% jupyter={"source_hidden": true}
def set_up(args: argparse.Namespace) -> tuple[launch.World, torch.device, data.Batch]:
    """Connect the ranks, check the flags, and fetch the data once for each node."""
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
    return world, device, batch


def collect(model: CNN, layers: nn.Module, world: launch.World) -> None:
    """Copy the weights of all ranks' layers into the model, on every rank."""
    stages: list = [None] * world.size
    dist.all_gather_object(stages, layers.cpu().state_dict())
    for rank, weights in enumerate(stages):
        stage(model, rank, world.size).load_state_dict(weights)


def main(args: argparse.Namespace) -> None:
    world, device, batch = set_up(args)
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

    collect(model, layers, world)
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


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# `torchrun` starts the two ranks; lesson 05 explains it. Without GPUs they compute on the CPU.

# %% tags=["active-ipynb"]
# torchrun = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2"
# !OMP_NUM_THREADS=1 {torchrun} ../scripts/PT_CNN_Pipeline.py --prove --out results/03-pipeline

# %% tags=["active-ipynb"]
# print(metrics.route_row("03 pipeline, 1F1B", "results/03-pipeline"))

# %% [markdown]
# ## To go further: why is 1F1B faster with the CNN?
# How long does each rank of the CNN compute, and when does it wait? A bubble is the mean of
# both ranks'.

# %% tags=["active-ipynb"]
# for rank, spent in enumerate(phases(timelines["gpipe, CNN, free link"])):
#     forward, backward = spent["forward"], spent["backward"]
#     print(f"CNN, rank {rank}: forward {forward:.2f} ms, backward {backward:.2f} ms")
# figure = plots.figure(8, 5)
# drawn = ("gpipe, CNN, NVLink", "1f1b, CNN, NVLink")
# longer = max(seconds[case] for case in drawn)
# for place, case in enumerate(drawn, 1):
#     waits = shares(timelines[case])["bubble"]
#     title = f"{case}: {1e3 * seconds[case]:.2f} ms; a rank waits {waits:.0%} for the other"
#     timelines[case].plot(figure.add_subplot(2, 1, place), title, until=longer)
# plots.share_legend(figure)
# figure

# %% [markdown]
# Rank 0 takes longer, both forward and backward. So rank 1 waits for it in each slot, and with
# both orders the bubble is larger than the formula's.
#
# Rank 0 waits, too. In GPipe it waits once, while rank 1 takes micro-batch 8 forward and
# micro-batch 1 backward. In 1F1B it waits twice, for micro-batch 1 and for micro-batch 8, but
# each time it first computes another one: the forward of 2, the backward of 7. With equal
# stages both waits together are as long as GPipe's. Here they are shorter, because rank 1
# needs less time than rank 0, so 1F1B is slightly faster.
#
# With NVLink the messages take time, too. A rank asks for a message only when it needs it, so
# it waits while the message comes. In the middle of 1F1B a gradient comes back while an
# activation goes forward.
#
# ## To go further: on GPUs, and other orders
# The functions by hand are not safe with [NCCL](../lessons/README.md#nccl). It executes the
# messages between two ranks one after the other, and each message waits until both ranks take
# part in it. In 1F1B both ranks send before they receive, so by these rules they can wait for
# ever. (NCCL needs GPUs: this was not tried.) torch's tool gives NCCL the send and the receive
# in one batch.
#
# The tool also has orders with a shorter bubble, which this lesson does not try: interleaved
# ones, with several stages on each rank, and zero-bubble ones, which divide backward into two
# parts.

# %% [markdown] tags=["footer"]
# [← 03 Model parallelism](PT_CNN_ModelParallel.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/03-model-parallel/README.md) ·
# [04 DDP with mp.spawn →](PT_CNN_DDPSpawn.ipynb)
