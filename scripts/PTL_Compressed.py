# %% [markdown]
# # 10 continued · Compressed strategies
# **The question.** A rank can round the numbers that it sends. How many bytes does that save,
# and what does it cost?
#
# `bagua:bytegrad` and `bagua:qadam` do so. You need the first notebook of this lesson.

# %% [markdown] tags=["how-to-run"]
# Run every cell from the top with Shift+Enter, also the grey lines: a grey line is a folded
# cell, and a click on it shows the code.

# %% jupyter={"source_hidden": true}
import argparse

import torch

from multigpu import comparison, launch

NAMES = ("ddp", "bagua:bytegrad", "bagua:qadam")


# %% jupyter={"source_hidden": true}
def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    return comparison.parser(
        "PTL_Compressed",
        "Train a CNN with ddp and with strategies that send bytes, and compare them.",
        NAMES,
    ).parse_args(arguments)


# %% jupyter={"source_hidden": true} tags=["active-ipynb"]
# import json
# from pathlib import Path
#
# import torch.distributed as dist
# from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
# from torch.nn.parallel import DistributedDataParallel
#
# from multigpu import lesson, plots, proof, slow_link, wire
# from multigpu.models import CNN
#
# lesson.setup("10-strategies", ranks=True)
# from experiments import qadam_in_one_process
# from picture import print_steps

# %% [markdown]
# ## Predict first
# Write your answers, then run the cell. The cells below compare them with what happens.

# %% tags=["active-ipynb", "guess"]
# guess_error = 0.1  # largest error of a byte, in % of the numbers' range
# guess_fewer = 2  # how many times fewer bytes than ddp does bytegrad send?
# # In one process qadam sends nothing. After ten epochs, the largest difference between one of
# # its weights and the same weight of Adam? (Most weights are about 0.04.)
# guess_adam = 0.0
# guess_faster = 4  # how many times as fast is bytegrad's step over 100 Mbit/s?

# %% [markdown]
# ## Step 1 · Bytes by hand
# A byte has 256 values. Divide the range of the numbers, from the smallest to the largest,
# into 255 equal intervals, and round each number to the nearest of their 256 ends. The message
# is one byte for each number, where the exact strategies send four, and the range: two numbers
# of 4 bytes.


# %%
def to_bytes(numbers: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """The numbers (N,) as bytes, their minimum, and their maximum."""
    low = numbers.min().item()
    high = numbers.max().item()
    levels = ((numbers - low) / (high - low) * 255).round()
    return levels.to(torch.uint8), low, high


def to_numbers(levels: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """The numbers (N,) that the bytes stand for."""
    return low + levels / 255 * (high - low)


# %% tags=["active-ipynb"]
# lesson.need(guess_error)
# torch.manual_seed(0)
# gradient = torch.randn(10_000)
# levels, low, high = to_bytes(gradient)
# restored = to_numbers(levels, low, high)
# print("numbers: ", [f"{number:.3f}" for number in gradient[:6].tolist()])
# print("bytes:   ", levels[:6].tolist())
# print("restored:", [f"{number:.3f}" for number in restored[:6].tolist()])
#
# error = (restored - gradient).abs().max().item() / (high - low)
# lesson.compare("largest error", guess_error, 100 * error, unit="%", digits=2)

# %% [markdown]
# The largest error is half an interval, 1/510 of the range. But the range is that of the
# *largest* gradient, and most gradients are much smaller. How exact is a byte for those?

# %% tags=["active-ipynb"]
# sizes = [0.01, 0.03, 0.1, 0.3, 1, 3]  # standard deviations
# relative = []
# for size in sizes:
#     near = (gradient.abs() > size / 1.2) & (gradient.abs() < size * 1.2)
#     relative.append(((restored - gradient).abs() / gradient.abs())[near].median().item())
#
# title = f"Median error: {relative[0]:.0%} at {sizes[0]}, {relative[-1]:.1%} at {sizes[-1]}"
# labels = ("size of the gradient", "relative error")
# figure = plots.lines(sizes, {"one byte": relative}, *labels, title, None, powers=False)
# figure.axes[0].set_xscale("log")
# figure

# %% [markdown]
# Small gradients are lost in the rounding. The two strategies use bytes in different places:
#
# - **bytegrad**: every rank owns 1/n of the gradients. Each rank sends its chunks as bytes to
#   their owners; the owners average them, and send the means as bytes to all ranks. That is
#   2(n − 1)(N/n + 8) bytes, and two roundings.
# - **qadam**: Adam divides a running mean of the gradients, the *momentum*, by the root of a
#   running mean of their squares, the *variance*. The ranks send momenta as bytes, because
#   they change slowly. The variance is not sent: after a *warm-up* of exact Adam steps, ten
#   here, it is frozen.
#
# One step of ddp and of bytegrad on two V100s over 10 Gbit/s, simulated by
# `lessons/10-strategies/picture.py` (a larger CNN: 2 million weights, 8 MB of gradients, 1,024
# images per rank). bytegrad needs less time for the link, and more for *quantising*, which is
# computing the bytes. *All-to-all* sends them to the owners,
# [*all-gather*](../lessons/README.md#all-gather) sends the means:
#
# ![One step of ddp and of bytegrad](../lessons/10-strategies/compressed.png)
#
# ## Step 2 · Train
# The script trains ten epochs with ddp, bytegrad and qadam on two ranks, and then the same in
# one process, to compare. It takes about 20 seconds, longer on a busy machine. ddp and
# bytegrad use SGD with momentum; qadam uses its own optimizer, QAdam.


# %% jupyter={"source_hidden": true}
def main(args: argparse.Namespace) -> None:
    comparison.run(args, script=__file__)


# %% jupyter={"source_hidden": true} tags=["active-py"]
if __name__ == "__main__":
    launch.start(main, parse())

# %% tags=["active-ipynb"]
# lesson.need(guess_fewer, guess_adam)
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Compressed.py --prove --out results/10-compressed

# %% tags=["active-ipynb"]
# run = json.loads(Path("results/10-compressed/metrics.json").read_text())
# rows = run["strategies"]
# fewer = rows["ddp"]["bytes_counted"] / rows["bagua:bytegrad"]["bytes_counted"]
# lesson.compare("fewer bytes with bytegrad", guess_fewer, fewer, unit="×", digits=1)
# print("qadam sends in steps 10, 11, 12:", *rows["bagua:qadam"]["bytes_by_step"][9:12])
# comparison.bytes_picture(rows)

# %% [markdown]
# `from serial` compares bytegrad with SGD in one process, and qadam with QAdam in one process:
# that has the frozen variance, too, but sends nothing. So for both, `from serial` shows what
# rounding to bytes costs. bytegrad's weights are not ddp's, but its loss and its accuracy are
# nearly the same. qadam is further from Adam than from QAdam. Is the rest of the
# distance the cost of the frozen variance?
#
# ## Step 3 · What makes qadam differ from Adam?
# `qadam_in_one_process` trains 230 steps with Adam and with QAdam, each in one process.
# Nothing is sent, so nothing is rounded to bytes. The cell prints the distances of single
# weights from Adam's. It takes some seconds.

# %% tags=["active-ipynb"]
# lesson.need(guess_adam)
# outcomes = qadam_in_one_process(warmups=(10, 100), epochs=10)
# for name, run in outcomes.items():
#     print(f"{name}: loss {run.loss:.2f}, accuracy {run.accuracy:.2f}", end="; ")
#     print(f"at most {run.largest:.0e} from Adam, median {run.median:.0e}")
# largest = outcomes["QAdam, warm-up 10"].largest
# lesson.compare("QAdam from Adam", guess_adam, largest, digits=1)

# %% [markdown]
# It is the frozen variance: after ten steps the variance is still that of a model that has
# learned nothing. With a longer warm-up QAdam is nearer to Adam: it is Adam for 100 of the 230
# steps, in which qadam sends what ddp sends. Nearer is not better: here the short warm-up has
# the smallest loss. Other seeds and models were not tried.
#
# ## Step 4 · A slow link
# If you are root, this cell joins two network namespaces by a link of 100 Mbit/s, and measures
# the steps of one epoch. If you are not, it predicts their times. The model has 540,362
# weights here, so that sending takes longer than computing. The times depend on this machine;
# the table comes after about 15 seconds.

# %% tags=["active-ipynb", "nbval-ignore-output"]
# lesson.need(guess_faster)
# measure = "" if slow_link.unavailable_reason() else "--measure-link"
# slow = f"--strategy ddp bagua:bytegrad --hidden 1024 --batch-size 128 --epochs 1 {measure}"
# !OMP_NUM_THREADS=1 python ../scripts/PTL_Compressed.py {slow} --out results/10-link

# %% tags=["active-ipynb", "nbval-ignore-output"]
# rows = json.loads(Path("results/10-link/metrics.json").read_text())["strategies"]
# key = "link_seconds_measured" if measure else "link_seconds_predicted"
# faster = rows["ddp"][key] / rows["bagua:bytegrad"][key]
# lesson.compare("bytegrad's step", guess_faster, faster, unit="× as fast", digits=1)
# comparison.link_picture(rows, 100)

# %% [markdown]
# The time falls less than the bytes. bytegrad computes its bytes, and sends twice, one after
# the other. On a fast link this costs more than it saves. Which link is fast depends on how
# long the processor needs for its part:
#
# - **Two processes on CPUs**: ddp won each of three runs at 1 Gbit/s, on a busy machine.
#   Exercise 6 repeats it on yours.
# - **The simulated V100s** of the picture compute the bytes faster. The next cell prints their
#   steps with four links.
#
# `benchmarks/link.py` measures two processes with other sizes of the model, five times each.

# %% tags=["active-ipynb"]
# print_steps(["ddp", "bagua:bytegrad"], [10, 25, 50, 100])

# %% [markdown]
# Of these two, bytegrad wins at 10 and 25 Gbit/s, and ddp at 50 and 100.
#
# ## Step 5 · DDP itself can compress
# Plain DDP calls a *communication hook*, if it has one, in place of its all-reduce.
# `fp16_compress_hook` sends 2 bytes per number. Five steps on two ranks, without the hook and
# with it, in some seconds:

# %% tags=["active-ipynb"]
# def five_steps(hook=None):
#     dist.init_process_group("gloo")
#     torch.manual_seed(0)
#     model = DistributedDataParallel(CNN())
#     if hook:
#         model.register_comm_hook(None, hook)
#     optimizer = torch.optim.SGD(model.parameters(), 0.05)
#     own = torch.Generator().manual_seed(dist.get_rank())
#     for _ in range(5):
#         began = wire.bytes_sent()
#         model(torch.randn(32, 1, 8, 8, generator=own)).square().mean().backward()
#         sent = wire.bytes_sent() - began
#         optimizer.step()
#         optimizer.zero_grad()
#     dist.barrier()  # a rank that ends closes its connections
#     return model.module, sent
#
#
# plain, sent = launch.call(five_steps, 2)[0]
# (hooked, sent_hooked), (hooked_1, _) = launch.call(
#     five_steps, 2, default_hooks.fp16_compress_hook
# )
# print(f"bytes of a step: without the hook {sent:,}, with it {sent_hooked:,}")
# print(f"weights with the hook: {proof.difference(hooked, plain):.0e} from those without")
# print(f"weights of rank 0 and rank 1: {proof.difference(hooked, hooked_1):.0e} apart")

# %% [markdown]
# One line halves the bytes, and the ranks stay equal. `bf16_compress_hook` is used in the same
# way, but PyTorch refuses it on CPUs. Two hooks were not run here: PowerSGD sends matrices of
# low rank (`torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`), and post-local SGD
# averages over the ranks of one node only, after a warm-up (`….post_localSGD_hook`).
#
# ## Which one?
# | You have | Take |
# |---|---|
# | a slow network, a large model, SGD | `bagua:bytegrad` |
# | the same, Adam | `bagua:qadam`; a longer warm-up is nearer to Adam and sends more |
# | plain DDP, half of the bytes is enough | `register_comm_hook`, `fp16_compress_hook` |
# | a network that is fast for your processor: see above | `ddp` |
#
# Compressed or not, in each step every rank waits for all others. In the next notebook ranks
# wait for fewer others, or for none.

# %% [markdown] tags=["footer"]
# [← 10 Seven strategies](PTL_Strategies.ipynb) ·
# [syllabus](../lessons/README.md) ·
# [page of this lesson](../lessons/10-strategies/README.md) ·
# [10 Decentralized and async →](PTL_Decentralized.ipynb)
