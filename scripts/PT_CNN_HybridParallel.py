# %% [markdown]
# # 06 · Model and data parallel together
# **The question.** My model has 1.1 billion weights, and my GPUs have 16 GiB each. I have two
# nodes with two GPUs each. How do all four GPUs train this one model, and is it worth it?
#
# Steps 1 to 5 make the program and prove that it learns what one process learns. Steps 6 to 9
# ask when it is fast.
#
# Lesson 03 divided a model into [stages](../lessons/README.md#stage). Lesson 05 trained one
# [replica](../lessons/README.md#replica) per [rank](../lessons/README.md#rank) with
# [DDP](../lessons/README.md#ddp). Without GPUs, this lesson runs on
# [virtual](../lessons/README.md#virtual-gpu) ones.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import multigpu
from multigpu import data, devices, files, flags, launch, metrics, proof, rendezvous
from multigpu.errors import pluralize
from multigpu.models import CNN


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PT_CNN_HybridParallel",
        "Train a CNN with DDP; each rank has its copy on two GPUs.",
    )
    parser.add_argument(
        "--micro-batches",
        type=flags.positive,
        default=2,
        help="forward passes that a rank's part of the batch is split into (default: 2)",
    )
    parser.add_argument("--spawn", metavar="N", help="start N ranks on this machine")
    return parser.parse_args(arguments)


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# import contextlib
# import textwrap
#
# from multigpu import lesson, plots, vgpu
#
# lesson.setup("06-hybrid-parallel", ranks=True)
# from experiments import IMAGES, LARGE, TRANSFORMER
# from experiments import joined, layout_steps, one_process, overlapped_steps

# %% [markdown]
# ## Step 1 · Does the model fit?
# The model is the course's CNN with 90,000 hidden units and 6,000 classes. Nearly all weights
# are in two layers, so you can compute its memory and its messages on paper. (The tensors have
# shapes but no numbers: that is enough for memory and simulated time.) The GPUs are V100s.
# Predict first: write your answer, then run the cell.

# %% tags=["active-ipynb", "guess"]
# guess_memory = 4.4  # GiB that training needs for 1.1 billion weights in fp32 with Adam

# %% tags=["active-ipynb"]
# lesson.need(guess_memory)
# with torch.device("meta"):  # shapes only
#     weights = sum(weight.numel() for weight in CNN(**LARGE).parameters())
#
# needed = 16 * weights / 2**30
# print(f"{weights:,} weights × 16 bytes = {needed:.1f} GiB")
# lesson.compare("memory", guess_memory, needed, unit="GiB", digits=1)
# print(textwrap.fill(f"On one GPU: {one_process(None).error}", 95))

# %% [markdown]
# Training with Adam keeps four numbers per weight: the weight, its gradient, and two numbers
# of Adam's. Each number has 4 bytes. Together they are more than the V100's 16 GiB, so four
# replicas, one per GPU, cannot train this model.
#
# ## Step 2 · Two stages
# As in lesson 03, but `forward` divides the batch into micro-batches, and joins their outputs:
# the training loop passes whole batches, as it does for one GPU.


# %%
class Halves(CNN):
    """The CNN with its first `cut` layers on the GPU `first`, the others on `second`.

    The layers are conv1, conv2, fc1 and fc2; `cut` is 2 or 3.
    """

    def __init__(
        self,
        first: torch.device,
        second: torch.device,
        micro_batches: int,
        *args,
        cut: int = 2,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.first = first
        self.second = second
        self.micro_batches = micro_batches
        layers = [self.conv1, self.conv2, self.fc1, self.fc2]
        for layer in layers[:cut]:
            layer.to(first)
        for layer in layers[cut:]:
            layer.to(second)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = []
        for micro_batch in images.chunk(self.micro_batches):
            x = torch.tanh(self.conv1(micro_batch))
            x = torch.tanh(self.conv2(x)).flatten(1)
            x = torch.tanh(self.fc1(x.to(self.fc1.weight.device)))
            outputs.append(self.fc2(x.to(self.second)))  # a copy only if fc1 is on `first`
        return torch.cat(outputs)


# %% [markdown]
# Does a stage fit into 16 GiB? The large model is cut after fc1 (`cut=3`), which halves the
# weights: fc1 has 564 million, fc2 has 540 million. A step has 4,096 images, in 4
# micro-batches. For comparison, the whole model trains on a virtual GPU with 40 GiB.

# %% tags=["active-ipynb"]
# whole = one_process(None, memory="40GiB")
# pipeline = one_process(Halves)
# bars = {}
# for name, step in (("whole model", whole), ("stage", pipeline)):
#     for number, (held, peak) in enumerate(zip(step.held, step.peak), 1):
#         rest = peak - sum(held.values())
#         key = name if step is whole else f"{name} {number}"
#         bars[key] = held | {"activations and other": rest}
# title = f"A stage needs at most {max(pipeline.peak):.1f} GiB, the whole model "
# title += f"{whole.peak[0]:.1f}; a V100 has 16 (the line)"
# label = "peak, GiB, metered on virtual GPUs"
# figure = plots.stacked_bars(bars, label, title, totals=True, digits=1)
# figure.axes[0].axvline(16, color="black")
# display(figure)
# peaks = " and ".join(f"{peak:.1f}" for peak in pipeline.peak)
# print(f"two stages: peak {peaks} GiB")
# print(f"stage 1: {pipeline.forward[0]:.1f} GiB of activations after forward,", end=" ")
# print(f"at most {pipeline.update[0]:.1f} GiB in Adam's step")

# %% [markdown]
# Two stages fit. The peak is in backward. Then three more things are in memory: activations,
# their gradients, and the newest micro-batch's gradient of the weights, which is as large as
# the weights. The stages occupy one node. The second node is still idle.
#
# ## Step 3 · Two replicas of two stages, by hand
# The second node gets a second replica, and each replica gets half of the batch. After
# backward, each weight has two gradients, one in each replica. They are averaged between
# *twins*: GPUs that hold the same stage. Is the average what one process computes?


# %%
def average_twins(replicas: list[Halves]) -> None:
    """Set each weight's gradient to its mean over the replicas, in all replicas."""
    for twins in zip(*(replica.parameters() for replica in replicas), strict=True):
        gradients = [twin.grad.to(twins[0].device) for twin in twins]
        mean = torch.stack(gradients).mean(0)
        for twin in twins:
            twin.grad = mean.to(twin.device)


# %% tags=["active-ipynb"]
# train, _ = data.load(data.fetch(None))
# images, labels = train[:32]
#
#
# def new_model(kind, *placement):
#     torch.manual_seed(0)
#     return kind(*placement)
#
#
# serial = new_model(CNN)
# F.cross_entropy(serial(images), labels).backward()
# with vgpu.running(4) as gpus:
#     replicas = [new_model(Halves, *gpus[:2], 2), new_model(Halves, *gpus[2:], 2)]
#     for replica, its_images, its_labels in zip(replicas, images.chunk(2), labels.chunk(2)):
#         outputs = replica(its_images.to(replica.first))
#         F.cross_entropy(outputs, its_labels.to(replica.second)).backward()
#     average_twins(replicas)
#     pairs = zip(*(replica.parameters() for replica in replicas))
#     differences = {}  # the largest of each stage, on both of its GPUs
#     for twins, expected in zip(pairs, serial.parameters()):
#         stage = " and ".join(str(twin.device) for twin in twins)
#         found = [(twin.grad.cpu() - expected.grad).abs().max().item() for twin in twins]
#         differences[stage] = proof.largest([*found, differences.get(stage, 0)])
#     for stage, difference in differences.items():
#         print(f"{stage}: all gradients equal to the serial ones: {difference < 1e-7}")

# %% [markdown]
# The two replicas have the gradients of one model on the whole batch. (That needs chunks of
# equal size: see step 5.)
#
# ## Step 4 · With DDP
# One rank per replica, and `DDP` is the same as in lesson 05: it takes a module that is on
# several devices, if it gets no `device_ids`. It reads the device of each weight, and its
# [all-reduce](../lessons/README.md#all-reduce) averages each gradient over the twins. Each
# rank takes two GPUs of its node: local rank 1 has `cuda:2` and `cuda:3`.


# %%
def set_up() -> tuple[launch.World, list[torch.device]]:
    world = launch.find_world(gpus_each=2)
    gpus = multigpu.gpus(2, world)
    store = rendezvous.open_store(world, gpus[0])
    dist.init_process_group(
        devices.backend(gpus[0]),
        store=store,
        rank=world.rank,
        world_size=world.size,
    )
    return world, gpus


# %% [markdown]
# Are DDP's gradients those of one process, too?

# %% tags=["active-ipynb"]
# def ddp_gradients(halves, batches, classes):
#     """In each rank: the gradients after DDP's backward with the rank's part of the batch."""
#     with contextlib.redirect_stdout(None):  # not the line that announces virtual GPUs
#         world, gpus = set_up()
#     torch.manual_seed(0)
#     model = DDP(halves(*gpus, 2))
#     outputs = model(batches[world.rank].to(gpus[0]))
#     F.cross_entropy(outputs, classes[world.rank].to(gpus[1])).backward()
#     gradients = [weight.grad.cpu() for weight in model.parameters()]
#     dist.destroy_process_group()
#     return gradients
#
#
# by_ddp = launch.call(ddp_gradients, 2, Halves, images.chunk(2), labels.chunk(2))
# for rank, own_gradients in enumerate(by_ddp):
#     pairs = zip(own_gradients, serial.parameters())
#     difference = proof.largest((own - weight.grad).abs().max() for own, weight in pairs)
#     print(f"rank {rank}: all gradients equal to the serial ones: {difference < 1e-7}")

# %% [markdown]
# ## Step 5 · Train, and prove it
# The loop is that of lesson 05. Only the lines with `halves.first` and `halves.second` are
# new: images go to the first GPU of the rank, labels and losses to its second. The shards can
# be unequal, so each rank divides its sum of losses by the images of all ranks.


# %%
def train_epoch(
    model: DDP,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    batch: data.Batch,
    world: launch.World,
) -> float:
    """Train for one epoch. Returns the mean loss over all images of all ranks."""
    halves = model.module
    images_in_all = len(loader.dataset)
    total = torch.zeros((), dtype=torch.float64, device=halves.second)
    for step, (images, labels) in enumerate(metrics.progress(loader, world)):
        # The sampler repeats images to make all shards equal in size: a repeat gets weight 0.
        index = step * batch.micro_batches  # the step's first micro-batch
        real = data.real_rows(images_in_all, batch, world.rank, index, len(labels))
        outputs = model(images.to(halves.first))
        losses = F.cross_entropy(outputs, labels.to(halves.second), reduction="none")
        loss = (losses * real.to(halves.second)).sum()

        # DDP averages over ranks; the mean over images is wanted.
        optimizer.zero_grad()
        (loss * world.size / batch.images_in_step(step, images_in_all)).backward()
        optimizer.step()
        total += loss.detach()

    dist.all_reduce(total)
    return total.item() / images_in_all


@torch.no_grad()
def accuracy(model: Halves, test: TensorDataset, world: launch.World) -> float:
    """The accuracy on the whole test set, the same number on every rank."""
    shard = Subset(test, range(world.rank, len(test), world.size))
    hits = torch.zeros((), dtype=torch.float64, device=model.second)
    for images, labels in DataLoader(shard, batch_size=256):
        predictions = model(images.to(model.first)).argmax(1)
        hits += (predictions == labels.to(model.second)).sum()
    dist.all_reduce(hits)
    return hits.item() / len(test)


# %% [markdown]
# `main` puts this together. With `--prove`, one process then trains alone with the same
# batches, and its weights are compared.


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    world, gpus = set_up()
    serial_device = devices.serial_device(gpus, exact=args.prove)
    with rendezvous.fail_together(world):
        batch = flags.split_batch(args.batch_size, world.size, args.micro_batches)
        if world.rank == 0:
            files.writable_folder(args.out)
        if world.local_rank == 0:  # one download for each node
            data.fetch(args.data)
    with rendezvous.fail_together(world):
        train, test = data.load(data.fetch(args.data))
    rendezvous.same_everywhere(world, "the training data", data.checksum(train))

    def new_model(kind: type[CNN], *placement: object) -> CNN:
        torch.manual_seed(args.seed)
        return kind(*placement, tuple(train[0][0].shape), data.num_classes(train, test))

    model = DDP(new_model(Halves, *gpus, batch.micro_batches))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    sampler = DistributedSampler(train, world.size, world.rank, seed=args.seed)
    images_per_rank = batch.micro_batches * batch.per_micro_batch
    if world.rank == 0:
        print(devices.describe(world, gpus[0], each=2))
        print(f"{pluralize(world.size, 'replica')} of 2 stages")
        per_rank = f"{batch.micro_batches} (micro-batches) × {batch.per_micro_batch} (images)"
        print(f"global batch {batch.global_size} = {world.size} (replicas) × {per_rank}\n")
        print(metrics.header(), flush=True)

    history = []
    for epoch in range(args.epochs):
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        loader = DataLoader(train, images_per_rank, sampler=sampler)
        loss = train_epoch(model, optimizer, loader, batch, world)
        metrics.check_loss(loss, epoch, world)
        images_per_s = len(train) / (time.perf_counter() - began)
        row = {
            "epoch": epoch + 1,
            "loss": loss,
            "test_accuracy": accuracy(model.module, test, world),
            "images_per_s": images_per_s,
        }
        history.append(row)
        if world.rank == 0:
            print(metrics.row(row), flush=True)
    dist.destroy_process_group()

    if world.rank == 0:
        weights = {name: weight.cpu() for name, weight in model.module.state_dict().items()}
        with files.atomic(args.out / "model.pt") as temporary:
            torch.save(weights, temporary)
        verdict = None
        if args.prove:
            claim = f"{pluralize(world.size, 'replica')} × 2 stages equals one process"
            fresh = new_model(CNN).to(serial_device)
            verdict = proof.compare_with_serial(
                claim, model.module, fresh, train, args, batch_size=batch.global_size
            )
        metrics.report(
            args.out,
            world,
            gpus[0],
            history,
            verdict,
            devices=2 * world.size,
            batch_size=batch.global_size,
        )


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# Two ranks, four GPUs. Do ten epochs (up to a minute) give the weights that one process gets?
# (On two nodes of a cluster: `sbatch slurm/PT_CNN_HybridParallel.slurm`.)

# %% tags=["active-ipynb"]
# script = "../scripts/PT_CNN_HybridParallel.py"
# !OMP_NUM_THREADS=1 python {script} --spawn 2 --prove --out results/06

# %% tags=["active-ipynb"]
# print(metrics.route_row("06 model and data parallel", "results/06"))  # for all routes' table

# %% [markdown]
# ## Step 6 · Which GPUs hold the stages of one replica?
# The program is right. Is it fast? The four GPUs can hold two replicas of two stages in two
# ways: each replica on one node (*stages inside*), or each on both nodes (*stages across*).
# NVLink joins the GPUs of a node, 10 Gb/s Ethernet the nodes. A step of the large model has
# 8,192 images in micro-batches of 1,024: 4 for each replica, or 8 if one node trains alone. An
# image has 90,000 activations where the model is cut. The pipeline is
# [GPipe](../lessons/README.md#gpipe) with blocking copies: all micro-batches go forward, then
# all backward, and a plain `.to()` stops both GPUs. (Here a process may use GPUs of both
# nodes. A real one may not: the answer below says how to run stages across.) Predict:

# %% tags=["active-ipynb", "guess"]
# guess_inside = 10  # stages inside: times as fast as stages across
# guess_two_nodes = 2  # stages inside, both nodes: times as fast as one node

# %% tags=["active-ipynb"]
# lesson.need(guess_inside, guess_two_nodes)
# layouts = ("stages inside nodes", "stages across nodes")
# ethernet = [("large", layout, "Ethernet10") for layout in layouts]
# by_rank = launch.call(layout_steps, 2, ethernet, Halves)
# inside, across = (step.images / step.seconds for step in by_rank[0])
# alone = one_process(Halves, images=IMAGES, micro_batches=8)
# one_node = alone.images / alone.seconds
# print(f"Ethernet10, images/s simulated: inside {inside:.0f}, across {across:.0f},", end=" ")
# print(f"one node {one_node:.0f}")
# what = "inside, times as fast as across"
# lesson.compare(what, guess_inside, inside / across, unit="×", digits=1)
# what = "both nodes, times as fast as one"
# lesson.compare(what, guess_two_nodes, inside / one_node, unit="×")

# %% [markdown]
# Two nodes train *fewer* images/s than one. The timeline shows what the GPUs do meanwhile,
# with stages inside. White in a lane is time in which the GPU only waits for the transfer or
# all-reduce drawn below it.

# %% tags=["active-ipynb"]
# timeline = joined([steps[0] for steps in by_rank])
# share = timeline.busy(0, "collective")
# timeline.plot(title=f"Stages inside: the all-reduce takes {share:.0%} of the step")

# %% [markdown]
# A gradient is complete only when the last micro-batch has gone backward, so the all-reduce
# hides behind almost nothing. With stages across, other messages cross the slow network:

# %% tags=["active-ipynb"]
# timeline_across = joined([steps[1] for steps in by_rank])
# share = timeline_across.busy(0, "transfer")
# title = f"Stages across: transfers take {share:.0%} of the step, first one way, then back"
# timeline_across.plot(title=title)

# %% [markdown]
# How long do these messages take? The network carries bytes in both directions at once.
#
# - Stages inside: each GPU sends half of its gradients, then half of their sums, and receives
#   as much meanwhile. Both GPUs of a node share its adapter, so a node sends as many bytes as
#   the model has gradients.
# - Stages across: fc1's outputs for all images go one way. Their gradients come back later.
#
# With half of the images there are half as many activations, but as many gradients. Does the
# layout with the shorter messages win each time?

# %% tags=["active-ipynb"]
# bandwidth = vgpu.NETWORKS["Ethernet10"].bandwidth
# gradients = 4 * weights  # bytes
# half = IMAGES // 2
# steps, _ = launch.call(layout_steps, 2, ethernet, Halves, images=half)
# half_inside, half_across = (step.images / step.seconds for step in steps)
# for count, ratio in ((IMAGES, inside / across), (half, half_inside / half_across)):
#     there_and_back = 2 * 4 * count * LARGE["hidden"]
#     print(f"{count:,} images: gradients {gradients / bandwidth:.1f} s,", end=" ")
#     faster, times = ("inside", ratio) if ratio > 1 else ("across", 1 / ratio)
#     print(f"activations {there_and_back / bandwidth:.1f} s: {faster} is", end=" ")
#     print(f"{times:.1f} times as fast")

# %% [markdown]
# It does: in these cases almost nothing hides the messages.
#
# ## Step 7 · Hide the messages, or take a faster network
# *Overlap* can hide messages: a transfer on a [stream](../lessons/README.md#stream) of its own
# does not stop the GPUs. So can the *order*: in [1F1B](../lessons/README.md#1f1b) stage 1 has
# 2 micro-batches *in flight*. It computes two, then waits for a gradient before each next one.
# `Overlapped` in experiments.py takes both orders, and others. The all-reduce still begins
# after backward. The messages are as long as before: 8,192 images, 10 Gb/s. With overlap and
# 1F1B, which layout is faster?

# %% tags=["active-ipynb", "guess"]
# guess_hidden = 0.8  # 1F1B: stages across, times as fast as stages inside

# %% tags=["active-ipynb"]
# lesson.need(guess_hidden)
# networks = ("Ethernet10", "Ethernet25", "RoCE100", "HDR200")
# # The micro-batches in flight on stage 1 and on stage 2, of 4.
# orders = {"GPipe": (4, 4), "1F1B": (2, 1), "3 in flight": (3, 1)}
# pairs = [(order, name) for name in networks for order in orders.values()]
# pairs.append(((1, 1), networks[0]))
# cases = [(order, layout, name) for order, name in pairs for layout in layouts]
# found, _ = launch.call(overlapped_steps, 2, cases, Halves)
# hidden = dict(zip(cases, found))
# one_case = [((2, 1), layouts[0], networks[0])]
# [[alone]] = launch.call(overlapped_steps, 1, one_case, Halves, micro_batches=8)
# one_node_1f1b = alone.speed  # one node alone
#
# print("Ethernet10, images/s simulated: inside, across")
# print(f"GPipe, blocking copies: {inside:.0f}, {across:.0f}: across is", end=" ")
# print(f"{across / inside:.2f} times as fast")
# for name, order in (orders | {"1 in flight": (1, 1)}).items():
#     first, second = (hidden[order, layout, networks[0]] for layout in layouts)
#     print(f"{name}, overlapping: {first.speed:.0f}, {second.speed:.0f}: across is", end=" ")
#     print(f"{second.speed / first.speed:.2f} times as fast; peak {second.peak:.1f} GiB")
# print(f"one node, 1F1B, overlapping: {one_node_1f1b:.0f}")
# inside_1f1b, across_1f1b = (hidden[(2, 1), layout, networks[0]].speed for layout in layouts)
# ratio = across_1f1b / inside_1f1b
# lesson.compare("1F1B: across against inside", guess_hidden, ratio, unit="×", digits=1)

# %% [markdown]
# Overlap alone is not enough here: with GPipe all activations go, then all gradients come
# back. With 1F1B both cross at once, and *across* is faster. With 3 in flight it is faster
# still, and needs more memory. No order helps stages inside much: their all-reduce hides
# behind nothing. And one node is faster than two.
#
# The faster networks are Ethernet with 25 Gb/s; RoCE100, Ethernet with 100 Gb/s that GPUs
# write to directly; and HDR200, InfiniBand with 200 Gb/s for each GPU. Does the layout still
# matter there?

# %% tags=["active-ipynb", "guess"]
# guess_fast = 2  # HDR200, 1F1B, stages across: both nodes, times as fast as one node

# %% tags=["active-ipynb"]
# lesson.need(guess_fast)
# print(f"{'images/s simulated, overlap':33}" + "".join(f"{name:>12}" for name in networks))
# for name, order in orders.items():
#     for layout in layouts:
#         speeds = (hidden[order, layout, network].speed for network in networks)
#         row = "".join(f"{speed:12.0f}" for speed in speeds)
#         print(f"{name + ', ' + layout:33}{row}")
# print("1F1B, stages across, times as fast as inside; as one node")
# for name in networks:
#     old, new = (hidden[(2, 1), layout, name].speed for layout in layouts)
#     print(f"{name}: {new / old:.2f}; {new / one_node_1f1b:.2f}")
# what = "HDR200, both nodes against one"
# lesson.compare(what, guess_fast, new / one_node_1f1b, unit="×", digits=1)

# %% [markdown]
# From 25 Gb/s on, overlap alone makes across faster, and with 100 Gb/s 2 micro-batches in
# flight are too few. With HDR200 the layouts of 1F1B differ by less than the simulator's
# [error](../lessons/virtual.md).
#
# ## Step 8 · Another model
# A transformer has fewer activations for its weights. Six transformer blocks with a hidden
# size of 3,840 have 1.1 billion weights, too, but only 3,840 activations per token where they
# are cut in halves. A step has 8,192 tokens: 8 sequences of 1,024, each a micro-batch. The
# order is GPipe with blocking copies again. Compute the time of the messages with 10 Gb/s
# Ethernet, then predict:

# %% tags=["active-ipynb", "guess"]
# guess_blocks = 0.8  # the transformer, stages across: times as fast as stages inside

# %% tags=["active-ipynb"]
# lesson.need(guess_blocks)
# blocks, size, _ = TRANSFORMER.values()
# seconds = [4 * 12 * blocks * size**2, 2 * 4 * IMAGES * size]  # a block: 12 × size² weights
# seconds = [nbytes / bandwidth for nbytes in seconds]
# print("transformer: gradients {:.1f} s, activations {:.1f} s".format(*seconds))
#
# cases = [("transformer", layout, "Ethernet10") for layout in layouts]
# steps, _ = launch.call(layout_steps, 2, cases, Halves)
# steps.append(one_process(Halves, model="transformer", images=IMAGES, micro_batches=8))
# of_blocks = [step.images / step.seconds for step in steps]
# text = "tokens/s simulated: inside {:.0f}, across {:.0f}, one node {:.0f}"
# print(text.format(*of_blocks))
# what = "across, times as fast as inside"
# lesson.compare(what, guess_blocks, of_blocks[1] / of_blocks[0], unit="×", digits=1)

# %% [markdown]
# With 10 Gb/s Ethernet this transformer's stages belong *across* the nodes, and the second
# node is worth it.
#
# ## Step 9 · A model that fits
# The same four GPUs, with HDR200 and a model that needs no stages: lesson 03's CNN with 320
# hidden units. Now four replicas can run, one per GPU. Are they faster than 2 × 2, two
# replicas of two stages? Which needs more memory on a GPU?

# %% tags=["active-ipynb", "guess"]
# guess_replicas = 1  # four replicas: times as fast as 2 × 2

# %% tags=["active-ipynb"]
# lesson.need(guess_replicas)
# ((two_by_two,), _) = launch.call(layout_steps, 2, [("small", layouts[0], "HDR200")], Halves)
# (four, *_), *_ = launch.call(layout_steps, 4, [("small", "four replicas", "HDR200")], Halves)
# for name, step in (("2 × 2", two_by_two), ("four replicas", four)):
#     held = " and ".join(f"{1024 * gib:.0f}" for gib in step.forward)
#     peaks = " and ".join(f"{1024 * gib:.0f}" for gib in step.peak)
#     print(f"{name}: {1000 * step.seconds:.1f} ms simulated,", end=" ")
#     print(f"activations {held} MiB per GPU, peak {peaks} MiB")
#
# ratio = two_by_two.seconds / four.seconds
# what = "four replicas, times as fast as 2 × 2"
# lesson.compare(what, guess_replicas, ratio, unit="×", digits=1)

# %% [markdown]
# Stages wait for each other. And they divide the weights, not the activations: a stage has the
# activations of its own layers only, but for twice as many images, because there are half as
# many replicas. Here nearly all activations are in the convolutions, so stage 1 needs more
# memory than a whole replica. The activations at the cut are held on both GPUs.
#
# So if a model fits, try replicas first.
#
# **The answer.** All four GPUs train the large model as two replicas of two stages, and learn
# what one process learns. Before you choose a layout, compute two things: the memory of a GPU,
# and the time of the messages that cross the slow network.
#
# - If nothing hides the messages (GPipe, blocking copies), the layout with the shorter ones is
#   faster: with 10 Gb/s inside for the CNN with 8,192 images, across for the transformer.
# - With overlap, 1F1B and 10 Gb/s the CNN's stages across are faster, too, with 3
#   micro-batches in flight more so than with 2. With HDR200 the layout makes almost no
#   difference.
# - The second node: with 10 Gb/s it is worth it for the transformer, not for the CNN. With
#   1F1B across it gives the CNN little with 25 Gb/s, and much with HDR200.
#
# **How to run stages across.** `Halves` needs both GPUs in one process, so it runs inside a
# node only. Stages across need one rank per stage: it sends activations or gradients to a rank
# on the other node and receives the others, as in [lesson 03](PT_CNN_Pipeline.ipynb). The two
# ranks of a node hold the same stage, and average its gradients in a group of their own.
#
# ## To go further: without stages
# Four whole replicas of the large model do not fit. With [FSDP](../lessons/README.md#fsdp)
# (fully sharded data parallel) each GPU keeps only a [shard](../lessons/README.md#shard) of
# each weight, of its gradient and of Adam's two numbers. But each GPU computes all layers, for
# its part of the batch:
#
# - Before it computes a layer, an [all-gather](../lessons/README.md#all-gather) gives it the
#   layer's other shards. It deletes them after the layer, and gathers them again in backward.
# - After a layer's backward, a [reduce-scatter](../lessons/README.md#reduce-scatter) averages
#   the gradients, and leaves each GPU its own shard of the average.
#
# ```text
# one layer    forward:  all-gather → compute → delete the other shards
#              backward: all-gather → compute → reduce-scatter → delete the other shards
# ```
#
# There are two ways. *Over four GPUs*, each keeps a quarter. *Inside nodes*, each node has a
# replica, and each of its GPUs keeps a half; an all-reduce between the nodes averages the
# gradients, as with stages inside.
#
# `fully_shard` is torch's FSDP. A *mesh* numbers the GPUs in one dimension or in two: weights
# are sharded over the last one. Are the gradients those of one process? Four CPU processes,
# the course's CNN, and the 32 images of step 3. (On GPUs the mesh's device is `"cuda"`.)

# %% tags=["active-ipynb"]
# from torch.distributed.device_mesh import init_device_mesh
# from torch.distributed.fsdp import fully_shard
#
# ways = ("FSDP over four GPUs", "FSDP inside nodes")
#
#
# def shard_weights(model, way, device="vgpu"):
#     if way == "FSDP over four GPUs":
#         mesh = init_device_mesh(device, (4,), mesh_dim_names=("GPUs",))
#     else:  # 2 nodes × 2 GPUs
#         mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("nodes", "GPUs"))
#     for layer in model.children():
#         fully_shard(layer, mesh=mesh)
#     fully_shard(model, mesh=mesh)
#
#
# def fsdp_gradients(batches, classes):
#     """In each rank, for both ways: its shard of fc1's weight, and the whole gradients."""
#     dist.init_process_group("gloo")
#     rank = dist.get_rank()
#     found = []
#     for way in ways:
#         torch.manual_seed(0)
#         model = CNN()
#         shard_weights(model, way, "cpu")
#         F.cross_entropy(model(batches[rank]), classes[rank]).backward()
#         gradients = [weight.grad.full_tensor() for weight in model.parameters()]
#         found.append((tuple(model.fc1.weight.to_local().shape), gradients))
#     dist.destroy_process_group()
#     return found
#
#
# print("fc1's weight:", tuple(serial.fc1.weight.shape))
# of_rank_0, *_ = launch.call(fsdp_gradients, 4, images.chunk(4), labels.chunk(4))
# for way, (shard, whole_gradients) in zip(ways, of_rank_0):
#     pairs = zip(whole_gradients, serial.parameters())
#     difference = proof.largest((own - weight.grad).abs().max() for own, weight in pairs)
#     print(f"{way}: a rank keeps {shard}, all gradients equal: {difference < 1e-7}")

# %% [markdown]
# They are. Now the large model, 8,192 images, and 10 Gb/s Ethernet. How fast is FSDP inside
# nodes, against GPipe with stages inside?

# %% tags=["active-ipynb", "guess"]
# guess_nodes = 1  # FSDP inside nodes: times as fast as 2 × 2 (GPipe, stages inside)

# %% tags=["active-ipynb"]
# lesson.need(guess_nodes)
# ends = ("Ethernet10", "HDR200")
# cases = [("large", way, name) for way in ways for name in ends]
# steps, *_ = launch.call(layout_steps, 4, cases, Halves, shard=shard_weights)
# for way, slow, fast in zip(ways, steps[::2], steps[1::2]):
#     print(f"{way}: peak {slow.peak[0]:.1f} GiB,", end=" ")
#     print(f"images/s simulated with {ends[0]}: {slow.images / slow.seconds:.0f},", end=" ")
#     print(f"with {ends[1]}: {fast.images / fast.seconds:.0f}")
# in_nodes = steps[2].images / steps[2].seconds
# what = "FSDP inside nodes against 2 × 2"
# lesson.compare(what, guess_nodes, in_nodes / inside, unit="×", digits=1)
# # Over four GPUs a node sends 3 of 4 shards 3 times: the weights twice, the gradients once.
# sent = 3 * 3 / 4 * gradients
# print(f"over four GPUs: {sent / 1e9:.1f} GB from each node:", end=" ")
# print(f"{sent / bandwidth:.1f} s with {ends[0]}")

# %% [markdown]
# With FSDP there are no stages, so there is no bubble. But the weights are sent, too. Over
# four GPUs they cross the Ethernet: 8.0 s of messages, against 3.5 s for the gradients of
# 2 × 2. Inside nodes the weights are sent by NVLink, and only the gradients cross the slow
# network, as with 2 × 2.
#
# Compare with the tables of step 7: with 10 Gb/s 1F1B across the nodes is slightly faster than
# FSDP, and clearly with 3 in flight. With HDR200 both ways of FSDP are faster than each
# pipeline there.

# %% [markdown] tags=["footer"]
# [← 05 DDP on a cluster](PT_CNN_MultiGPU.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/06-hybrid-parallel/README.md) ·
# [07 MirroredStrategy →](TF_CNN_MultiGPU.ipynb)
