# %% [markdown]
# # 10 · Every strategy: dp, ddp, ddp_spawn, ddp2, Horovod, Bagua
# **The question.** Twelve names, one model: what does each send, when, and when does which one win?
#
# **Predict first.** The model has N = 38,282 weights of 4 bytes, and there are n = 2 ranks. (1) How many bytes does a rank
# send in a step of `ddp`? Of `dp`? Which name sends least? (2) Which names learn what one process learns, to the last bits?
# (3) Whose ranks have different weights during the run?

# %%
import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import multigpu.trainer as L
from multigpu import data, devices, files, flags, launch, metrics, vgpu
from multigpu.comparison import Record, compared, from_serial, measured, report
from multigpu.models import CNN
from multigpu.strategies import ALGORITHMS, QAdamOptimizer
from multigpu.strategies.costs import ONE_PROCESS, by_name

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


# %%
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(
        "PTL_Strategies", "Train a CNN by one strategy or by all, and count what each sends."
    )
    flag, names = parser.add_argument, ", ".join(NAMES)
    flag(
        "--strategy",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help=f"all (default), or some of: {names}",
    )
    flag(
        "--ranks",
        type=flags.positive,
        default=2,
        help="processes; nodes for ddp2, devices for dp (default: 2)",
    )
    flag(
        "--hidden",
        type=flags.positive,
        default=64,
        help="units of the model's widest layer (default: 64)",
    )
    flag(
        "--link",
        type=flags.positive_float,
        default=100,
        metavar="MBIT",
        help="a link's Mbit/s (default: 100)",
    )
    flag(
        "--measure-link",
        action="store_true",
        help="measure a step's time over such a link, made here (as root)",
    )
    return parser.parse_args(arguments)


# %% [markdown]
# ## An all-reduce by hand
# The vector is cut into n pieces. Each rank passes pieces to its right: n − 1 hops to add them up, n − 1 to hand the sums
# round. A hop is N/n numbers of 4 bytes, so a rank sends 2(n − 1) · 4N/n. The kernel counts what really went out.

# %% tags=["active-ipynb"]
# import torch.distributed as dist
# from multigpu import plots, wire
#
#
# def ring(count):
#     dist.init_process_group("gloo")
#     rank, n = dist.get_rank(), dist.get_world_size()
#     pieces, began = list(torch.full((count,), float(rank)).chunk(n)), wire.sent()
#     for hop in range(2 * (n - 1)):
#         out, into = (rank - hop) % n, (rank - hop - 1) % n
#         came = torch.empty_like(pieces[into])
#         sending = dist.isend(pieces[out], (rank + 1) % n)
#         dist.recv(came, (rank - 1) % n)
#         sending.wait()
#         pieces[into] = pieces[into] + came if hop < n - 1 else came
#     middle = wire.sent()
#     dist.all_reduce(total := torch.full((count,), float(rank)))
#     return middle - began, wire.sent() - middle, torch.equal(torch.cat(pieces), total)
#
#
# for n in (2, 4):
#     hand, gloo, equal = launch.call(ring, n, 38400)[0]
#     print(f"{n} ranks: 8N(n−1)/n = {8 * 38400 * (n - 1) // n:,}; by hand {hand:,}, by gloo {gloo:,}; same sums: {equal}")

# %% [markdown]
# The rest is headers. All formulas (`multigpu/strategies/costs.py`), for prediction (1):

# %% tags=["active-ipynb"]
# from multigpu.strategies.costs import predicted
# names = ("ddp", "bagua:decentralized:shift_one", "bagua:low_precision_decentralized", "bagua:bytegrad")
# print("2 ranks:", *(f"{name} {predicted(name, 38282, 2):,.0f}" for name in ("dp", *names)), sep="\n    ")
# curves = {name: [predicted(name, 38282, n) / 38282 for n in (2, 4, 8, 16, 32, 64)] for name in names}
# picture = plots.lines((2, 4, 8, 16, 32, 64), curves, "ranks", "bytes a weight", "Predicted: at most 8 bytes a weight", None)
# picture.axes[0].legend(frameon=False, loc=(0.6, 0.54))
# picture

# %% [markdown]
# When? One step of each over 10 Gbit/s, simulated (by `lessons/10-strategies/picture.py`):
#
# ![What moves when](../lessons/10-strategies/what-moves-when.png)
#
# ## Step 1 · The model and its step
# `training_step` may see a piece of a batch; `training_step_end` gets what all pieces of this process gave, joined. So the
# loss is computed there. An image that the sampler repeats has weight 0, as in lesson 05.


# %%
class Digits(L.LightningModule):
    def __init__(self, name: str, train: TensorDataset, cnn: CNN, args: argparse.Namespace):
        super().__init__()
        self.name, self.train_set, self.args = name, train, args
        first = nn.Sequential(cnn.conv1, nn.Tanh(), cnn.conv2, nn.Tanh(), nn.Flatten())
        self.halves = nn.ModuleList([first, nn.Sequential(cnn.fc1, nn.Tanh(), cnn.fc2)])

    def pipeline_stages(self) -> list[nn.Module]:
        return list(self.halves)

    def train_dataloader(self) -> DataLoader:
        self.parts, self.mine = (
            self.trainer.strategy.shard
        )  # dp has one share, and cuts each batch itself
        sampler = DistributedSampler(
            self.train_set, self.parts, self.mine, seed=self.args.seed
        )
        return DataLoader(self.train_set, self.args.batch_size // self.parts, sampler=sampler)

    def on_train_batch_start(self, batch: list, batch_idx: int) -> None:
        self.done = batch_idx * self.args.batch_size

    def training_step(self, batch: list) -> torch.Tensor:
        logits = self.halves[1](self.halves[0](batch[0]))
        return F.cross_entropy(logits, batch[1].to(logits.device), reduction="none")

    def training_step_end(self, losses: torch.Tensor) -> torch.Tensor:
        places = (
            self.done
            + torch.arange(len(losses), device=losses.device) * self.parts
            + self.mine
        )
        real = places < len(self.train_set)
        own, total = int(real.sum()), (losses * real).sum()
        self.log("loss", total / max(1, own), on_step=False, on_epoch=True, batch_size=own)
        return total * self.parts / min(self.args.batch_size, len(self.train_set) - self.done)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.name == "bagua:qadam":
            return QAdamOptimizer(self.parameters(), self.args.lr / 50, warmup_steps=10)
        ranks = (
            self.trainer.world_size if self.name == "horovod" else 1
        )  # the strategy multiplies by it
        return torch.optim.SGD(self.parameters(), self.args.lr / ranks, momentum=0.9)


# %% [markdown]
# ## Step 2 · Train
# One `Trainer` for all: only the name differs. Ranks of `ddp2` stand for nodes, each with two devices.


# %%
def train(names: list[str], args: argparse.Namespace) -> dict[str, list[dict]]:
    """Train by one strategy after the other: what their ranks have recorded."""
    found = {}
    for name in names:
        if name == "ddp2" and launch.find().launcher == "--spawn":
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        if args.prove:
            devices.compute_exactly()
        images, test = data.load(data.fetch(args.data))
        alone = {"dp": args.ranks, "ddp_spawn": args.ranks} if launch.find().size == 1 else {}
        each = {"pipeline": 2, "ddp2": 2, **alone}.get(name, "auto")
        off = ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")
        record, quiet = Record(), dict.fromkeys(off, False)
        trainer = L.Trainer(
            strategy=by_name(name),
            devices=each,
            max_epochs=args.epochs,
            callbacks=[record],
            **quiet,
        )
        trainer.fit(Digits(name, images, new_model(images, test, args), args))
        found[name] = record.ranks
        if name in ONE_PROCESS:
            vgpu.stop()
    return found


def new_model(images: TensorDataset, test: TensorDataset, args: argparse.Namespace) -> CNN:
    torch.manual_seed(args.seed)
    return CNN(tuple(images[0][0].shape), data.classes(images, test), args.hidden)


def main(args: argparse.Namespace) -> None:
    world = launch.find()
    args.ranks = world.size if world.size > 1 else args.ranks
    args.batch_size, _ = flags.split(args.batch_size, args.ranks)
    by_themselves = (*ONE_PROCESS, "ddp_spawn")
    possible = [
        name for name in NAMES if world.size == 1 or name not in (*by_themselves, "ddp2")
    ]
    names = possible if "all" in args.strategy else args.strategy
    for name in names:
        by_name(name)  # a wrong name is told before anything starts
    if world.rank == 0:
        files.writable_folder(args.out)
    images, test = data.load(data.fetch(args.data))
    if world.size > 1:  # a launcher has started us
        found = train(names, args)
    else:
        found = train([name for name in names if name in by_themselves], args)
        for group in (
            [n for n in names if n not in (*by_themselves, "ddp2")],
            [n for n in names if n == "ddp2"],
        ):
            found |= launch.call(train, args.ranks, group, args)[0] if group else {}
    if world.rank:
        return
    rows = {
        n: compared(n, found[n], new_model(images, test, args), test, args.link) for n in names
    }
    [metrics.finite(row["loss"], args.epochs - 1, world) for row in rows.values()]
    if args.prove:
        from_serial(rows, found, lambda: new_model(images, test, args), images, args)
    if args.measure_link:
        more = ("--epochs", 1, "--hidden", args.hidden, "--batch-size", args.batch_size)
        measured(
            rows,
            __file__,
            [name for name in names if name not in (*by_themselves, "ddp2")],
            more,
            args.link,
        )
    report(rows, EXACT, args, world)  # the table, the verdict, the pictures, metrics.json


# %% tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# ## All of them
# 230 steps each. `dp` and `pipeline` take two virtual GPUs in one process, `ddp2` two in each of two. `counted` is a step's
# median, for `async` a sync's mean. `qadam` is compared with serial Adam, the rest with SGD. Predictions (2) and (3):

# %% tags=["active-ipynb"]
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Strategies.py --prove --out results/10

# %% tags=["active-ipynb"]
# import json
# from pathlib import Path
# from multigpu.comparison import bytes_picture, link_picture, spread_picture
# rows = json.loads(Path("results/10/metrics.json").read_text())["strategies"]
# print("gloo's headers: ddp", rows["ddp"]["bytes_counted"] - 153128, "horovod", rows["horovod"]["bytes_counted"] - 153128)
# print("qadam sends in steps 10, 11, 12:", *rows["bagua:qadam"]["bytes_each"][9:12])
# print("async: it has synced while it trained:", rows["bagua:async"]["syncs"] > 0)
# bytes_picture(rows)

# %% [markdown]
# A header is 576 bytes an all-reduce: `ddp` makes one a step (the model fits into one bucket), `horovod` one a parameter, eight.
# `qadam` has ten steps of warm-up. Whose ranks go apart? Each rank of three adds its own step before the next average:

# %% tags=["active-ipynb"]
# spread_picture(rows)

# %% [markdown]
# **Four ranks.** The all-reduce grows. A swap with one peer does not, nor what goes to two neighbours.

# %% tags=["active-ipynb"]
# some = "ddp bagua:bytegrad bagua:low_precision_decentralized bagua:decentralized:shift_one"
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Strategies.py --strategy {some} --ranks 4 --epochs 1 --out results/10-four

# %% [markdown]
# **A slow link.** *Predict: a quarter of the bytes, so how many times as fast?* As root the cell joins two network namespaces
# by 100 Mbit/s and measures; else it predicts. The model has 540,362 weights here, so that sending takes longest.

# %% tags=["active-ipynb", "nbval-ignore-output"]
# from multigpu import slow_link
# more = f"{some} --hidden 1024 --epochs 1 {'' if slow_link.obstacle() else '--measure-link'}"
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Strategies.py --strategy {more} --out results/10-link
# link_picture(json.loads(Path("results/10-link/metrics.json").read_text())["strategies"], 100)

# %% [markdown]
# Time falls less than bytes do: bytegrad computes its bytes, and sends twice in a row. `shift_one`'s 4N take as long as 8N/2.
#
# | You have | Take | Why, or where |
# |---|---|---|
# | GPUs with fast links, or no reason | `ddp` | exact; hidden behind backward |
# | a notebook | `ddp_spawn` | the same numbers |
# | a slow network, many weights | `bagua:bytegrad`, `bagua:qadam` | the slow link |
# | ranks of uneven speed, and it need not be exact | `bagua:async` | the spread |
# | a loss over a node's batch | `ddp2` | the next notebook |

# %% tags=["active-ipynb"]
# print(metrics.line("10 every strategy", "results/10"))
