# %% [markdown]
# # 10 · Seven strategies
# **The question.** A Trainer's `strategy` has many names. Which of them learn what one process
# learns, and what do they send?
#
# Seven of this course's twelve names are here: `dp`, `pipeline`, `ddp_spawn`, `ddp`,
# `horovod`, `bagua:gradient_allreduce` and `ddp2`. You need lessons 02, 05 and 09. A
# [rank](../lessons/README.md#rank) is a process of the run. The model has N = 38,282 weights
# of 4 bytes, so its gradients are 153,128 bytes.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse

import torch
import torch.distributed as dist

from multigpu import comparison, launch, wire


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    return comparison.parser(
        "PTL_Strategies",
        "Train a CNN with the exact strategies, or others, and count what each sends.",
        comparison.EXACT,
    ).parse_args(arguments)


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# import json
# from pathlib import Path
#
# from multigpu import lesson, metrics, plots, proof
# from multigpu.strategies import DDPStrategy, HorovodStrategy
# from multigpu.strategies.costs import predicted_bytes
#
# lesson.setup("10-strategies", ranks=True)

# %% [markdown]
# ## Predict first
# Write your answers, then run the cell. The cells below compare them with what happens.

# %% tags=["active-ipynb", "guess"]
# guess_two = 153_128  # bytes that a rank sends to average the gradients of 2 ranks
# guess_four = 459_384  # the same, with 4 ranks
# # How many of the seven learn what one process learns, up to rounding? (If a strategy changes
# # the learning rate, the model of this notebook undoes that.)
# guess_exact = 3
# guess_rate = "equal"  # horovod and ddp, same learning rate: weights "equal" or "apart"?

# %% [markdown]
# ## Step 1 · An all-reduce by hand
# In an *all-reduce* every rank gives a vector, and every rank gets the sum. The ranks form a
# ring, and the vector is split into n chunks. In each hop a rank sends one chunk to its right
# neighbour. In the first n − 1 hops the chunks are added up; in the last n − 1 hops the sums
# are distributed. With three ranks that is four hops:
#
# ![A ring of three ranks, hop by hop](../lessons/10-strategies/ring.png)
#
# `ring` is the all-reduce by hand. `count_ring` compares it with that of gloo, PyTorch's
# library for CPUs.


# %%
def ring(vector: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' vectors (N,). The number of ranks must divide N."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    chunks = list(vector.chunk(n))
    for hop in range(2 * (n - 1)):
        out = (rank - hop) % n
        into = (rank - hop - 1) % n
        received = torch.empty_like(chunks[into])
        # Both at once: with NCCL, an isend that comes first can wait for its receive.
        messages = [
            dist.P2POp(dist.irecv, received, (rank - 1) % n),
            dist.P2POp(dist.isend, chunks[out], (rank + 1) % n),
        ]
        for message in dist.batch_isend_irecv(messages):
            message.wait()
        chunks[into] = chunks[into] + received if hop < n - 1 else received
    return torch.cat(chunks)


def count_ring(numbers: int) -> tuple[int, int, bool]:
    """Bytes that this rank sends by hand and by gloo; True if the sums are equal to 1e-5."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    vector = torch.randn(numbers)
    began = wire.bytes_sent()  # the kernel counts the bytes that were really sent
    total = ring(vector)
    middle = wire.bytes_sent()
    dist.all_reduce(vector)
    end = wire.bytes_sent()
    dist.barrier()  # a rank that ends closes its connections: first let all of them count
    equal = torch.allclose(total, vector, atol=1e-5)  # both round, in different orders
    return middle - began, end - middle, equal


# %% tags=["active-ipynb"]
# lesson.need(guess_two, guess_four)
# N = 38_282
# for n in (2, 4):
#     numbers = N // n * n  # ring() needs a vector that n divides
#     by_hand, by_gloo, equal = launch.call(count_ring, n, numbers)[0]
#     print(f"{n} ranks: by hand {by_hand:,} bytes, by gloo {by_gloo:,}; same sums: {equal}")
#
# for guess, n in ((guess_two, 2), (guess_four, 4)):
#     without_headers = predicted_bytes("ddp", N, n)
#     lesson.compare(f"{n} ranks, without headers", guess, without_headers, digits=0)

# %% [markdown]
# A hop sends N/n numbers of 4 bytes, so a rank sends 2(n − 1) · 4N/n bytes. The result is this
# formula's; what is counted beyond it is headers. With more ranks the bytes grow to 8 for each
# weight, and never above:

# %% tags=["active-ipynb"]
# ranks = (2, 4, 8, 16, 32, 64)
# curve = [predicted_bytes("ddp", N, n) / N for n in ranks]
# title = f"Predicted: {curve[0]:.0f} bytes per weight on 2 ranks, {curve[-1]:.1f} on 64"
# plots.lines(ranks, {"all-reduce": curve}, "ranks", "bytes per weight", title, 8)

# %% [markdown]
# ## Step 2 · Seven names, one Trainer
# This is lesson 09's Trainer. Only the name differs:
#
#     trainer = L.Trainer(strategy="horovod", devices=2, max_epochs=3)
#     trainer.fit(Digits(…))
#
# `Digits` (`multigpu/comparison/digits.py`) is the course's CNN. Its `training_step` may get a
# shard of a rank's batch, as in `dp`. So it returns the loss of each image, and
# `training_step_end` averages the losses of all shards in the process.
#
# - `dp` and `pipeline` (lessons 02 and 03) use two virtual GPUs in one process.
# - `ddp` (lesson 05) has one process per device. `ddp_spawn` (lesson 04) also starts them.
# - `horovod` averages each gradient as soon as it is computed.
# - `bagua:gradient_allreduce` is the first algorithm of Bagua. Its others send less, or wait
#   less: they are in the next two notebooks.
# - `ddp2` has one process per node: `dp` within the node, `ddp` between nodes. Here each rank
#   stands for a node with two virtual GPUs.
#
# [Horovod](https://horovod.readthedocs.io/en/stable) and
# [Bagua](https://tutorials.baguasys.com) are libraries. Both are rewritten here, on
# `torch.distributed`.


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    comparison.run(args, script=__file__)


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% [markdown]
# The next cell trains three epochs with each strategy, in about half a minute, longer on a
# busy machine. It prints the table at the end. `distance` is how far the ranks' weights are
# apart at the end. `from serial` is the largest difference between a weight and the same
# weight of a run in one process.

# %% tags=["active-ipynb"]
# lesson.need(guess_exact)
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Strategies.py --epochs 3 --prove --out results/10

# %% tags=["active-ipynb"]
# rows = json.loads(Path("results/10/metrics.json").read_text())["strategies"]
# exact = [name for name, row in rows.items() if row["difference_from_serial"] <= 1e-5]
# lesson.compare("strategies equal to one process", guess_exact, len(exact), digits=0)
#
# for name in ("ddp", "horovod"):
#     headers = rows[name]["bytes_counted"] - predicted_bytes(name, N, 2)
#     print(f"{name}: {headers:,.0f} bytes of headers per step")
# comparison.bytes_picture(rows)

# %% [markdown]
# All seven are exact. They differ in who starts the processes, and in what is sent when:
#
# - `dp` and `pipeline` send nothing through the network: their GPUs are in one process.
# - `ddp` makes one all-reduce for all gradients of this model. Its headers are 576 bytes.
# - `horovod` here makes one for each of eight parameters: 8 · 576 is 4,608. (The library packs
#   small gradients together first; this rewrite does not.)
# - `ddp2` also sends the times of its virtual GPUs' clocks, some hundred bytes.
#
# ## Step 3 · When does each send?
# One step of two ranks over 10 Gbit/s, simulated by `lessons/10-strategies/picture.py` (a
# larger CNN: 2 million weights, 8 MB of gradients, 1,024 images per rank):
#
# ![One step of ddp and of Horovod](../lessons/10-strategies/exact.png)
#
# Both send during backward; Horovod begins earlier, because ddp waits for a full bucket. That
# does not help here: one layer has nearly all of the weights, and the all-reduce of its
# gradients is longer than what is left of backward. Then the GPU waits: "collective" is the
# part of the step in which it computes nothing. The difference between the two steps is far
# less than the simulation's error. (ddp's two thin stripes near the end copy the means of its
# two buckets into the gradients.)
#
# ## Step 4 · Whose learning rate?
# `Digits` undoes what a strategy does to the learning rate. Without it: five steps of a small
# model on two ranks, in a loop without the Trainer, in some seconds.

# %% tags=["active-ipynb"]
# lesson.need(guess_rate, choices=("equal", "apart"))
#
#
# def five_steps(strategy, lr):
#     strategy.connect()
#     torch.manual_seed(0)
#     model = torch.nn.Linear(8, 3)
#     wrapped, optimizer = strategy.setup(model, torch.optim.SGD(model.parameters(), lr))
#     for step in range(5):
#         own = torch.Generator().manual_seed(10 * step + strategy.world.rank)
#         wrapped(torch.randn(4, 8, generator=own)).square().mean().backward()
#         optimizer.step()
#         optimizer.zero_grad()
#     return model
#
#
# ddp = launch.call(five_steps, 2, DDPStrategy(), 0.1)[0]
# away = {}
# for name, lr in {"horovod": 0.1, "horovod, lr / 2": 0.05}.items():
#     model = launch.call(five_steps, 2, HorovodStrategy(), lr)[0]
#     away[name] = proof.difference(model, ddp)
#     print(f"{name:15} {away[name]:.3f} from ddp")
# weights = "apart" if away["horovod"] > 1e-5 else "equal"
# lesson.compare("horovod and ddp, same lr", guess_rate, weights)

# %% [markdown]
# Lightning's Horovod strategy multiplied the learning rate by the number of ranks, and so does
# this one. With the learning rate divided by the number of ranks, it equals ddp.
#
# ## The line for the table of routes
# The next cell trains ten epochs with ddp, in some seconds. Its last line is for the
# [table of all routes](../lessons/routes.md).

# %% tags=["active-ipynb"]
# ten = "--strategy ddp --prove --out results/10-ddp"
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Strategies.py {ten}
# print(metrics.route_row("10 every strategy", "results/10-ddp"))

# %% [markdown]
# ## Which one?
# | You have | Take |
# |---|---|
# | no reason for another, or GPUs with fast links | `ddp` |
# | a notebook | `ddp_notebook`: like `ddp_spawn`, which Lightning refuses there |
# | code that is written for it | `dp`, `horovod` |
# | a loss over a node's whole batch | `ddp2`: the fourth notebook |
# | a model too large for a GPU | FSDP (lessons 06 and 13); stages: `pipeline` (lesson 03) |
#
# All seven learn the same here, so take what is easiest to start, and look at the learning
# rate if it is `horovod`.
#
# Over a slow network, all but `dp` and `pipeline` wait for the all-reduce, 4 to 8 bytes per
# weight. The strategies of the next notebook send fewer. What does that cost?

# %% [markdown] tags=["footer"]
# [← 09 The Lightning-style wrapper](PTL_multiGPU.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/10-strategies/README.md) ·
# [10 Compressed strategies →](PTL_Compressed.ipynb)
