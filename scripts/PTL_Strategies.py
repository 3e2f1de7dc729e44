# %% [markdown]
# # 10 · Every strategy: dp, ddp, ddp_spawn, ddp2, Horovod, Bagua
# **The question.** Twelve names, one model: what does each strategy send, at which moment, and
# where is it the best choice?
#
# **Predict first.** The model has N = 38,282 weights of 4 bytes, and there are n = 2 ranks.
# (1) How many bytes does a rank send in a step of `ddp`? Of `dp`? Which strategy sends least?
# (2) Which strategies learn what one process learns, except for rounding? (3) In which
# strategies do the ranks have different weights during the run?

# %%
import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import multigpu.trainer as L
from multigpu import data, devices, files, flags, launch, metrics, vgpu
from multigpu.comparison import (
    QADAM_WARMUP,
    Record,
    compare_with_serial,
    measure_link,
    report,
    strategy_for_short_run,
    summarize,
)
from multigpu.models import CNN
from multigpu.strategies import ALGORITHMS, QAdamOptimizer
from multigpu.strategies.costs import ONE_PROCESS

NAMES = (
    "dp",
    "pipeline",
    "ddp_spawn",
    "ddp",
    "horovod",
    *(f"bagua:{name}" for name in ALGORITHMS),
    "ddp2",
)
EXACT = ("dp", "pipeline", "ddp_spawn", "ddp", "horovod", "bagua:gradient_allreduce", "ddp2")
NO_LAUNCHER = (*ONE_PROCESS, "ddp_spawn")  # these need one process, or start their own


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PTL_Strategies",
        "Train a CNN with one strategy or with all, and count what each sends.",
    )
    parser.add_argument(
        "--strategy",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help=f"all (default), or some of: {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--ranks",
        type=flags.positive,
        default=2,
        help="processes; nodes for ddp2, devices for dp (default: 2)",
    )
    parser.add_argument(
        "--hidden",
        type=flags.positive,
        default=64,
        help="units of the model's widest layer (default: 64)",
    )
    parser.add_argument(
        "--link",
        type=flags.positive_float,
        default=100,
        metavar="MBIT",
        help="a link's Mbit/s (default: 100)",
    )
    parser.add_argument(
        "--measure-link",
        action="store_true",
        help="measure a step's time over such a link, which this script sets up (as root)",
    )
    return parser.parse_args(arguments)


# %% [markdown]
# ## An all-reduce by hand
# The vector is split into n chunks. Each rank sends chunks to its right neighbour: n − 1 hops
# add them up, n − 1 hops distribute the sums. A hop sends N/n numbers of 4 bytes, so a rank
# sends 2(n − 1) · 4N/n bytes. The kernel counts the bytes that were really sent.

# %% tags=["active-ipynb"]
# import torch.distributed as dist
# from multigpu import plots, wire
#
#
# def ring(count):
#     """Bytes sent by hand and by gloo, and whether the sums are equal."""
#     dist.init_process_group("gloo")
#     rank = dist.get_rank()
#     n = dist.get_world_size()
#     chunks = list(torch.full((count,), float(rank)).chunk(n))
#
#     began = wire.bytes_sent()
#     for hop in range(2 * (n - 1)):
#         out = (rank - hop) % n
#         into = (rank - hop - 1) % n
#         received = torch.empty_like(chunks[into])
#         sending = dist.isend(chunks[out], (rank + 1) % n)
#         dist.recv(received, (rank - 1) % n)
#         sending.wait()
#         chunks[into] = chunks[into] + received if hop < n - 1 else received
#
#     middle = wire.bytes_sent()
#     total = torch.full((count,), float(rank))
#     dist.all_reduce(total)
#     return middle - began, wire.bytes_sent() - middle, torch.equal(torch.cat(chunks), total)

# %% tags=["active-ipynb"]
# N = 38400
# for n in (2, 4):
#     by_hand, by_gloo, equal = launch.call(ring, n, N)[0]
#     formula = 8 * N * (n - 1) // n
#     counted = f"by hand {by_hand:,}, by gloo {by_gloo:,}; same sums: {equal}"
#     print(f"{n} ranks: 8N(n−1)/n = {formula:,}; {counted}")

# %% [markdown]
# The difference is headers. All formulas (`multigpu/strategies/costs.py`), for prediction (1):

# %% tags=["active-ipynb"]
# from multigpu.strategies.costs import predicted_bytes
#
# N = 38282
# names = (
#     "ddp",
#     "bagua:decentralized:shift_one",
#     "bagua:low_precision_decentralized",
#     "bagua:bytegrad",
# )
# print("2 ranks:")
# for name in ("dp", *names):
#     print(f"    {name} {predicted_bytes(name, N, 2):,.0f}")
#
# ranks = (2, 4, 8, 16, 32, 64)
# curves = {name: [predicted_bytes(name, N, n) / N for n in ranks] for name in names}
# title = "Predicted: at most 8 bytes a weight"
# picture = plots.lines(ranks, curves, "ranks", "bytes a weight", title, None)
# picture.axes[0].legend(frameon=False, loc=(0.6, 0.54))
# picture

# %% [markdown]
# When does each send? One step of each over 10 Gbit/s, simulated (by
# `lessons/10-strategies/picture.py`):
#
# ![One step of ddp and of Horovod on two ranks](../lessons/10-strategies/exact.png)
#
# ## Step 1 · The model and its step
# `training_step` may get a part of a batch; `training_step_end` gets the outputs of all parts
# in this process, joined. So the loss is computed there. An image that the sampler repeats has
# weight 0, as in lesson 05.


# %%
class Digits(L.LightningModule):
    def __init__(
        self,
        name: str,
        train: TensorDataset,
        cnn: CNN,
        args: argparse.Namespace,
        batch: data.Batch,
    ):
        super().__init__()
        self.name = name
        self.train_set = train
        self.args = args
        self.batch = batch
        first = nn.Sequential(cnn.conv1, nn.Tanh(), cnn.conv2, nn.Tanh(), nn.Flatten())
        second = nn.Sequential(cnn.fc1, nn.Tanh(), cnn.fc2)
        self.halves = nn.ModuleList([first, second])

    def pipeline_stages(self) -> list[nn.Module]:
        return list(self.halves)

    def train_dataloader(self) -> DataLoader:
        # dp has one shard, and splits each batch itself.
        num_shards, self.shard = self.trainer.strategy.shard
        self.batch = flags.split_batch(self.batch.global_size, num_shards)
        sampler = DistributedSampler(
            self.train_set, num_shards, self.shard, seed=self.args.seed
        )
        return DataLoader(self.train_set, self.batch.per_micro_batch, sampler=sampler)

    def on_train_batch_start(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.batch_idx = batch_idx

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        logits = self.halves[1](self.halves[0](images))
        return F.cross_entropy(logits, labels.to(logits.device), reduction="none")

    def training_step_end(self, losses: torch.Tensor) -> torch.Tensor:
        images = len(self.train_set)
        real = data.real_rows(
            images, self.batch, self.shard, self.batch_idx, len(losses), losses.device
        )
        own = int(real.sum())
        total = (losses * real).sum()
        mean = total / max(1, own)
        self.log("loss", mean, on_step=False, on_epoch=True, batch_size=own)
        return total * self.batch.ranks / self.batch.images_in_step(self.batch_idx, images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.name == "bagua:qadam":
            return QAdamOptimizer(self.parameters(), self.args.lr / 50, QADAM_WARMUP)
        lr = self.args.lr
        if self.name == "horovod":
            lr /= self.trainer.world_size  # the strategy multiplies it by the world size
        return torch.optim.SGD(self.parameters(), lr, momentum=0.9)


# %% [markdown]
# ## Step 2 · Train
# One `Trainer` for all: only the name differs. Ranks of `ddp2` stand for nodes, each with two
# devices.


# %%
def devices_of(name: str, ranks: int) -> int | str:
    """The number of devices that a process of this strategy uses."""
    if name in ("pipeline", "ddp2"):
        return 2
    if name in ("dp", "ddp_spawn") and launch.find_world().size == 1:
        return ranks
    return "auto"


def train(
    names: list[str], args: argparse.Namespace, batch: data.Batch
) -> dict[str, list[dict]]:
    """Train with one strategy after the other, and return what their ranks recorded."""
    records = {}
    for name in names:
        if name == "ddp2" and launch.find_world().launcher == "--spawn":
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        if args.prove:
            devices.compute_exactly()
        train_set, test_set = data.load(data.fetch(args.data))
        cnn = new_model(train_set, test_set, args)

        record = Record()
        trainer = L.Trainer(
            strategy=strategy_for_short_run(name),
            devices=devices_of(name, batch.ranks),
            max_epochs=args.epochs,
            callbacks=[record],
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(Digits(name, train_set, cnn, args, batch))
        records[name] = record.ranks
        if name in ONE_PROCESS:
            vgpu.stop()
    return records


def new_model(train: TensorDataset, test: TensorDataset, args: argparse.Namespace) -> CNN:
    torch.manual_seed(args.seed)
    return CNN(tuple(train[0][0].shape), data.num_classes(train, test), args.hidden)


def main(args: argparse.Namespace) -> None:
    world = launch.find_world()
    launched = world.size > 1
    ranks = world.size if launched else args.ranks
    batch = flags.split_batch(args.batch_size, ranks)

    names = args.strategy
    if "all" in names:
        names = [n for n in NAMES if not launched or n not in (*NO_LAUNCHER, "ddp2")]
    for name in names:
        strategy_for_short_run(name)  # reports a wrong name before anything starts
    if world.rank == 0:
        files.writable_folder(args.out)
    train_set, test_set = data.load(data.fetch(args.data))

    spawned = [name for name in names if name not in (*NO_LAUNCHER, "ddp2")]
    if launched:
        records = train(names, args, batch)
    else:
        records = train([name for name in names if name in NO_LAUNCHER], args, batch)
        # ddp2 changes the processes' environment, so it gets processes of its own.
        for group in (spawned, [name for name in names if name == "ddp2"]):
            if group:
                records |= launch.call(train, ranks, group, args, batch)[0]
    if world.rank > 0:
        return

    def fresh() -> CNN:
        return new_model(train_set, test_set, args)

    rows = {}
    for name in names:
        rows[name] = summarize(name, records[name], fresh(), test_set, args.link)
        metrics.check_loss(rows[name]["loss"], args.epochs - 1, world)

    if args.prove:
        compare_with_serial(
            rows, records, fresh, train_set, args, batch_size=batch.global_size
        )
    if args.measure_link:
        size = ("--hidden", args.hidden, "--batch-size", batch.global_size)
        measure_link(rows, __file__, spawned, ("--epochs", 1, *size), args.link)
    # The table, the verdict, the pictures and metrics.json.
    report(rows, EXACT, args, world, ranks=ranks, batch_size=batch.global_size)


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## All of them
# 230 steps each. `dp` and `pipeline` use two virtual GPUs in one process, `ddp2` two in each
# of two processes. `counted` is the median of the steps; for `async` the mean of its averaging
# rounds. `qadam` is compared with QAdam in one process, the others with SGD. Predictions (2)
# and (3):

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Strategies.py --prove --out results/10

# %% tags=["active-ipynb"]
# import json
# from pathlib import Path
# from multigpu.comparison import bytes_picture, consensus_picture, link_picture
#
#
# def rows_in(folder):
#     return json.loads(Path(folder, "metrics.json").read_text())["strategies"]
#
#
# rows = rows_in("results/10")
# headers = {name: rows[name]["bytes_counted"] - 153128 for name in ("ddp", "horovod")}
# print("gloo's headers: ddp", headers["ddp"], "horovod", headers["horovod"])
# print("qadam sends in steps 10, 11, 12:", *rows["bagua:qadam"]["bytes_by_step"][9:12])
# rounds = rows["bagua:async"]["averaging_rounds"]
# print("async: it has averaged while it trained:", rounds > 0)
# bytes_picture(rows)

# %% [markdown]
# A header is 576 bytes an all-reduce: `ddp` makes one a step (the model fits into one bucket),
# `horovod` one for each of eight parameters. `qadam` has ten steps of warm-up. Which ranks
# differ? Each rank of three strategies adds its own step before the next average:

# %% tags=["active-ipynb"]
# consensus_picture(rows)

# %% [markdown]
# **Four ranks.** An all-reduce sends more with four ranks. An exchange with one peer does not,
# and neither does sending to two neighbours.

# %% tags=["active-ipynb"]
# bagua = ("bytegrad", "low_precision_decentralized", "decentralized:shift_one")
# some = " ".join(["ddp", *(f"bagua:{name}" for name in bagua)])
# four = f"--strategy {some} --ranks 4 --epochs 1 --out results/10-four"
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Strategies.py {four}

# %% [markdown]
# **A slow link.** *Predict: a quarter of the bytes, so how many times as fast?* As root the
# cell joins two network namespaces by a link of 100 Mbit/s and measures; otherwise it
# predicts. The model has 540,362 weights here, so that sending takes longest.

# %% tags=["active-ipynb", "nbval-ignore-output"]
# from multigpu import slow_link
#
# measure = "" if slow_link.unavailable_reason() else "--measure-link"
# slow = f"--strategy {some} --hidden 1024 --epochs 1 {measure} --out results/10-link"
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Strategies.py {slow}
# link_picture(rows_in("results/10-link"), 100)

# %% [markdown]
# The time falls less than the bytes: bytegrad computes its bytes, and sends twice, one after
# the other. `shift_one`'s 4N bytes take as long as an all-reduce of 8N/2.
#
# | You have | Take | Why, or where |
# |---|---|---|
# | GPUs with fast links, or no reason | `ddp` | exact; hidden behind backward |
# | a notebook | `ddp_spawn` | the same numbers |
# | a slow network, many weights | `bagua:bytegrad`, `bagua:qadam` | the slow link |
# | ranks of uneven speed, no need of an exact result | `bagua:async` | the distances |
# | a loss over a node's batch | `ddp2` | the next notebook |

# %% tags=["active-ipynb"]
# print(metrics.route_row("10 every strategy", "results/10"))

# %% [markdown] tags=["footer"]
# [← 09 The Lightning-style wrapper](PTL_multiGPU.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/10-strategies/README.md) ·
# [10 Inside the strategies →](PTL_NodeBatch.ipynb)
