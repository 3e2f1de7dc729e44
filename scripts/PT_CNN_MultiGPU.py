# %% [markdown]
# # 05 · DDP on a cluster: torchrun and Slurm, one node and many
# **The question.** A program trains on one GPU. The cluster has 2 nodes (machines) with 2 GPUs
# each. What must change, and do four GPUs learn the same as one?
#
# You need neither GPU nor cluster: without GPUs, the ranks compute on the CPU. The words
# [rank](../lessons/README.md#rank), [world size](../lessons/README.md#world-size),
# [process group](../lessons/README.md#process-group) and
# [all-reduce](../lessons/README.md#all-reduce) are [lesson 04's](PT_CNN_DDPSpawn.ipynb).

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# import difflib
# import re
# from pathlib import Path
#
# from multigpu import lesson, plots, vgpu
#
# lesson.setup("05-ddp-cluster", ranks=True)
# from experiments import (
#     SyncedBatchNorm,
#     all_reduces,
#     batch_norm_steps,
#     clipped_gradients,
#     free_port,
#     hidden,
#     simulated_steps,
# )
#
# folder = Path("../lessons/05-ddp-cluster")
# gpus = torch.cuda.device_count() or 2  # without GPUs: two ranks on the CPU
# ranks = max(number for number in (1, 2, 4, 8) if number <= gpus)  # they divide 120 and 64
# torchrun = f"torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node={ranks}"

# %% [markdown]
# ## DDP in 40 lines
# This program is plain torch, without the course's library. `torchrun` is a *launcher*: it
# starts one process for each GPU and gives each its rank. `DDP` (DistributedDataParallel)
# wraps the model, and averages the gradients over the ranks.

# %% tags=["active-ipynb"]
# print((folder / "ddp.py").read_text())

# %% [markdown]
# ## Predict first
# `one_gpu.py` trains the same model on the same images, in batches of 120, on one GPU. Write
# your answers, then run the cell. The cells below compare them with what happens.

# %% tags=["active-ipynb", "guess"]
# guess_lines = 60  # how many lines of ddp.py differ from one_gpu.py, or are new?
# guess_equal = "no"  # the same weights after 10 epochs, within 1e-6? "yes" or "no"
# guess_changed = 4  # how many lines of ddp.py must change before it trains on two nodes?

# %% tags=["active-ipynb"]
# lesson.need(guess_lines)
# command = "diff -U0 --label one_gpu.py --label ddp.py one_gpu.py ddp.py"
# changes = !cd {folder} && {command} | grep "^[-+]"
# print("\n".join(changes))
# added = sum(line.startswith("+") for line in changes) - 1  # without the line +++
# lesson.compare("new or changed lines", guess_lines, added, digits=0)

# %% [markdown]
# Five of these lines are text or a workaround for torch 2.13: two of the docstring, the import
# of `functional`, the comment near the end, and `del ddp`. Of the others:
#
# - `LOCAL_RANK` is the rank's number on its node: it chooses the GPU. `set_device` makes this
#   GPU the *current* one. Without it, each rank's current GPU is GPU 0.
# - `init_process_group` connects the ranks: by NCCL between GPUs, by gloo between CPUs.
# - `DDP(model)` copies rank 0's weights to all ranks. Each `backward()` averages the
#   gradients. All ranks make the same update to the same weights, so these stay the same.
#   Training calls `ddp`. The last lines test and save `model`, which has the same weights.
# - `DistributedSampler` gives each rank its shard of the images. `set_epoch` shuffles anew:
#   without it every epoch has the order of the first.
# - Each rank takes its part of the *global batch*, the 120 images of a step: `120 // ranks`.
#   The number of ranks must divide 120. Both samplers shuffle with the seed 0 + epoch, so both
#   programs have the same 120 images in each step.
# - Only rank 0 prints and saves. `destroy_process_group` closes the connections.
#
# The next cell runs `one_gpu.py` in the notebook, by `%run`, and starts `ddp.py`, which takes
# some seconds.

# %% tags=["active-ipynb"]
# lesson.need(guess_equal, choices=("yes", "no"))
# !mkdir -p results
# %run {folder}/one_gpu.py results/one_gpu.pt
# !OMP_NUM_THREADS=1 {torchrun} {folder}/ddp.py results/ddp.pt
#
#
# def difference_from_one_gpu(path):
#     one_gpu = torch.load("results/one_gpu.pt", map_location="cpu")
#     several = torch.load(path, map_location="cpu")
#     return proof.largest((one_gpu[name] - several[name]).abs().max() for name in one_gpu)
#
#
# equal = "yes" if difference_from_one_gpu("results/ddp.pt") < 1e-6 else "no"
# lesson.compare("the same weights within 1e-6", guess_equal, equal)

# %% [markdown]
# ## Two nodes
# On two nodes, one torchrun runs on each. This is the command on node 0. The command on node 1
# has `--node-rank=1`, and the rest is the same:
#
# ```
# torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 \
#     --master-addr=node0 --master-port=29500 two_nodes.py weights.pt
# ```
#
# - `--nnodes` is the number of nodes, and `--node-rank` the number of this one.
# - `--nproc-per-node` is the number of ranks on this node, one for each GPU.
# - `--master-addr` is the name or the address of node 0, and `--master-port` a free port of
#   that node. All ranks connect to it: the [rendezvous](../lessons/README.md#rendezvous).
# - `--standalone`, in the commands for one node, replaces these two: torchrun chooses a free
#   port of its own node. With `--local-addr` the node's name need not resolve.
#
# The next cell starts both torchruns on this machine. Each stands for one node, and starts two
# ranks on the CPU. The ranks run `two_nodes.py`, a copy of `ddp.py`: change it in the cell if
# you think that it must change. (Some seconds.)

# %% tags=["active-ipynb"]
# lesson.need(guess_changed)
# one_node = (folder / "ddp.py").read_text()
# two_nodes = one_node  # or one_node.replace("old line", "new line")
# Path("results/two_nodes.py").write_text(two_nodes)
#
# address = f"--local-addr=127.0.0.1 --master-addr=127.0.0.1 --master-port={free_port()}"
# node = f"torchrun --nnodes=2 --nproc-per-node=2 {address}"
# program = "results/two_nodes.py results/four.pt"
# settings = "export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="  # without GPUs: on the CPU
# # A file gets node 1's messages: it reports a lost connection if node 0 ends first: harmless.
# second = f"{node} --node-rank=1 {program} 2> results/node-1.log"
# !{settings}; {second} & {node} --node-rank=0 {program} && wait
#
# # The limit is 1e-5, because one_gpu.py may have used a GPU, which rounds differently.
# equal = "yes" if difference_from_one_gpu("results/four.pt") < 1e-5 else "no"
# print(f"four ranks on two nodes: the weights of one_gpu.py within 1e-5? {equal}")
# lines = difflib.ndiff(one_node.splitlines(), two_nodes.splitlines())
# changed = sum(line.startswith("+ ") for line in lines)
# lesson.compare("lines that differ from ddp.py", guess_changed, changed, digits=0)

# %% [markdown]
# The program is the same. torchrun sets variables for each rank. `init_process_group` reads
# four of them: `RANK`, the rank's number among all ranks, `WORLD_SIZE`, `MASTER_ADDR` and
# `MASTER_PORT`. On a cluster a job file fills in torchrun's options ("On a cluster", below).
#
# ## When are the gradients sent?
# Backward begins with the last layer. DDP collects gradients in *buckets*. When a bucket is
# full, its all-reduce begins, while backward goes on with the layers before it.
#
# Two GPUs, simulated, train the CNN with 256 images of 28×28 each. First one bucket holds all
# gradients. Then a bucket is full at 1 MiB: the two linear layers are in the first bucket, the
# two convolutions in the second.

# %% tags=["active-ipynb", "guess"]
# # Two buckets: in how much of the all-reduces' time does backward compute other gradients?
# guess_hidden = 50  # %

# %% tags=["active-ipynb"]
# lesson.need(guess_hidden)
# cases = [(25, 1, True), (1, 1, True)]  # MiB of a bucket, micro-batches, no_sync
# of_ranks = zip(*launch.call(simulated_steps, 2, cases, batch=256, link="PCIe3"))
# one_bucket, two_buckets = map(vgpu.Timeline.of_ranks, of_ranks)
#
#
# def milliseconds(step):
#     return 1e3 * (step.end - step.start)
#
#
# def draw(name, step):
#     share = f"{hidden(step):.0%} of the all-reduces' time is hidden"
#     print(f"{name}: {milliseconds(step):.2f} ms per step, simulated; {share}")
#     longest = max(milliseconds(one_bucket), milliseconds(two_buckets)) / 1e3
#     return step.plot(title=f"{name.capitalize()}: {share}", until=longest)
#
#
# draw("one bucket", one_bucket)

# %% tags=["active-ipynb"]
# found = 100 * hidden(two_buckets)
# lesson.compare("hidden, with two buckets", guess_hidden, found, unit="%", digits=0)
# draw("two buckets", two_buckets)

# %% [markdown]
# The all-reduce of one bucket can begin only after the last gradient: nothing of backward is
# left to hide it. With two buckets, this is so for bucket 2 alone. DDP copies gradients into
# the buckets, and their averages out of them (orange; not in the schematic on the lesson's
# page). White without green below it means that the GPU waits until the CPU launches the next
# kernel.
#
# DDP's own sizes are 1 MiB for the first bucket and 25 MiB for the others. The CNN for the
# digits (8×8) has 38,282 parameters, 0.15 MiB, which fit into one bucket: the digits' run
# hides nothing.
#
# ## What the 40 lines lack
# `ddp.py` trains on 1,440 images, in 12 batches of 120. A real program also meets uneven
# batches, batches too large for the memory, evaluation, and failures. One at a time:
#
# **Uneven batches.** Four ranks have 3, 3, 2 and 2 of ten images. Each computes the mean loss
# of its own images, and that loss's gradient. DDP averages the four gradients. The next cell
# does the same, one rank after the other. It compares the average with the gradient of the
# mean loss of all ten images.

# %% tags=["active-ipynb", "guess"]
# # The average of the four ranks' gradients, and the gradient of the mean loss of all ten
# # images: are they the same, within 1e-6?
# guess_mean = "yes"  # "yes" or "no"

# %% tags=["active-ipynb"]
# lesson.need(guess_mean, choices=("yes", "no"))
# train_set, _ = data.load(data.fetch(None))
# images, labels = train_set[:10]
# torch.manual_seed(0)
# model = CNN()
#
#
# def average_over_ranks(scale):
#     total = torch.zeros(())
#     for rank in range(4):
#         losses = F.cross_entropy(model(images[rank::4]), labels[rank::4], reduction="none")
#         gradients = torch.autograd.grad(scale(losses), list(model.parameters()))
#         total = total + torch.cat([gradient.flatten() for gradient in gradients]) / 4
#     return total
#
#
# loss = F.cross_entropy(model(images), labels)
# gradients = torch.autograd.grad(loss, list(model.parameters()))
# of_images = torch.cat([gradient.flatten() for gradient in gradients])
# scales = {
#     "mean of own images": lambda losses: losses.mean(),
#     "sum × ranks / all images": lambda losses: losses.sum() * 4 / 10,
# }
# errors = []
# for name, scale in scales.items():
#     errors.append((average_over_ranks(scale) - of_images).norm() / of_images.norm())
#     print(f"{name}: {errors[-1]:.1%} away from the gradient of all images")
# same = "yes" if errors[0] < 1e-6 else "no"
# lesson.compare("the ranks' average is that of the images", guess_mean, same)

# %% [markdown]
# So a rank's loss must be (the sum of its own losses) × ranks / (images of all ranks in the
# step). DDP adds up the ranks' gradients and divides by the ranks. What remains is the sum of
# all losses / all images, the mean over the images.
#
# [**Accumulation.**](../lessons/README.md#gradient-accumulation) A rank's part of the batch
# may not fit into its memory. Then it makes one forward and one backward for each
# *micro-batch*, and the gradients add up. The optimizer needs them after the last one, but DDP
# would average them after each. Within `no_sync` it does not: only the last `backward()` is
# outside.
#
# Two steps are simulated, one without `no_sync` and one with it. Each has 4 micro-batches of
# 256 images, and two buckets.

# %% tags=["active-ipynb", "guess"]
# guess_saved = 75  # % of the step's time that no_sync saves

# %% tags=["active-ipynb"]
# lesson.need(guess_saved)
# cases = [(1, 4, False), (1, 4, True)]  # MiB of a bucket, micro-batches, no_sync
# of_ranks = zip(*launch.call(simulated_steps, 2, cases, batch=256, link="PCIe3"))
# times = []
# for name, step in zip(("without", "with"), map(vgpu.Timeline.of_ranks, of_ranks)):
#     times.append(milliseconds(step))
#     count = f"{all_reduces(step)} all-reduces, {hidden(step):.0%} hidden"
#     waits = f"{step.breakdown(0)['launch']:.0%} of it waiting for launches"
#     print(f"{name} no_sync: {count}, {times[-1]:.2f} ms per step, {waits}")
# saved = 100 * (1 - times[1] / times[0])
# lesson.compare("time that no_sync saves", guess_saved, saved, unit="%", digits=0)

# %% [markdown]
# Without `no_sync`, 4 micro-batches average 2 buckets each: 8 all-reduces. With it, one
# micro-batch averages 2 buckets. The time falls less than the number of all-reduces, because
# most of their time was hidden, and the GPU waits for launches in over a third of each step.
#
# **Evaluation.** Three ranks share 7 test images, by `DistributedSampler`. Each counts its
# images and those that the model gets right, and an all-reduce adds up the counts.

# %% tags=["active-ipynb", "guess"]
# guess_counted = 7  # how many images do the three ranks count together?

# %% tags=["active-ipynb"]
# lesson.need(guess_counted)
# padded = [len(DistributedSampler(range(7), 3, rank)) for rank in range(3)]
# strided = [len(range(rank, 7, 3)) for rank in range(3)]
# print(f"DistributedSampler: {sum(padded)} images, {padded}")
# print(f"every third image: {sum(strided)} images, {strided}")
# lesson.compare("images that are counted", guess_counted, sum(padded), digits=0)

# %% [markdown]
# `DistributedSampler` repeats two images, so that all ranks have equally many. In training a
# repeat gets weight 0 (`data.real_rows`). In evaluation each of N ranks takes every N-th
# image: nothing is repeated. The ranks may then make different numbers of steps, so the loop
# must not call a collective: it uses `model.module`, the model without DDP. One all-reduce of
# the counts follows the loop, on all ranks.
#
# **A checkpoint** within an epoch needs all that the next step depends on: the weights, the
# optimizer's state, the scaler, the position in the epoch, the sums for its loss, and each
# rank's random states. Rank 0 writes it under another name, and renames it when it is
# complete: a killed run leaves no half file. Lesson 12 kills runs and resumes them.
#
# ## The program
# ### Step 1 · Set up the ranks, read the data
# `launch.find_world` reads the rank from the variables of torchrun, srun or mpirun. One rank
# of each node downloads. If one rank fails, all end: without `fail_together` the others would
# wait for it.


# %% jupyter={"source_hidden": true}
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
# ### Step 2 · Train
# `--batch-size` is the global batch. It is split over the ranks, and each rank's part into
# `--accumulate` micro-batches. So the result does not depend on the number of GPUs, and the
# learning rate stays. If each rank kept its batch instead, the global batch would grow with
# the GPUs: [lesson 12](PT_CNN_Elastic.ipynb) tries that, with the old rate and with a larger.
#
# Look for three things in `train_epoch`: `real` has weight 0 for a repeated image; `no_sync`
# is used in all micro-batches of a step but the last; `micro_batches[done:]` skips what a
# resumed run has done before.


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
# ### Step 3 · Evaluate


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
# ### Step 4 · All together
# To train your own model, edit `main` in `scripts/PT_CNN_MultiGPU.py`. This notebook has the
# same text, but torchrun runs the file, never a cell.


# %% jupyter={"source_hidden": true}
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


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# torchrun starts the ranks. The global batch is 64, and each rank splits its part into two
# micro-batches. The proof compares the ranks' weights with those of one process.

# %% tags=["active-ipynb"]
# program = "../scripts/PT_CNN_MultiGPU.py --accumulate 2 --prove --out results/05"
# !OMP_NUM_THREADS=1 {torchrun} {program}

# %% [markdown]
# ## On a cluster
# Slurm starts a job when enough nodes are free. This command submits the program as a job for
# two nodes: `sbatch slurm/PT_CNN_MultiGPU.slurm`. The cell prints what the job file asks for,
# and the command that it runs, with the most important options:

# %% tags=["active-ipynb"]
# job = Path("../slurm/PT_CNN_MultiGPU.slurm").read_text()
# print("\n".join(re.findall(r"#SBATCH --(?:nodes|ntasks-per-node|gpus-per-node)=\d", job)))
# options = re.findall(r"--(?:nnodes|nproc-per-node|rdzv-\w+)=\"\S+|--rdzv-backend=\w+", job)
# print("\nsrun torchrun", " \\\n    ".join([*options, "scripts/PT_CNN_MultiGPU.py"]))

# %% [markdown]
# - `--nodes` is the number of nodes, as `--nnodes` above.
# - `--ntasks-per-node=1`: Slurm starts one task on each node, a torchrun.
# - `--gpus-per-node` is the number of GPUs on each node. torchrun starts one rank for each.
# - `srun` starts the tasks on all nodes. Slurm has set the variables with `SLURM`.
# - `--rdzv-endpoint` is the first node's address and a port, as `--master-addr` and
#   `--master-port` above. With `--rdzv-backend=c10d` the torchruns agree there on the nodes'
#   numbers, so they need no `--node-rank`. `--rdzv-id` is a name that only this job has.
#
# Comments in the job file explain the other options. The page of this lesson has all commands.
#
# ## The answer
# **What must change?** In the program, the lines of the diff above. For more GPUs or nodes,
# only the launcher's options. On a cluster, a job file asks for the nodes and starts one
# torchrun on each.
#
# **Do four GPUs learn the same as one?** Yes, except for rounding, if:
#
# - each step has the images of one GPU's step, and a repeated image has weight 0;
# - each loss is divided by the images of all ranks, not by the rank's own;
# - no rank draws random numbers that change the result, as dropout does.
#
# Models with BatchNorm, and programs that clip gradients, need more: see the last section.

# %% tags=["active-ipynb"]
# print(metrics.route_row("05 DDP", "results/05"))  # for the table of all routes

# %% [markdown]
# ## To go further
# **BatchNorm** normalises by the mean and the variance of the rows that it sees. Here one
# process sees 64 images; then two ranks share them, with DDP. `SyncedBatchNorm` in
# `experiments.py`, 15 lines, adds up the sums of both ranks by an all-reduce.

# %% tags=["active-ipynb", "guess"]
# # BatchNorm1d, one forward of 32 images on each rank: is rank 0's running mean the same as
# # that of one process that sees all 64 images, within 1e-6?
# guess_batch_norm = "yes"  # "yes" or "no"

# %% tags=["active-ipynb"]
# lesson.need(guess_batch_norm, choices=("yes", "no"))
#
#
# def largest_difference(one, other):
#     return (one - other).abs().max().item()
#
#
# norms = [torch.nn.BatchNorm1d, SyncedBatchNorm]
# (serial,) = batch_norm_steps(norms[:1])
# means = []
# for norm, rank_0, _ in zip(norms, *launch.call(batch_norm_steps, 2, norms)):
#     gradient = largest_difference(rank_0["gradient"], serial["gradient"])
#     means.append(largest_difference(rank_0["running mean"], serial["running mean"]))
#     difference = f"gradient {gradient:.4f}, running mean {means[-1]:.4f}"
#     print(f"{norm.__name__}, differences of 2 ranks from one process: {difference}")
# same = "yes" if means[0] < 1e-6 else "no"
# lesson.compare("BatchNorm's mean is that of all 64", guess_batch_norm, same)

# %% [markdown]
# BatchNorm sees a rank's own 32 images, so its gradient is not that of 64. All ranks get rank
# 0's running mean and variance at the start of the next forward, as DDP copies them. With few
# images, a rank's mean and variance are noisy: then use the synced one. On GPUs it is
# `nn.SyncBatchNorm`, which raises an error on CPU processes. The line
# `model = nn.SyncBatchNorm.convert_sync_batchnorm(model)`, before `DDP(model)`, puts it in
# place of every BatchNorm of the model.
#
# **Clipping** scales a gradient down if its norm is above a limit. Two ranks have 6 and 5 of
# 11 images, and the limit is 0.5. Each rank clips the average, which it has after
# `backward()`; or it clips its own gradient, and an all-reduce computes the average.

# %% tags=["active-ipynb", "guess"]
# guess_before = "yes"  # does clipping before the average give the same? "yes" or "no"

# %% tags=["active-ipynb"]
# lesson.need(guess_before, choices=("yes", "no"))
# serial = clipped_gradients(0.5)
# first, second = launch.call(clipped_gradients, 2, 0.5)
# norms = [f"{found['norm']:.4f}" for found in (serial, first, second)]
# print(f"norm: one process {norms[0]}, rank 0 {norms[1]}, rank 1 {norms[2]}")
# for when in ("after", "before"):
#     error = largest_difference(first[when], serial[when])
#     print(f"clipped {when} the average: norm {first[when].norm():.2f},", end=" ")
#     print(f"{error:.4f} away from one process")
# same = "yes" if error < 1e-6 else "no"
# lesson.compare("clipping before gives the same", guess_before, same)

# %% [markdown]
# After `backward()` each rank has the average. So `clip_grad_norm_` finds the same norm on
# each rank, the norm of one process, and nothing is sent. Clipped first, each rank's gradient
# has a norm of at most 0.5, however large it was. The two gradients point in different
# directions, so the norm of their average is below 0.5.
#
# In a few words:
#
# - **16 bit.** `--amp` computes in 16 bit where that is safe, and in float16 a `GradScaler`
#   scales the loss. All ranks have the same average, so all skip the same steps. To clip, call
#   `scaler.unscale_(optimizer)` first. [Lesson 11](PTL_Precision.ipynb) is about 16 bit.
# - **A layer that a step does not use** has no gradient, and DDP raises an error in the next
#   step. With the variable `TORCH_DISTRIBUTED_DEBUG=INFO` the error names its parameters.
#   (`DETAIL` also compares the ranks' collectives; on CPUs, torch 2.13 then crashes.)
#   `DDP(model, find_unused_parameters=True)` looks for such layers in each step. If they are
#   the same in all steps, `static_graph=True` looks once. (The lesson's page links to DDP's
#   documentation.)
# - **Uneven numbers of steps.** If a rank has fewer batches, the others wait for it. Within
#   `with ddp.join():` a rank that has ended sends zeros. DDP still divides by all ranks.
#   ([Tutorial](https://docs.pytorch.org/tutorials/advanced/generic_join.html).)

# %% [markdown] tags=["footer"]
# [← 04 DDP with mp.spawn](PT_CNN_DDPSpawn.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/05-ddp-cluster/README.md) ·
# [06 Model and data parallel →](PT_CNN_HybridParallel.ipynb)
