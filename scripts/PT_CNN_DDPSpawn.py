# %% [markdown]
# # 04 · DDP with mp.spawn
# **The question.** DDP (DistributedDataParallel) trains with several processes, one for each
# GPU. Can a script, or a notebook, start these processes itself? (Most runs are started from
# outside, by `torchrun` or `srun`: that is lesson 05, which begins with DDP in 40 lines.)
#
# A *process* is a running program with its own memory. The processes of a run are numbered
# from 0: the number is the *rank*, and the count is the [*world
# size*](../lessons/README.md#world-size). "Rank 1" also means the process itself. ([All
# words](../lessons/README.md#words).) You need no GPU: without GPUs, the ranks compute on the
# CPU.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from multigpu import data, devices, files, flags, launch, metrics, proof
from multigpu.models import CNN


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PT_CNN_DDPSpawn",
        "Train a CNN with DDP on processes that this program starts itself.",
    )
    parser.add_argument(
        "--nprocs",
        type=flags.positive,
        default=torch.cuda.device_count() or 2,
        help="processes to start, one a GPU (default: as many as there are GPUs, or 2)",
    )
    return parser.parse_args(arguments)


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# import os
# import pickle
# import threading
# from pathlib import Path
#
# import cloudpickle
#
# from multigpu import lesson, plots
#
# lesson.setup("04-ddp-spawn", ranks=True)
# from experiments import set_to_zero

# %% [markdown]
# ## Two processes that add up their numbers
# This is the smallest program that starts its own ranks. (It starts processes, which takes
# some seconds.)

# %% tags=["active-ipynb"]
# program = Path("../lessons/04-ddp-spawn/add_up.py")
# print(program.read_text())
# !OMP_NUM_THREADS=1 python {program}

# %% [markdown]
# - `mp.spawn` starts two processes, and calls `work` in each, with the rank as first argument.
# - `TCPStore` is a *store*: a table of keys and values. The program holds it, and sends its
#   *port*, a number, to the processes. They find each other through it: the
#   [*rendezvous*](../lessons/README.md#rendezvous).
# - `init_process_group` connects the ranks: now they are a [*process
#   group*](../lessons/README.md#process-group). `"gloo"` is the
#   [*backend*](../lessons/README.md#backend), the library that sends between CPUs; between
#   GPUs it is `"nccl"`.
# - `all_reduce` is a *collective*: an operation in which all ranks take part. Each rank gives
#   a tensor, and each rank gets the sum.
#
# Many programs call `init_process_group("gloo")` alone. Then each rank reads four variables of
# its environment: `RANK`, `WORLD_SIZE`, and the store's address and port, `MASTER_ADDR` and
# `MASTER_PORT`. A launcher such as `torchrun` (lesson 05) sets them. `mp.spawn` does not: that
# is why `add_up.py` sends the port.
#
# ## Predict first
# Write your answers, then run the cell. The cells below compare them with what happens. (The
# third question is about an all-reduce that averages the gradients, without DDP.)

# %% tags=["active-ipynb", "guess"]
# guess_cell = "yes"  # can mp.spawn call a function that a cell defines? "yes" or "no"
# # Two processes that mp.spawn starts set a tensor of three 1s to zero:
# guess_ones = 3  # how many 1s does this notebook's tensor have then?
# # Different weights, then 50 steps with averaged gradients:
# guess_apart = "closer"  # are the weights "closer" then, as far apart ("same"), or "farther"?
# guess_both = 0  # two ranks share 1,437 images: how many images do both of them read?

# %% [markdown]
# ## A function of a cell
# `mp.spawn` starts a new Python, and sends the function and its arguments by *pickle*, which
# writes objects as bytes. What does pickle write of a function, and does another Python find
# it? The cell does this one step, without `mp.spawn`.

# %% tags=["active-ipynb"]
# lesson.need(guess_cell, choices=("yes", "no"))
#
#
# def hello():
#     names = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
#     return {name: os.environ.get(name) for name in names}
#
#
# names = pickle.dumps(hello)
# print(names)
# reply = !python -c "import pickle; pickle.loads({names}); print('found')" 2>&1 | tail -n 1
# print(reply[0])
# lesson.compare("a function of a cell", guess_cell, "yes" if reply[0] == "found" else "no")

# %% [markdown]
# Pickle writes only two names, the module's and the function's, and the new process has none
# of the notebook's functions. (`mp.spawn(hello, nprocs=2)` prints this AttributeError for each
# process. A page of traceback follows. It ends with `ProcessExitedException`, which does not
# name the cause: scroll up to the AttributeError.) So a notebook needs another way, which is
# this course's `launch.call`:
#
# | | `mp.spawn` | `launch.call` |
# |---|---|---|
# | starts | new Pythons, which import torch | on Linux copies of a process |
# | sends of a function | its name, by pickle | its code and variables, by *cloudpickle* |
# | sets torchrun's variables | no | yes |
# | returns | nothing | what the ranks return |
#
# The process that Linux copies (by a *fork*) was started by the first cell, and has imported
# torch. So the ranks start in a fraction of a second.

# %% tags=["active-ipynb"]
# launch.call(hello, 2)

# %% [markdown]
# Which objects can be sent to a process at all?

# %% tags=["active-ipynb"]
# things = {
#     "a tensor": torch.ones(2),
#     "a lambda": lambda: 1,
#     "a lock": threading.Lock(),
#     "a generator": iter(letter for letter in "ab"),
# }
# for name, thing in things.items():
#     for pickler in (pickle, cloudpickle):
#         try:
#             pickler.dumps(thing)
#             print(f"{name}, {pickler.__name__}: yes")
#         except (TypeError, AttributeError, pickle.PicklingError):
#             print(f"{name}, {pickler.__name__}: no")

# %% [markdown]
# A lock works in one process only, and nothing can write down where a generator is. Send what
# the rank needs to make its own: for example a file's path instead of the open file.
#
# ## Whose model is it?
# Two processes get a tensor as an argument and set it to zero. A process has its own memory,
# so the tensor of this program stays as it was. Or does it? `set_to_zero(rank, tensor)` is a
# function of a file, `experiments.py`. `launch.call` gives no rank, so the cell writes 0.
# (`mp.spawn` starts two processes: some seconds.)

# %% tags=["active-ipynb"]
# lesson.need(guess_ones)
# weights = torch.ones(3)
# launch.call(set_to_zero, 2, 0, weights)
# print("an argument of launch.call:", weights)
# mp.spawn(set_to_zero, args=(weights,), nprocs=2)
# print("an argument of mp.spawn:   ", weights)
# lesson.compare("1s that are left", guess_ones, weights.sum(), digits=0)

# %% [markdown]
# torch sends a tensor to a process by **sharing its memory** (`launch.call` sends a copy).
# Ranks that train a model from their arguments all write into the same weights, at the same
# time. So each rank makes its own model, and the result comes back in a file.
#
# ## Which weights does each rank start with?
# Without a seed, each process takes one from the operating system, so the ranks' weights
# differ. The cell tries one seed for all ranks, and a seed per rank, the rank's number. (With
# these fixed seeds the cell prints the same numbers each time.) Each rank computes gradients
# from its own random rows. They are averaged by DDP, by an all-reduce by hand, or not at all.
# How far are the ranks' weights apart, before and after 50 steps?

# %% tags=["active-ipynb"]
# lesson.need(guess_apart, choices=("closer", "same", "farther"))
#
#
# def train_linear(same_seed, how):
#     torch.manual_seed(0 if same_seed else dist.get_rank())
#     model = torch.nn.Linear(4, 1)
#     before = model.weight.detach().clone()
#     torch.manual_seed(100 + dist.get_rank())  # from here on each rank has its own rows
#     wrapped = DDP(model) if how == "averaged by DDP" else model
#     for _ in range(50):
#         rows = torch.randn(8, 4)
#         targets = torch.randn(8, 1)
#         model.zero_grad()
#         F.mse_loss(wrapped(rows), targets).backward()
#         for weight in model.parameters():
#             if how == "averaged by hand":
#                 dist.all_reduce(weight.grad)
#                 weight.grad /= dist.get_world_size()
#             weight.data -= 0.1 * weight.grad
#     return before, model.weight.detach()
#
#
# def train_in_all_ways():
#     dist.init_process_group("gloo")
#     hows = ("not averaged", "averaged by DDP", "averaged by hand")
#     return {(same, how): train_linear(same, how) for same in (True, False) for how in hows}
#
#
# first, second = launch.call(train_in_all_ways, 2)
# for same_seed, how in first:
#     pairs = zip(first[same_seed, how], second[same_seed, how])
#     before, after = [(one - other).abs().max().item() for one, other in pairs]
#     seeds = "one seed for all" if same_seed else "a seed per rank"
#     print(f"{seeds}, {how}: {before:.2f} apart, then {after:.2f}")
# by_hand = "same" if abs(after - before) < 0.01 else "closer" if after < before else "farther"
# lesson.compare("a seed per rank, by hand", guess_apart, by_hand)

# %% [markdown]
# Without an average, each rank comes close to the weights that suit its own rows, wherever it
# started. So the ranks end as far apart with one seed for all as with a seed per rank.
#
# With an average, all ranks subtract the same numbers. By hand, these are subtracted from
# different weights, so the difference stays. DDP also copies rank 0's weights to all ranks
# when it wraps the model, by a [*broadcast*](../lessons/README.md#broadcast). So with DDP the
# ranks have equal weights also without a seed, but the run cannot be repeated.
#
# ## Which images does each rank read?
# A *sampler* chooses the images that a DataLoader reads. `DistributedSampler` gives each rank
# its *shard*: with two ranks, every second image of one shuffled order. All ranks must make
# the same number of steps, because each step has an all-reduce.

# %% tags=["active-ipynb"]
# lesson.need(guess_both)
# for images in (7, 1437):
#     samplers = [DistributedSampler(range(images), 2, rank, seed=0) for rank in range(2)]
#     first, second = [list(sampler) for sampler in samplers]
#     in_both = set(first) & set(second)
#     print(f"{images:,} images: shards of {len(first)} and {len(second)}", end=", ")
#     print(f"{len(in_both)} in both")
#     if images == 7:
#         rows = [[first, []], [[], second]]
#         title = f"{len(in_both)} of 7 images is read by both ranks"
#         picture = plots.shards(rows, title, ["rank 0", "rank 1"])
# lesson.compare("images that both ranks read", guess_both, len(in_both), digits=0)
# picture

# %% [markdown]
# The ranks must make the same number of steps, and 7 is odd. So in step 4 rank 1 gets image 4,
# which rank 0 has read. 1,437 is odd, too. Below, such a repeat gets weight 0 in the loss.
#
# ## Step 1 · What each rank does
# The same as in `add_up.py`, with the CNN of lesson 01. A new process has none of its
# parent's variables but the arguments: it sets up its rank, device, model and data itself.
# Four lines make it a run of several ranks: those with `TCPStore`, `init_process_group`,
# `DistributedSampler` and `DDP`. (Of the course's own classes, `Batch` says how a batch is
# split over the ranks, and `World` which rank of how many this is.)


# %%
def train(
    rank: int,
    batch: data.Batch,
    port: int,
    args: argparse.Namespace,
    result: str,
) -> None:
    """Train as rank `rank`. Rank 0 writes the weights and the history to the file `result`."""
    ranks = batch.ranks
    world = launch.World(rank, ranks, rank, ranks, launcher="mp.spawn")
    device = devices.pick(world, exact=args.prove)  # cuda:RANK, or the CPU
    # The parent holds the store, so no other program can take the port.
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(devices.backend(device), store=store, rank=rank, world_size=ranks)

    train_set, test = data.load(data.fetch(args.data))
    sampler = DistributedSampler(train_set, ranks, rank, seed=args.seed)  # this rank's shard
    # The same weights on all ranks. Without a seed DDP would copy rank 0's to the others.
    torch.manual_seed(args.seed)
    model = DDP(
        new_model(train_set, test, device),
        device_ids=[device.index] if device.type == "cuda" else None,
    )
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

    history = train_epochs(model, optimizer, sampler, test, batch, args, world)

    # A spawned function returns nothing to its parent: write the results to a file.
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "history": history}, result)
    # First DDP, which uses the group, then the group.
    del model
    dist.destroy_process_group()


# %% [markdown]
# After each epoch the ranks add up their losses, and rank 0 prints a line:


# %%
def train_epochs(
    model: DDP,
    optimizer: torch.optim.Optimizer,
    sampler: DistributedSampler,
    test: TensorDataset,
    batch: data.Batch,
    args: argparse.Namespace,
    world: launch.World,
) -> list[dict]:
    """Train for all epochs. Returns the history, one row for each epoch."""
    history = []
    images = len(sampler.dataset)
    if world.rank == 0:
        print(devices.describe(world, device_of(model)), end="\n\n")
        print(metrics.header(), flush=True)
    for epoch in range(args.epochs):
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        total = train_epoch(model, optimizer, sampler, batch, world.rank)
        dist.all_reduce(total)
        images_per_s = images / (time.perf_counter() - began)
        row = {
            "epoch": epoch + 1,
            "loss": metrics.check_loss(total.item() / images, epoch, world),
            "test_accuracy": accuracy(model.module, test),
            "images_per_s": images_per_s,
        }
        history.append(row)
        if world.rank == 0:
            print(metrics.row(row), flush=True)
    return history


# %% [markdown]
# A step is that of one process: `DDP` does one all-reduce of the gradients, during
# `backward()`. To be exact for every batch, the program also needs three things that lesson 05
# explains: `set_epoch`, above; the factors `real`, which are 0 for a repeated image; and the
# loss's division by the images of all ranks.


# %%
def train_epoch(
    model: DDP,
    optimizer: torch.optim.Optimizer,
    sampler: DistributedSampler,
    batch: data.Batch,
    rank: int,
) -> torch.Tensor:
    """Train with this rank's shard. Returns the sum of the losses of its images."""
    train_set = sampler.dataset
    ranks = batch.ranks
    device = device_of(model)
    total = torch.zeros((), dtype=torch.float64, device=device)
    loader = DataLoader(train_set, batch.per_micro_batch, sampler=sampler)
    for step, (images, labels) in enumerate(loader):
        images = images.to(device)
        labels = labels.to(device)

        # The sampler repeats images until all shards are equal in size: a repeat gets
        # weight 0. DDP averages over ranks; the mean over images is wanted. See lesson 05.
        real = data.real_rows(len(train_set), batch, rank, step, len(labels), device)
        losses = F.cross_entropy(model(images), labels, reduction="none")
        loss = (losses * real).sum()

        optimizer.zero_grad()
        (loss * ranks / batch.images_in_step(step, len(train_set))).backward()
        optimizer.step()
        total += loss.detach()
    return total


# %% [markdown]
# Ranks and parent make the model in the same way, and measure it in the same way:


# %%
def new_model(
    train_set: TensorDataset, test: TensorDataset, device: torch.device
) -> torch.nn.Module:
    return CNN(tuple(train_set[0][0].shape), data.num_classes(train_set, test)).to(device)


def device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def accuracy(model: torch.nn.Module, test: TensorDataset) -> float:
    """The accuracy on the whole test set."""
    device = device_of(model)
    images, labels = test.tensors
    predictions = model(images.to(device)).argmax(1).cpu()
    return (predictions == labels).double().mean().item()


# %% [markdown]
# ## Step 2 · Start the ranks
# The parent does not train. It checks the flags and fetches the data once, before any rank
# starts. It holds the store through which the ranks find each other, spawns them, and reads
# the file that rank 0 wrote. The file gets its name only if all ranks succeeded.


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    launch.single_process_world("PT_CNN_DDPSpawn")
    launch.check_room(args.nprocs)
    batch = flags.split_batch(args.batch_size, args.nprocs)
    train_set, test = data.load(data.fetch(args.data))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with files.atomic(files.writable_folder(args.out) / "model.pt") as result:
        mp.spawn(train, args=(batch, store.port, args, str(result)), nprocs=args.nprocs)
        trained = torch.load(result, weights_only=True)

    device = devices.pick(launch.World())
    model = new_model(train_set, test, device)
    model.load_state_dict(trained["model"])
    verdict = None
    if args.prove:
        claim = f"DDP on {args.nprocs} spawned ranks equals one process"
        torch.manual_seed(args.seed)
        fresh = new_model(train_set, test, device)
        verdict = proof.compare_with_serial(
            claim, model, fresh, train_set, args, batch_size=batch.global_size
        )
    world = launch.World(0, args.nprocs, 0, args.nprocs, launcher="mp.spawn")
    metrics.report(
        args.out,
        world,
        device,
        trained["history"],
        verdict,
        batch_size=batch.global_size,
    )


# %% [markdown]
# The script `PT_CNN_DDPSpawn.py` has the imports, the flags and the cells from "Step 1" on.
# Each spawned process imports the script again. Without the `if` in the next, folded cell it
# would try to spawn ranks, too, and end with an error.

# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## Run it
# One line starts the whole run (some seconds), and the proof compares its weights with those
# of one process.

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PT_CNN_DDPSpawn.py --prove --out results/04

# %% [markdown]
# **Can a script, or a notebook, start these processes itself?** A script can, by `mp.spawn`:
# the function is in a file, `if __name__ == "__main__":` guards the start, and the result
# comes back in a file. A notebook can start such a script, or send a cell's function by
# `launch.call`. (Without this course: write the function into a file by `%%writefile`, and
# give `mp.spawn` the function of that file.) Both start processes on one machine only.
# `torchrun` and `srun` start ranks on many nodes: that is lesson 05.
#
# Two ranks on the CPU can be slower than the one process of lesson 01, also with a core for
# each: half a batch takes more than half the time (lesson 01), and in each step the ranks send
# gradients. With a batch of 64 small images, that costs more than it saves
# ([measured](../lessons/routes.md)).

# %% tags=["active-ipynb"]
# print(metrics.route_row("04 DDP by mp.spawn", "results/04"))  # for the table of all routes

# %% [markdown] tags=["footer"]
# [← 03 Pipeline](PT_CNN_Pipeline.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/04-ddp-spawn/README.md) ·
# [05 DDP on a cluster →](PT_CNN_MultiGPU.ipynb)
