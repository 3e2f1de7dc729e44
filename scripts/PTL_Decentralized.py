# %% [markdown]
# # 10 continued · Decentralized and asynchronous strategies
# **The question.** In ddp all ranks wait for all others, in each step. What if they wait for
# fewer, or for none?
#
# - `bagua:decentralized` averages weights. With all ranks it waits for as many as ddp, but its
#   exchange can run longer beside the computing. With the mode `shift_one` it averages with
#   one other rank.
# - `bagua:low_precision_decentralized` sends changes of the weights to two neighbours.
# - `bagua:async` averages weights when a timer says so, while training goes on.
#
# You need the first notebook of this lesson.

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
#     one_slow_and_in_turn,
#     slow_rank,
#     slow_rank_picture,
#     step_seconds,
# )
# from picture import print_steps

# %% [markdown]
# ## Predict first
# Write your answers, then run the cell. The cells below compare them with what happens. Steps
# 3 and 4 ask for more.

# %% tags=["active-ipynb", "guess"]
# guess_exchanges = 3  # 4 ranks, one peer at a time: exchanges until all have the same weight
# # In the two decentralized strategies, not in async: how far apart are the ranks' weights at
# # most, in % of their norm?
# guess_apart = 50

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
# The exchange pulls them together.
#
# ## Step 2 · Train: what does it cost?
# How far apart do the ranks run, and do they learn as much? The *consensus distance* is the
# distance of the farthest rank's weights, as one vector, from the mean over the ranks. Three
# epochs on two ranks, in about 10 seconds, longer on a busy machine:


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    comparison.run(args, script=__file__)


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_apart)
# flags = "--epochs 3 --prove --out results/10-decentralized"
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Decentralized.py {flags}

# %% tags=["active-ipynb"]
# run = json.loads(Path("results/10-decentralized/metrics.json").read_text())
# rows = run["strategies"]
# apart = max(
#     distance / norm
#     for name in ("bagua:decentralized", "bagua:low_precision_decentralized")
#     for distance, norm in zip(rows[name]["consensus_distance"], rows[name]["weights_norm"])
# )
# print("ddp equals one process:", run["proof"]["holds"])
# lesson.compare("ranks apart", guess_apart, 100 * apart, unit="%", digits=1)
# comparison.consensus_picture(rows)

# %% [markdown]
# The ranks of the two decentralized strategies stay near each other. Those of async run
# farther apart here: the percentage in the picture's title is theirs. Loss and accuracy are
# those of ddp, or nearly, with all three. But none of the three equals one process. And async
# depends on the timing: run the two cells again, and its numbers change.
#
# ## Step 3 · Wait for one peer
# Now four ranks, with `shift_one`: rank 0 averages with rank 2 in one step, and with rank 3 in
# the next. Rank 3 is slow: it sleeps 0.1 s in each of 12 steps, 1.2 s in all.

# %% tags=["active-ipynb", "guess"]
# guess_bytes = 1.0  # bytes that a rank sends in a step with shift_one, divided by ddp's
# guess_peer = 0.6  # s: rank 0's 12 steps with shift_one, if rank 3 sleeps in each step

# %% [markdown]
# The next cell measures that. Then it measures the same with pauses *in turn*: rank 0 sleeps
# in the first step, rank 1 in the second, and so on. It runs a loop without the Trainer,
# because the Trainer's ranks agree after each batch, in all strategies but async. It takes
# some seconds.

# %% tags=["active-ipynb"]
# lesson.need(guess_bytes, guess_peer)
# names = ("ddp", "bagua:decentralized:shift_one")
# loops = one_slow_and_in_turn(names, steps=12, pause=0.1, ranks=4)
# ddp, shift_one = (slow.bytes_per_step for slow, _ in loops.values())
# lesson.compare("bytes of shift_one / ddp", guess_bytes, shift_one / ddp, digits=2)

# %% tags=["active-ipynb", "nbval-ignore-output"]
# for name, (slow, turns) in loops.items():
#     one_slow = f"{slow.seconds:.2f} s with one slow rank"
#     print(f"{name}, rank 0's 12 steps: {one_slow}, {turns.seconds:.2f} s in turn")
# slow, _ = loops["bagua:decentralized:shift_one"]
# lesson.compare("shift_one, rank 0", guess_peer, slow.seconds, unit="s", digits=1)

# %% [markdown]
# An exchange with one peer sends 4 bytes per weight with any number of ranks. An all-reduce
# sends 4 with two ranks, 6 with four, and nearly 8 with many.
#
# To wait for one peer does not help if one rank is always slow: in every second step rank 0
# waits for rank 3, which has paused twice since their last average. If the ranks pause in
# turn, it helps: two ranks that are not each other's peer can pause at the same time.
#
# ## Step 4 · Wait for none
# In `async` a thread of each rank averages the weights, here 50 ms after the last averaging
# round. Two ranks train with the Trainer. Each of their 24 steps sleeps for 50 ms, as if a GPU
# computed. Rank 1 is slow: it sleeps 100 ms more in each step.

# %% tags=["active-ipynb", "guess"]
# guess_async = 150  # ms: rank 0's step in async (with ddp it takes as long as rank 1's)

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_async)
# runs, in_turn, rounds = slow_rank(["ddp", "bagua:async"], steps=24, pause=0.1)
# ddp, asynchronous = (1e3 * step_seconds(run[0]) for run in runs.values())
# print(f"ddp, rank 0's step: {ddp:.1f} ms")
# lesson.compare("async, rank 0's step", guess_async, asynchronous, unit="ms", digits=0)
# made = rounds["bagua:async"][-1]
# print(f"averaging rounds that ended during rank 0's 24 steps: {made}")
# if made < 3:
#     print("too few rounds to say that no step waits for them: run the cell again")
# slow_rank_picture(runs)

# %% [markdown]
# In ddp rank 0 waits in backward, where the gradients are averaged. In async its steps do not
# wait, although rounds ended during them. (Measured: the median of the steps after the first.)
# But the epoch ends when the slow rank ends, so it takes as long with both strategies.
#
# Does async save time if the ranks pause in turn? `slow_rank` has measured that, too, in 12
# steps: each rank pauses in every second one.

# %% tags=["active-ipynb", "nbval-ignore-output"]
# for name, run in in_turn.items():
#     print(f"{name}: the epoch takes {epoch_seconds(run):.2f} s")

# %% [markdown]
# Yes. In ddp the pauses of both ranks add up, twelve of them. In async each rank has only its
# own six.
#
# ## Step 5 · If no rank is slow
# Then the time to send counts. Is a decentralized step shorter than ddp's? One step on two
# V100s with four links, simulated (a larger CNN: 2 million weights, 8 MB, 1,024 images per
# rank):

# %% tags=["active-ipynb"]
# names = ("ddp", "bagua:bytegrad", "bagua:decentralized")
# steps = print_steps(names, gbits=(10, 25, 50, 100))

# %% [markdown]
# Over 10 and 25 Gbit/s it is. Over 10 Gbit/s bytegrad's is shorter still. Over 50 and 100
# Gbit/s it differs from ddp's by little more than the simulation's error
# (`benchmarks/vgpu_fidelity.json`). The picture shows why, over 10 Gbit/s: its exchange runs
# during forward and backward. ddp's begins in backward. `low_precision_decentralized` sends
# after the step, one byte for each weight to each of two neighbours:
#
# ![One step of two decentralized strategies](../lessons/10-strategies/decentralized.png)
#
# ## Which one?
# | You have | Take |
# |---|---|
# | one rank that is always slow | `ddp`, and replace that rank |
# | ranks that are slow at different times, and no need to repeat a result | `bagua:async` |
# | a result that must be that of one process | `ddp` |
#
# - If one rank was always slow, the end came about as late with `shift_one` and async as with
#   ddp (steps 3 and 4).
# - If the ranks paused in turn, async's epoch was shorter than ddp's (step 4). Its accuracy
#   was about ddp's (step 2).
# - `decentralized` has no row: its step was shorter than ddp's only over 10 and 25 Gbit/s, in
#   a simulation of two ranks (step 5). `low_precision_decentralized` has none, because
#   bytegrad was faster in the simulation, and also over a link of 100 Mbit/s
#   (`benchmarks/link.json`).
#
# More ranks and longer training were not tried. The
# [page of the lesson](../lessons/10-strategies/README.md#which-one) has one table for all of
# its strategies, with what was measured.

# %% [markdown] tags=["footer"]
# [← 10 Compressed strategies](PTL_Compressed.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/10-strategies/README.md) ·
# [10 A loss over a node's batch →](PTL_NodeBatch.ipynb)
