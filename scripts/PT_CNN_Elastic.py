# %% [markdown]
# # 12 · Elastic training: a rank dies, a node comes, the job goes on
# **The question.** Your job trains on many GPUs for days. Every few hours something fails: a
# rank crashes, a node goes away, the job reaches its time limit. What must a program do so
# that little work is lost, and how do you know that the result is still the right one?

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from multigpu import (
    checkpoint,
    data,
    devices,
    elastic,
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
        "PT_CNN_Elastic",
        "Train a CNN with DDP under torchrun; start it again after any failure, and it goes "
        "on from the newest good checkpoint in OUT/checkpoints.",
        batch_size_help="global batch, divided over all ranks; if they do not divide it, an "
        "image is repeated with weight 0 (default: 64)",
        prove_help="train again without a stop, and compare the weights: on the same ranks, "
        "or serially if their number has changed",
    )
    parser.set_defaults(batch_size=64)
    parser.add_argument(
        "--save-every",
        type=flags.positive,
        default=10,
        metavar="STEPS",
        help="save a checkpoint every STEPS steps, and after each epoch (default: 10)",
    )
    parser.add_argument(
        "--timeout",
        type=flags.positive,
        default=120,
        metavar="SECONDS",
        help="a rank that waits for another one longer than this ends (default: 120)",
    )
    parser.add_argument(
        "--end-on-term",
        action="store_true",
        help="end with 0 after SIGTERM, too: for a torchrun that ignores it, as in a job file",
    )
    parser.add_argument(
        "--kill",
        metavar="RANK:STEP",
        help="to try it: this rank of the run's first start ends by SIGKILL in this step",
    )
    parser.add_argument(
        "--pause",
        type=flags.positive_float,
        default=0.0,
        metavar="SECONDS",
        help="to try it: wait after each step, so that there is time for a signal",
    )
    args = parser.parse_args(arguments)
    try:
        args.kill = None if args.kill is None else tuple(map(int, args.kill.split(":")))
        if args.kill is not None and len(args.kill) != 2:
            raise ValueError
    except ValueError:
        parser.error(f"--kill {args.kill}: expected two whole numbers, as in --kill 1:30")
    return args


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# import math
# import textwrap
#
# from multigpu import lesson
#
# lesson.setup("12-elastic", ranks=True)
# from experiments import (
#     after_four_ranks_became_eight,
#     checkpoint_of_step,
#     draw_losses,
#     draw_restart,
#     draw_worlds,
#     elastic_sampler,
#     file_by_file,
#     finished_run,
#     hang,
#     killed_while_writing,
#     signals,
#     worlds,
# )
#
# torchrun = "OMP_NUM_THREADS=1 torchrun --standalone --local-addr=127.0.0.1"
# # torchrun's own lines name files of this machine; errors are longer than a line.
# no_torchrun = "grep --line-buffered -v torch/distributed/elastic"
# shown = f"2>&1 | {no_torchrun} | fold -s -w 95"

# %% [markdown]
# ## A rank is killed
# The program of this notebook trains the course's CNN on two ranks. Every ten steps, and after
# each epoch, it saves a *checkpoint*: the weights, and how far the run is. With `--kill 1:37`,
# rank 1 ends by SIGKILL in step 37, as when the kernel kills a process because the machine has
# no memory left. `--max-restarts=1` lets `torchrun` start all ranks again, once.
#
# Steps are numbered from 0. So a kill in step 37 comes when 37 steps are done, and a
# checkpoint "of step 10" holds ten steps, 0 to 9. With `--prove`, the program trains once more
# at the end, without a kill, and compares the weights.

# %% tags=["active-ipynb", "guess"]
# guess_again = 0  # how many steps are made twice?
# guess_bits = "no"  # are the weights at the end those of a run without a kill, to the bit?

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_again)
# lesson.need(guess_bits, choices=("yes", "no"))
# !rm -rf results/12  # without this, the command would go on from an earlier run
# program = "../scripts/PT_CNN_Elastic.py"
# killed_in = 37  # of 92 steps
# ranks = "--nproc-per-node=2 --max-restarts=1"
# options = f"--out results/12 --epochs 4 --kill 1:{killed_in} --prove"
# !{torchrun} {ranks} {program} {options} {shown}

# %% tags=["active-ipynb"]
# run = finished_run("results/12", epochs=4)
# killed = run["curve"]
# done = sum(start == 1 for *_, start in killed)
# print(f"{run['starts']} starts; the last checkpoint before the kill was of step {done}")
# lesson.compare("steps that were made twice", guess_again, killed_in - done, digits=0)
# same = "yes" if run["proof"]["max_difference"] == 0 else "no"
# lesson.compare("the same to the bit", guess_bits, same)

# %% [markdown]
# `torchrun` sees that rank 1 is dead. Rank 0 sees it, too: its all-reduce (gloo's, on a CPU)
# fails, because the connection is closed. It ends, and `torchrun` starts both again. They load
# step 30 and make the steps 30 to 36 once more, with the same images, in the same order. The
# line `proof:` compares their weights with those of the same ranks that train without a stop.
#
# The picture has a dot for each step in the record of the run above. The seven lost steps have
# no dot of start 1: the record is part of the checkpoint, so it was lost with them.

# %% tags=["active-ipynb"]
# whole = run["proof"]["curve"]
# distance = max(abs(one[0] - other[0]) for one, other in zip(whole, killed, strict=True))
# print(f"largest difference between the losses of {len(whole)} steps: {distance}")
# title = "After the restart, each step has the loss of the run without a stop"
# draw_restart(whole, killed, killed_in, title)

# %% [markdown]
# `torchrun` restores nothing: that is the program's task. How does it do that?
#
# ## Is a sampler not enough?
# After a failure the program goes on in the middle of an epoch, with the images that are left.
# PyTorch has a sampler for that, `ElasticDistributedSampler`. Its argument `start_index` is
# the number of images that are done.
#
# Two ranks see 500 of 1,000 images. Then the job starts again, with four ranks. *Predict: how
# many of the 1,000 images does the epoch never show?*

# %% tags=["active-ipynb", "guess"]
# guess_lost = 0  # images of the epoch that no rank has seen

# %% tags=["active-ipynb"]
# lesson.need(guess_lost)
# lost, repeated = elastic_sampler(images=1000, resumed_at=500)
# print(f"lost: {lost}, seen twice: {repeated}")
# lesson.compare("images lost", guess_lost, lost, digits=0)

# %% [markdown]
# The sampler shuffles the numbers from `start_index` up. But the first 500 images that the
# ranks saw were not those with the numbers 0 to 499: they were the first 500 of a shuffled
# order. About half of them come again, and as many never come. No error is raised.
#
# ## The program
# ### Step 1 · A position, and an order that does not depend on the ranks
# A checkpoint must say where the run is. "Step 30 of rank 1" is of no use if there is no rank
# 1 after the failure. So the position counts *images*, over all ranks.


# %%
@dataclass
class Position:
    """How far a run is, and its records. Each checkpoint holds all of it."""

    epoch: int = 0  # epochs that are done
    images: int = 0  # images of this epoch that are done, over all ranks
    steps: int = 0  # steps since the run began
    loss_sum: float = 0.0  # over the images of this epoch that are done
    starts: int = 0  # how often the ranks were started
    history: list[dict] = field(default_factory=list)  # a row for each epoch
    curve: list[list] = field(default_factory=list)  # per step: loss, ranks, number of start


def order_of_epoch(images: int, seed: int, epoch: int) -> torch.Tensor:
    """A permutation of the whole epoch: the same on each rank, whatever the world size."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(images, generator=generator)


def own_shard(batch: torch.Tensor, world: launch.World) -> torch.Tensor:
    """This rank's images of a global batch: every N-th one.

    All shards have the same length: the last image is repeated if the number of ranks does not
    divide the batch. `data.real_rows` gives repeated images the weight 0.
    """
    length = -(-len(batch) // world.size)  # rounded up
    places = torch.arange(length) * world.size + world.rank
    return batch[places.clamp(max=len(batch) - 1)]


# %% [markdown]
# The rest of an epoch is `order[position.images:]`, cut into global batches. Each batch is
# divided over the ranks that train now. So each image of the epoch is seen exactly once,
# whatever the number of ranks was before. With 16 images, of which two ranks have seen 8:
#
# ![Who sees which of 16 images](../lessons/12-elastic/order.png)
#
# Again with 1,000 images: two ranks see 500 of them, and four the rest.

# %% tags=["active-ipynb"]
# order = order_of_epoch(1000, seed=0, epoch=0)
# seen = [own_shard(order[:500], launch.World(rank, 2)) for rank in range(2)]
# seen += [own_shard(order[500:], launch.World(rank, 4)) for rank in range(4)]
# times = torch.cat(seen).bincount(minlength=1000)
# print(f"lost: {(times == 0).sum()}, seen twice: {(times == 2).sum()}")

# %% [markdown]
# **The rule for batch and learning rate**: both stay as they are. `--batch-size` is the global
# batch, which is divided over the ranks. So the steps are those of one process, with any
# number of ranks. With half as many ranks, each has twice as many images. If these do not fit
# into the GPU's memory, a program needs [gradient
# accumulation](../lessons/README.md#gradient-accumulation), which this one leaves out.
#
# Do three ranks still compute the same if they do not divide the batch? The last batch of an
# epoch has 29 images here:

# %% tags=["active-ipynb"]
# for rank in range(3):
#     own = own_shard(torch.arange(29), launch.World(rank, 3))
#     real = data.real_rows(29, data.Batch(64, 3, 1, len(own)), rank, 0, len(own))
#     print(f"rank {rank}: images", *own.tolist(), "with weights", *real.int().tolist())

# %% [markdown]
# Rank 2 repeats image 28, so that all ranks have ten rows. The repeated row has the weight 0:
# the gradient is that of the 29 images.
#
# ### Step 2 · A flag that all ranks agree on
# Before a job ends, its ranks get a signal: SIGTERM from `torchrun`, or SIGUSR1 from Slurm a
# minute before the time limit. A signal can come at any line, also in the middle of an update,
# when only some of the weights are new and cannot be saved. So the handler only sets a flag.
#
# The ranks see the flag at different moments. If one of them stopped, the others would wait
# for it in their next collective. So each step adds up the flags of all ranks, in the
# all-reduce that adds up the loss, and all ranks stop after the same step. Evaluation and
# warm-up do the same: a signal that comes then must not wait for the next epoch. (`Run`, in
# the folded cell, holds what belongs to a run: model, optimizer, position and so on.)


# %% jupyter={"source_hidden": true}
@dataclass
class Run:
    """What belongs to a run."""

    args: argparse.Namespace
    world: launch.World
    device: torch.device
    model: DDP
    optimizer: torch.optim.Optimizer
    position: Position
    settings: dict  # what must be the same when the run is resumed
    writer: elastic.Writer | None = None  # rank 0 has one
    kill: tuple[int, int] | None = None  # the rank and the step of --kill

    @property
    def parts(self) -> dict:
        """What a checkpoint holds beside the position."""
        return {"model": self.model.module, "optimizer": self.optimizer}


# %%
class Stop(Exception):
    """All ranks raise it in the same step, when one of them has received a signal."""


received: signal.Signals | None = None  # the signal that this rank has received


def note_signal(number: int, frame: FrameType | None) -> None:
    global received
    received = signal.Signals(number)


def add_up(run: Run, number: torch.Tensor | float) -> tuple[float, signal.Signals | None]:
    """The sum of `number` over all ranks, and the signal for which all ranks must stop.

    Both are the same on every rank.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=run.device)
    sums[0] = number
    sums[1] = received == signal.SIGUSR1
    sums[2] = received in (signal.SIGTERM, signal.SIGINT)
    dist.all_reduce(sums)
    total, with_usr1, with_term = sums.tolist()
    if with_term:
        return total, signal.SIGTERM
    return total, signal.SIGUSR1 if with_usr1 else None


# %% [markdown]
# ### Step 3 · Train
# The position moves on before the flag is looked at. So a stop between two steps loses no
# step and repeats none. (The folded cell after it has evaluation and warm-up.)


# %%
def train_epoch(run: Run, train: TensorDataset) -> float:
    """Train for the rest of the epoch; return the mean loss over all its images.

    Raises Stop on all ranks after a signal.
    """
    args = run.args
    world = run.world
    device = run.device
    position = run.position
    run.model.train()

    order = order_of_epoch(len(train), args.seed, position.epoch)
    rest = order[position.images :]
    batches = rest.split(args.batch_size) if len(rest) else ()
    shards = [own_shard(batch, world).tolist() for batch in batches]
    loader = DataLoader(train, batch_sampler=shards, pin_memory=device.type == "cuda")

    for batch, (images, labels) in zip(batches, loader, strict=True):
        if run.kill == (world.rank, position.steps):
            os.kill(os.getpid(), signal.SIGKILL)
        # A step's random numbers, such as dropout's, depend on the seed, the step and the rank
        # alone. A step that is made again after a failure draws the same ones.
        torch.manual_seed((args.seed << 40) + (position.steps << 16) + world.rank)
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        split = data.Batch(args.batch_size, world.size, 1, len(labels))
        real = data.real_rows(len(batch), split, world.rank, 0, len(labels), device)

        losses = F.cross_entropy(run.model(images), labels, reduction="none")
        loss = (losses * real).sum()
        # DDP divides the sum of the ranks' gradients by the number of ranks.
        (loss * world.size / len(batch)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

        loss_sum, stop = add_up(run, loss.detach())
        mean = metrics.check_loss(loss_sum / len(batch), position.epoch, world)
        position.images += len(batch)
        position.steps += 1
        position.loss_sum += loss_sum
        position.curve.append([mean, world.size, position.starts])
        if stop:
            raise Stop(stop)
        if position.steps % args.save_every == 0:
            save(run)
        time.sleep(args.pause)

    return position.loss_sum / len(train)


# %% jupyter={"source_hidden": true}
@torch.no_grad()
def evaluate(run: Run, test: TensorDataset) -> float:
    """The accuracy on the whole test set. Raises Stop on all ranks after a signal."""
    model = run.model.module.eval()
    images, labels = test.tensors
    correct = 0.0
    for batch in torch.arange(len(test)).split(256 * run.world.size):
        rows = batch[run.world.rank :: run.world.size]  # of a last batch: perhaps none
        predictions = model(images[rows].to(run.device)).argmax(1).cpu()
        hits, stop = add_up(run, (predictions == labels[rows]).sum())
        correct += hits
        if stop:
            raise Stop(stop)
    return correct / len(test)


def warm_up(run: Run, train: TensorDataset) -> None:
    """One forward and backward without an update. Raises Stop on all ranks after a signal.

    The first step of a process is slow. And after its first backward, DDP distributes the
    gradients over other buckets, so it would add them up in another order than later.
    """
    images, labels = (tensor[:1].to(run.device) for tensor in train.tensors)
    F.cross_entropy(run.model(images), labels).backward()
    run.optimizer.zero_grad()
    _, stop = add_up(run, 0.0)
    if stop:
        raise Stop(stop)


# %% [markdown]
# ### Step 4 · Save, and load the newest good checkpoint
# The weights are the same on all ranks, so rank 0 alone saves. A thread writes the file while
# training goes on. Here `state_dict()` is called, then the model makes a step, and then what
# `state_dict()` has returned is written:

# %% tags=["active-ipynb", "guess"]
# guess_written = "before"  # the weights in the file: those "before" or "after" the step?

# %% tags=["active-ipynb"]
# lesson.need(guess_written, choices=("before", "after"))
# torch.manual_seed(0)
# small = torch.nn.Linear(1, 1, bias=False)
# state = small.state_dict()
# before = small.weight.item()
# small(torch.ones(1)).backward()
# torch.optim.SGD(small.parameters(), lr=0.1).step()
# torch.save(state, "results/late.pt")
# written = torch.load("results/late.pt")["weight"].item()
# after = small.weight.item()
# print(f"before the step {before:.3f}, after it {after:.3f}, in the file {written:.3f}")
# found = "before" if written == before else "after"
# lesson.compare("the weights in the file", guess_written, found)

# %% [markdown]
# `state_dict()` returns the weights themselves, not a copy, and the optimizer changes them in
# place. So rank 0 copies them to main memory before the next step, and the thread writes the
# copy (`elastic.Writer`). The file gets its name, with the step and a checksum, when it is
# complete and on the disk. The newest two files are kept: if the newest is damaged, the one
# before it is used.
# (The folded cell after it ends the ranks when a signal has come.)


# %%
def save(run: Run) -> None:
    if run.writer is None:
        return
    content = {
        "format": checkpoint.FORMAT,
        "parts": {name: part.state_dict() for name, part in run.parts.items()},
        "settings": run.settings,
        "position": asdict(run.position),
    }
    run.writer.save(run.position.steps, content)


def load_newest(run: Run, folder: elastic.CheckpointFolder) -> None:
    """Restore the run on all ranks, if the folder has a checkpoint.

    Rank 0 reads, and sends the content to the other ranks.
    """
    found = [None]
    with rendezvous.fail_together(run.world):
        if run.world.rank == 0:
            folder.open()  # for this run alone, until the process ends
    folder.require_shared(run.world)
    with rendezvous.fail_together(run.world):
        if run.world.rank == 0:
            newest = folder.newest()
            if newest is not None:
                path, found[0] = newest
                other_run = "give another --out for a new run"
                checkpoint.compare(path, found[0], run.parts, run.settings, other_run)
                print(f"resumed from {path}", flush=True)
    dist.broadcast_object_list(found, src=0)
    if found[0] is not None:
        for name, part in run.parts.items():
            part.load_state_dict(found[0]["parts"][name])
        run.position = Position(**found[0]["position"])


# %% jupyter={"source_hidden": true}
def leave(run: Run, stop: signal.Signals) -> None:
    """Save, and end all ranks, each with the exit code that its launcher needs.

    0 after SIGUSR1, so that the job can be requeued. Not 0 after SIGTERM:
    torchrun sends it to its ranks before it starts them again in a new world. Each torchrun
    does so for its own ranks. A rank that ended with 0 before that would look finished. In a
    Slurm job (--end-on-term) it is Slurm that sends SIGTERM, and torchrun must not start them
    again.
    """
    save(run)
    if run.writer is not None:
        run.writer.wait()
        kept = "saved" if run.writer.saved == run.position.steps else "not saved"
        print(
            f"{stop.name} in epoch {run.position.epoch + 1} after step {run.position.steps}: "
            f"{kept}. The same command goes on from the newest checkpoint.",
            flush=True,
        )
    if stop == signal.SIGUSR1 or run.args.end_on_term:
        return
    deadline = time.monotonic() + 5
    while received is None and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.exit(128 + signal.SIGTERM)


# %% [markdown]
# ### Step 5 · All together


# %% jupyter={"source_hidden": true}
def set_up(args: argparse.Namespace) -> tuple[launch.World, torch.device]:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a job file's `trap ""` is inherited
    elastic.Guard().start()  # a rank saves and ends if torchrun is killed
    signal.signal(signal.SIGUSR1, note_signal)
    world = launch.find_world()
    device = devices.pick(world, exact=args.prove)
    dist.init_process_group(
        devices.backend(device),
        store=rendezvous.open_store(world, device),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=args.timeout),
    )
    # Until here there is nothing to save, so SIGTERM ends the process at once.
    signal.signal(signal.SIGTERM, note_signal)
    signal.signal(signal.SIGINT, note_signal)
    return world, device


def read_data(
    args: argparse.Namespace, world: launch.World
) -> tuple[TensorDataset, TensorDataset]:
    with rendezvous.fail_together(world):
        if world.local_rank == 0:  # one download for each node
            data.fetch(args.data)
    with rendezvous.fail_together(world):
        return data.load(data.fetch(args.data))


def new_run(
    args: argparse.Namespace,
    world: launch.World,
    device: torch.device,
    train: TensorDataset,
    classes: int,
) -> Run:
    """A run before its first step, without a writer."""
    torch.manual_seed(args.seed)
    model = CNN(tuple(train[0][0].shape), classes).to(device)
    settings = {
        "the global --batch-size": args.batch_size,
        "--seed": args.seed,
        "--lr": args.lr,
        "--data (its checksum)": data.checksum(train),
    }
    return Run(
        args=args,
        world=world,
        device=device,
        model=DDP(model, device_ids=[device.index] if device.type == "cuda" else None),
        optimizer=torch.optim.SGD(model.parameters(), args.lr, momentum=0.9),
        position=Position(),
        settings=settings,
    )


# %%
def train_to_end(run: Run, train: TensorDataset, test: TensorDataset) -> None:
    """Train from the run's position to its last epoch. Raises Stop after a signal."""
    position = run.position
    warm_up(run, train)
    while position.epoch < run.args.epochs:
        began = time.perf_counter()
        images = len(train) - position.images  # of a resumed epoch: those that are left
        loss = train_epoch(run, train)
        accuracy = evaluate(run, test)
        seconds = time.perf_counter() - began
        row = {
            "epoch": position.epoch + 1,
            "loss": loss,
            "test_accuracy": accuracy,
            "images_per_s": images / seconds if images else None,
        }
        position.history.append(row)
        position.epoch += 1
        position.images = 0
        position.loss_sum = 0.0
        save(run)
        if run.writer is not None:
            print(metrics.row(row), flush=True)


# %% jupyter={"source_hidden": true}
@elastic.report_lost_ranks()
def main(args: argparse.Namespace) -> None:
    world, device = set_up(args)
    train, test = read_data(args, world)
    classes = data.num_classes(train, test)
    run = new_run(args, world, device, train, classes)
    folder = elastic.CheckpointFolder(args.out / "checkpoints")
    load_newest(run, folder)
    # A start that saved nothing is not in the checkpoint, but torchrun has counted it.
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    run.position.starts = max(run.position.starts, restarts) + 1
    if run.position.starts == 1:  # else the same command, given again, would never end
        run.kill = args.kill
    if world.rank == 0:
        run.writer = elastic.Writer(folder)
        print_opening(run)

    try:
        train_to_end(run, train, test)
        again = new_run(args, world, device, train, classes)
        verdict = prove(run, again, train, test) if args.prove else None
    except Stop as stop:
        leave(run, stop.args[0])
        return

    dist.destroy_process_group()
    if world.rank == 0:
        run.writer.wait()
        metrics.report(
            args.out,
            world,
            device,
            run.position.history,
            verdict,
            batch_size=args.batch_size,
            starts=run.position.starts,
            curve=run.position.curve,
        )


# %% jupyter={"source_hidden": true}
def print_opening(run: Run) -> None:
    args = run.args
    position = run.position
    share = -(-args.batch_size // run.world.size)
    each = f"{pluralize(run.world.size, 'rank')} × {pluralize(share, 'image')}"
    print(devices.describe(run.world, run.device))
    print(f"global batch {args.batch_size} ({each}), learning rate {args.lr:g}")
    done = f"{pluralize(position.epoch, 'epoch')} and {position.images} images"
    print(f"start {position.starts}: {done} done, of {pluralize(args.epochs, 'epoch')}\n")
    print("\n".join([metrics.header(), *map(metrics.row, position.history)]), flush=True)


def prove(run: Run, again: Run, train: TensorDataset, test: TensorDataset) -> dict | None:
    """Compare the run with one that was never stopped; rank 0 prints the verdict.

    If all starts had this number of ranks, the same ranks train again, and every bit must be
    the same. Else one process trains, and sums in another order differ in the last bits.
    """
    sizes = sorted({size for _, size, _ in run.position.curve})
    starts = pluralize(run.position.starts, "start")
    if sizes == [run.world.size]:
        train_to_end(again, train, test)
        # All compare with rank 0: ranks that have trained apart would each repeat themselves.
        for tensor in again.model.state_dict().values():
            dist.broadcast(tensor, 0)
        differences = [0.0] * run.world.size
        dist.all_gather_object(differences, proof.difference(run.model, again.model))
        if run.world.rank != 0:
            return None
        claim = f"{pluralize(run.world.size, 'rank')}, {starts}, equal a run without a stop"
        verdict = proof.verdict(claim, proof.largest(differences), 0.0)
        return {**verdict, "curve": again.position.curve}
    if run.world.rank != 0:
        return None
    ranks = " and ".join(map(str, sizes))
    return proof.compare_with_serial(
        f"{ranks} ranks, {starts}, equal one process",
        run.model.module,
        again.model.module,
        train,
        run.args,
        epochs=run.position.epoch,
    )


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## A checkpoint is cut short, and the number of ranks changes
# Back to the run with the kill: its two ranks have made four epochs, which are 92 steps. Then
# two things happen at once. A disk breaks, and the newest checkpoint, that of step 92, loses
# its last byte. And only one rank is left: the script, started without `torchrun`, goes on up
# to ten epochs. A checkpoint was saved every ten steps, and after each epoch.
#
# *Predict how many steps are made again, and whether the weights at the end are those of one
# process that trains all ten epochs.*

# %% tags=["active-ipynb", "guess"]
# guess_cut = 0  # how many steps are made again, if the file of step 92 is cut?
# guess_close = "no"  # are the weights at most 1e-5 apart? "yes" or "no"

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_cut)
# lesson.need(guess_close, choices=("yes", "no"))
# newest = checkpoint_of_step("results/12", 92)
# newest.write_bytes(newest.read_bytes()[:-1])
# !OMP_NUM_THREADS=1 python {program} --out results/12 --epochs 10 --prove

# %% tags=["active-ipynb"]
# run = finished_run("results/12", epochs=10)
# found = run["curve"]
# resumed_at = sum(start < 3 for *_, start in found)
# lesson.compare("steps that were made again", guess_cut, 92 - resumed_at, digits=0)
# close = "yes" if run["proof"]["max_difference"] <= 1e-5 else "no"
# lesson.compare("at most 1e-5 apart", guess_close, close)
# print("numbers of ranks, one after the other:", worlds(found))
# draw_worlds(found, "The number of ranks changes, and the loss falls as before")

# %% [markdown]
# The line `start 3` says where the run goes on: 1,344 images of the fourth epoch are done. Two
# ranks have seen them, and one process sees the 93 that are left. It adds sums in another
# order than two ranks, so the last bits differ. If only the rest of the epoch was permuted, as
# in PyTorch's sampler, the proof would fail: `tests/lessons/test_lesson12.py` tries it.
#
# With `--nnodes=1:2`, the number of ranks can change while a job runs: a node comes, or goes.
# All *agents*, the `torchrun`s of the nodes, end their ranks by SIGTERM, agree on the new
# world, and start ranks again. The flag of step 2 makes the ranks save first, so no step is
# lost. The page has the commands for two terminals.
#
# ## What is a whole checkpoint?
# The file's name has the checksum of its content. A file with another content is damaged, even
# if only one bit is wrong; then the one before it is used.
#
# A kill while a file is written does no harm either: it is written under a temporary name, and
# renamed when it is complete. The temporary file stays, with half of a checkpoint. After a
# thousand kills a disk is full of them, so the next start removes them:

# %% tags=["active-ipynb"]
# after_kill, after_start = killed_while_writing()
# print("after the kill:      ", *after_kill)
# print("after the next start:", *after_start)

# %% [markdown]
# That is not enough if a checkpoint has *several files*, each renamed alone. The next cell
# saves the model and the optimizer in two files at step 10, then at step 20, and is killed
# between the two renames:

# %% tags=["active-ipynb"]
# model, optimizer = file_by_file()
# print(f"the model is of step {model}, the optimizer of step {optimizer}")

# %% [markdown]
# So a checkpoint is one file, as here, or a folder in which one file is written last: without
# that file, it is not a checkpoint. `torch.distributed.checkpoint`, for models that are
# divided over the ranks, writes `.metadata` last, and does not load a folder without it.
#
# **How often?** Say that training waits 30 seconds for each save, and that a failure comes
# every four hours on average. It loses the steps since the last checkpoint.

# %% tags=["active-ipynb", "guess"]
# guess_minutes = 60  # between two checkpoints, so that saves and failures cost least time

# %% tags=["active-ipynb"]
# lesson.need(guess_minutes)
# save_s, failure_s = 30, 4 * 3600
# lost = {}  # part of the time: for saves, and after a failure half an interval on average
# for minutes in range(1, 241):
#     lost[minutes] = save_s / (60 * minutes) + 60 * minutes / 2 / failure_s
# best = min(lost, key=lost.get)
# print(f"{lost[best]:.0%} of the time is lost, and {lost[60]:.0%} with one every hour")
# print(f"√(2 × save × failure): {math.sqrt(2 * save_s * failure_s) / 60:.1f} min")
# lesson.compare("interval", guess_minutes, best, unit="min", digits=0)

# %% [markdown]
# [Young's formula](https://doi.org/10.1145/361147.361115), the square root, holds if a save is
# short compared with the time between failures.
#
# ## What if each rank keeps its batch?
# Many programs give `--batch-size` per rank. When four ranks become eight, the global batch
# doubles, and each epoch has half as many steps. Some then double the learning rate, too.
#
# Here two epochs have a global batch of 64, and the next eight one of 128. One process
# computes them: with these global batches, four and then eight ranks would compute the same.
# *Predict the loss at the end, if the batch of each rank and the learning rate stay. It is
# 0.038 if the global batch stays.*

# %% tags=["active-ipynb", "guess"]
# guess_loss = 0.038  # after 10 epochs, if each rank keeps its batch and its rate

# %% tags=["active-ipynb"]
# lesson.need(guess_loss)
# losses = after_four_ranks_became_eight(batch=64, lr=0.05)
# for name, values in losses.items():
#     print(f"{name}: {values[-1]:.3f}")
# lesson.compare("loss", guess_loss, losses["batch of a rank stays"][-1], digits=3)
# title = "If each rank keeps its batch and its rate, the loss falls more slowly"
# draw_losses(losses, since=2, title=title)

# %% [markdown]
# Twice the batch means half the steps, so the loss falls more slowly (with two other seeds,
# too: `tests/lessons/test_lesson12.py`). With twice the rate it is lower here, but that is
# another run, and with a large rate it can diverge.
#
# ## A rank that hangs
# When a rank is killed, its connections are closed, and with gloo the others notice at once. A
# rank that hangs keeps them open: the others wait for it in their next collective, by default
# for 30 minutes with gloo. `--timeout` sets the limit. Here, with gloo and a limit of one
# second, rank 1 never joins the all-reduce. (NCCL was not tried: a rank may wait for the limit
# in both cases, unless `torchrun` ends it first.)

# %% tags=["active-ipynb"]
# sentence, _ = launch.call(hang, 2, timeout=1)
# print(textwrap.fill(sentence, 95))

# %% [markdown]
# ## Who gets the signal?
# A job near its time limit gets a signal, if it has asked for one. `torchrun` is between the
# sender and the ranks. The second cell sends signals to `torchrun`, whose rank writes down
# what it receives. (`torchrun` starts three times: some seconds.) *Predict what the rank
# receives if `torchrun` gets SIGUSR1.*

# %% tags=["active-ipynb", "guess"]
# guess_usr1 = "SIGUSR1"  # the rank receives "SIGUSR1", "SIGTERM", or "nothing"?

# %% tags=["active-ipynb"]
# lesson.need(guess_usr1, choices=("SIGUSR1", "SIGTERM", "nothing"))
# handled = "--signals-to-handle=SIGTERM,SIGUSR1"
# short = "--shutdown-timeout=5"  # seconds until torchrun sends SIGKILL; 30 if not given
# cases = [("SIGTERM", (short,)), ("SIGUSR1", ()), ("SIGUSR1", (handled, short))]
# results = signals(*cases)
# for (name, options), result in zip(cases, results, strict=True):
#     code = result["exit code"]
#     print(f"{name}, {' '.join(options) or 'no flag'}: torchrun ends with {code}")
#     got = ", ".join(result["signals"]) or "no signal"
#     launcher = "; its launcher has died" if result["launcher died"] else ""
#     print(f"    the rank got {got}{launcher}")
# seen = ", ".join(results[1]["signals"]) or "nothing"
# lesson.compare("what the rank receives of SIGUSR1", guess_usr1, seen)

# %% [markdown]
# By default, SIGUSR1 ends `torchrun` itself, at once. (-10 means: ended by signal 10, which is
# SIGUSR1.) The ranks get no signal, and train on without a launcher. So `elastic.Guard` in
# `set_up` lets a rank whose launcher has died save and end. With `--signals-to-handle` the
# ranks get the signal, and some seconds to save. The rank here does not end by a signal, so
# `torchrun` kills it after the five seconds of `--shutdown-timeout=5`, and ends with 1.
#
# **What must a program do so that little work is lost?**
# 1. Count the images that are done, over all ranks, and take the order from seed and epoch.
# 2. Keep the global batch and the learning rate, whatever the number of ranks is.
# 3. Save every √(2 × time of a save × time between failures). A checkpoint gets its name when
#    all of it is on the disk.
# 4. On a signal only set a flag; all ranks stop after the same step, and save.
# 5. Limit how long a rank waits for another one.
#
# **What does your own checkpoint need besides?** All that the next step depends on: also a
# learning-rate schedule, a gradient scaler, and the state of a DataLoader that draws numbers.
#
# **How do you know that the result is right?** Compare it with a run that nothing has stopped:
# equal to the bit on the same ranks (tried on the CPU; a GPU needs deterministic kernels), and
# within rounding on another number of ranks.
#
# ## The line for the table of all routes

# %% tags=["active-ipynb"]
# print(metrics.route_row("12 elastic", "results/12"))

# %% [markdown] tags=["footer"]
# [← 11 Precision](PTL_Precision.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/12-elastic/README.md) ·
# [13 Scaling →](PT_CNN_Scaling.ipynb)
