# %% [markdown]
# # 10 continued · Decentralized and asynchronous strategies
# **The question.** In ddp all ranks wait for all others, in each step. What if they wait for
# fewer, or for none?
#
# `bagua:decentralized` averages weights, with all ranks or with one other rank.
# `bagua:low_precision_decentralized` sends changes of the weights to two neighbours.
# `bagua:async` averages weights when a timer says so. You need the first notebook of this
# lesson.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse

from multigpu import comparison, launch
from multigpu.strategies.bagua.decentralized import peer

NAMES = ("ddp", "bagua:decentralized", "bagua:low_precision_decentralized", "bagua:async")


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    return comparison.parser(
        "PTL_Decentralized",
        "Train a CNN with strategies whose ranks have different weights, and compare them.",
        NAMES,
    ).parse_args(arguments)


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# import json
# from pathlib import Path
#
# from multigpu import lesson
#
# lesson.setup("10-strategies", ranks=True)
# from experiments import (
#     epoch_seconds,
#     rank_0_seconds,
#     slow_rank,
#     slow_rank_picture,
#     step_seconds,
# )
# from picture import print_steps

# %% [markdown]
# ## Predict first
# Write your answers, then run the cell. The cells below compare them with what happens.

# %% tags=["active-ipynb", "guess"]
# guess_exchanges = 3  # 4 ranks, one peer at a time: exchanges until all have the same weight
# # In the two decentralized strategies, not in async: how far apart are the ranks' weights at
# # most, in % of their norm?
# guess_apart = 50
# guess_bytes = 1.0  # 4 ranks, one peer each: bytes of a step, divided by ddp's
# # A step computes for 50 ms; rank 1 also sleeps 100 ms in each step. Rank 0's step, in ms?
# guess_async = 150

# %% [markdown]
# ## Step 1 · One peer at a time, by hand
# Four ranks start with the weights 0, 1, 2 and 3, and learn nothing. In each exchange a rank
# takes the mean of its own weight and one peer's. `peer` says whose: the ranks of the first
# half meet those of the second half in turn.


# %%
def exchange(weights: list[float], number: int) -> list[float]:
    """Each rank's weight after exchange `number`, in which it averages with its peer."""
    ranks = len(weights)
    peers = [peer(rank, number, ranks) for rank in range(ranks)]
    return [(weights[rank] + weights[peers[rank]]) / 2 for rank in range(ranks)]


# %% tags=["active-ipynb"]
# lesson.need(guess_exchanges)
# weights = [0, 1, 2, 3]
# exchanges = 0
# print("at first:        ", weights)
# while len(set(weights)) > 1:
#     weights = exchange(weights, exchanges)
#     exchanges += 1
#     print(f"after exchange {exchanges}:", weights)
# lesson.compare("exchanges", guess_exchanges, exchanges, digits=0)

# %% [markdown]
# No rank has sent its weight to all others, and still all have the mean. In training, each
# step of the optimizer moves the ranks apart again, because each rank uses its own gradient.
# The exchange pulls them together. The real strategy starts the exchange at the first forward
# of a step, so that it overlaps forward and backward:
#
# ![One step of two decentralized strategies](../lessons/10-strategies/decentralized.png)
#
# (Simulated, two ranks, 10 Gbit/s, by `lessons/10-strategies/picture.py`. A larger CNN: 2
# million weights, 8 MB, 1,024 images per rank.) `low_precision_decentralized` sends after the
# step: one byte for each weight, to each of two neighbours.
#
# ## Step 2 · Train
# How far apart do the ranks run? The *consensus distance* is the distance of the farthest
# rank's weights, as one vector, from the mean over the ranks. Three epochs on two ranks, in
# about 20 seconds, longer on a busy machine:


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    comparison.run(args, script=__file__)


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% tags=["active-ipynb"]
# lesson.need(guess_apart, guess_bytes)
# two = "ddp bagua:decentralized bagua:low_precision_decentralized"
# flags = "--epochs 3 --prove --out results/10-decentralized"
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Decentralized.py --strategy {two} {flags}

# %% tags=["active-ipynb"]
# def rows_in(folder):
#     return json.loads(Path(folder, "metrics.json").read_text())["strategies"]
#
#
# rows = rows_in("results/10-decentralized")
# apart = max(
#     distance / norm
#     for row in rows.values()
#     for distance, norm in zip(row["consensus_distance"], row["weights_norm"])
# )
# lesson.compare("ranks apart", guess_apart, 100 * apart, unit="%", digits=1)
# comparison.consensus_picture(rows)

# %% [markdown]
# In `decentralized` the ranks differ by what one step has added since the last average. In
# `low_precision_decentralized` no rank computes that average, and only the distance was
# measured. The picture compares it with the norm of the weights.
#
# **One peer each** (`shift_one`) needs an even number of ranks, and sends less than ddp from
# four ranks on: of two ranks, the peer is the only other rank. The next cell trains one epoch
# on four ranks, in about 20 seconds:

# %% tags=["active-ipynb"]
# four = "--strategy ddp bagua:decentralized:shift_one --ranks 4"
# flags = "--epochs 1 --out results/10-four"
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Decentralized.py {four} {flags}

# %% tags=["active-ipynb"]
# counted = [row["bytes_counted"] for row in rows_in("results/10-four").values()]
# lesson.compare("bytes of shift_one / ddp", guess_bytes, counted[1] / counted[0], digits=2)

# %% [markdown]
# An exchange with one peer sends 4 bytes per weight with any number of ranks. An all-reduce
# sends 6 with four ranks, and nearly 8 with many.
#
# ## Step 3 · One slow rank
# In `decentralized` a rank still waits for all others, in `shift_one` for its peer, in
# `low_precision_decentralized` for two neighbours. In `async` a thread of each rank
# averages the weights, while training goes on. Here it waits 50 ms between two averaging
# rounds. Each step sleeps for 50 ms, as if a GPU computed, and rank 1 sleeps 100 ms more in
# each of 24 steps, as if its GPU were shared with somebody else:

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_async)
# runs, in_turn, rounds = slow_rank(["ddp", "bagua:async"], steps=24, pause=0.1)
# ddp, asynchronous = (1e3 * step_seconds(run[0]) for run in runs.values())
# print(f"ddp, rank 0's step: {ddp:.1f} ms")
# lesson.compare("async, rank 0's step", guess_async, asynchronous, unit="ms", digits=0)
# made = rounds["bagua:async"][-1]
# print(f"averaging rounds that ended during rank 0's 24 steps: {made}")
# assert made >= 3, "too few rounds to say that no step waits for them: run the cell again"
# slow_rank_picture(runs)

# %% [markdown]
# In ddp rank 0 waits in backward, where the gradients are averaged. In async its steps do not
# wait, although rounds ended during them. (Measured: the median of the steps after the first.)
# The threads do wait: a rank's weights are locked during its step, so a round takes about two
# steps of the slow rank. And the epoch ends when the slow rank ends, so it takes as long with
# both strategies.
#
# What if the ranks pause in turn, each in every second step?

# %% tags=["active-ipynb", "nbval-ignore-output"]
# for name, run in in_turn.items():
#     print(f"{name}: the epoch takes {epoch_seconds(run):.2f} s")

# %% [markdown]
# In ddp the pauses of the two ranks add up. In async each rank has only its own twelve.
# So async saves time if different ranks are slow at different times.
#
# What if a rank waits for fewer? With four ranks and `shift_one`, rank 0 averages with rank 2
# in one step and with rank 3 in the next. Rank 3 sleeps 0.1 s in each of 12 steps, 1.2 s in
# all. *Predict: how long do rank 0's 12 steps take?*

# %% tags=["active-ipynb", "guess"]
# guess_peer = 0.6  # s: rank 0's 12 steps with shift_one, if rank 3 sleeps in each step

# %% [markdown]
# The next cell measures that, and then the same with pauses in turn. `rank_0_seconds` runs a
# loop without the Trainer, whose ranks agree after each batch in all strategies but async. It
# takes some seconds.

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_peer)
# found = rank_0_seconds(["ddp", "bagua:decentralized:shift_one"], steps=12, pause=0.1)
# for name, (slow, turns) in found.items():
#     one_slow = f"{slow:.2f} s with one slow rank"
#     print(f"{name}, rank 0's 12 steps: {one_slow}, {turns:.2f} s in turn")
# lesson.compare("shift_one, rank 0", guess_peer, slow, unit="s", digits=1)

# %% [markdown]
# To wait for one peer does not help if one rank is always slow: in every second step rank 0
# waits for rank 3, which has paused twice since their last average. If the ranks pause in
# turn, it helps: two ranks that are not each other's peer can pause at the same time.
#
# What does async cost? The next cell trains with it, and compares it with the run of step 2:

# %% tags=["active-ipynb", "nbval-ignore-output"]
# flags = "--strategy bagua:async --epochs 3 --out results/10-async"
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Decentralized.py {flags}
# row = rows_in("results/10-async")["bagua:async"]
# for name, result in (("decentralized", rows["bagua:decentralized"]), ("async", row)):
#     print(f"{name}: loss {result['loss']:.2f}, accuracy {result['test_accuracy']:.2f}")
# print(f"averaging rounds: {row['averaging_rounds']}")
# comparison.consensus_picture({"decentralized": rows["bagua:decentralized"], "async": row})

# %% [markdown]
# Here async has the loss and the accuracy of `decentralized`, or nearly. But its result
# depends on the timing, so no two runs are equal. `distance` of async was measured during the
# last epoch. At its very end the ranks wait until their weights are equal, so there it would
# be 0.
#
# Are the decentralized strategies faster than ddp? The step of the pictures, simulated on two
# V100s with four links:

# %% tags=["active-ipynb"]
# print_steps(["ddp", "bagua:bytegrad", "bagua:decentralized"], [10, 25, 50, 100])

# %% [markdown]
# On the slowest link bytegrad is the fastest; from 25 Gbit/s on it is `decentralized`, whose
# exchange overlaps forward, too.
#
# ## Which one?
# | You have | Take |
# |---|---|
# | ranks that are slow at different times, and no need to repeat a result | `bagua:async` |
# | a result that must be that of one process | `ddp` |
#
# The decentralized strategies have no row: they were faster than the others only in a
# simulation of two ranks.
#
# - `decentralized` on real GPUs, more ranks and longer training were not tried.
# - `shift_one` sends fewer bytes than ddp from four ranks on. Its time on a slow network was
#   not tried.
# - `low_precision_decentralized` was faster than ddp on two ranks over 100 Mbit/s, but slower
#   than bytegrad (`benchmarks/link.json`). In the simulated step above, over 10 Gbit/s, it is
#   slower than `decentralized`. Slow links between more ranks were not tried.

# %% [markdown] tags=["footer"]
# [← 10 Compressed strategies](PTL_Compressed.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/10-strategies/README.md) ·
# [10 A loss over a node's batch →](PTL_NodeBatch.ipynb)
