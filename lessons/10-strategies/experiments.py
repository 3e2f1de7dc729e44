"""The experiments of lesson 10: strategies side by side, a slow link, slow ranks, QAdam.

python lessons/10-strategies/experiments.py draws one-slow-rank.png.
"""

import importlib
import io
import json
import math
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import multigpu
import multigpu.trainer as L
from multigpu import data, launch, plots, proof
from multigpu.files import write_json
from multigpu.models import CNN
from multigpu.network import slow_link, wire
from multigpu.strategies import BaguaStrategy, QAdamOptimizer, strategy_by_name
from multigpu.strategies.bagua.async_average import AsyncModelAverage
from multigpu.strategies.costs import ONE_PROCESS, predicted_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

# The scripts, and the strategies that each is about.
STRATEGIES = {
    "PTL_Strategies": (
        "dp",
        "pipeline",
        "ddp_spawn",
        "ddp",
        "horovod",
        "bagua:gradient_allreduce",
        "ddp2",
    ),
    "PTL_Compressed": ("ddp", "ddp_fp16", "bagua:bytegrad", "bagua:qadam"),
    "PTL_Decentralized": (
        "ddp",
        "bagua:decentralized",
        "bagua:low_precision_decentralized",
        "bagua:async",
    ),
}
OWN_PROCESSES = (*ONE_PROCESS, "ddp_spawn", "ddp2")
LIMIT = 1e-5  # what rounding explains, in any weight
STEPS_BETWEEN_COPIES = 5

# The parts of a step, and how they are drawn.
PARTS = {
    "pause of the slow rank": plots.PARTS["idle"],
    "forward": plots.PARTS["forward"],
    "backward, with what it waits for": plots.PARTS["backward"],
    "update": plots.PARTS["update"],
}
PAUSE, FORWARD, BACKWARD, UPDATE = PARTS

COMPUTE = 0.05  # seconds of a step's computing, so that async can average during the epoch


# ---- strategies side by side ----------------------------------------------------------------


class Record(L.Callback):
    """Records a fit on each rank. Afterwards `ranks` has the records of all ranks, in order.

    bytes    the bytes that the rank sent in each step, as the kernel counts them, without what
             the Trainer sends between two steps; for bagua:async one number, per round
    steps    the numbers of the steps after which the weights were copied: 1, 6, 11, … and the
             last
    weights  the rank's weights at these steps

    What the script prints during the fit is not shown.
    """

    def __init__(self) -> None:
        self.record: dict[str, list] = {"bytes": [], "steps": [], "weights": []}
        self.ranks: list[dict[str, list]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.stdout, sys.stdout = sys.stdout, io.StringIO()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        sys.stdout = getattr(self, "stdout", sys.stdout)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.sent = wire.bytes_sent()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.record["bytes"].append(wire.bytes_sent() - self.sent)
        if trainer.global_step % STEPS_BETWEEN_COPIES == 1:
            self._copy(trainer.global_step, pl_module)

    def _copy(self, step: int, model: nn.Module) -> None:
        self.record["steps"].append(step)
        self.record["weights"].append(flat_weights(model))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step not in self.record["steps"]:
            self._copy(trainer.global_step, pl_module)
        algorithm = getattr(trainer.strategy, "algorithm", None)
        if isinstance(algorithm, AsyncModelAverage) and algorithm.thread:
            self.record["bytes"] = [algorithm.bytes_per_round()]
        self.ranks = trainer.strategy.gather_objects(self.record)
        sys.stdout = self.stdout

    def state_dict(self) -> dict[str, Any]:
        """The records, which ddp_spawn returns from the processes that it trains in."""
        return {"ranks": self.ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ranks = state_dict["ranks"]


def flat_weights(model: nn.Module) -> torch.Tensor:
    """A copy of all parameters, as one vector on the CPU."""
    return torch.cat([weight.detach().reshape(-1).cpu() for weight in model.parameters()])


def compare(
    stem: str, names: Sequence[str] | None = None, epochs: int = 3, ranks: int = 2
) -> dict[str, dict[str, Any]]:
    """Train with each strategy by the script `stem`, and print a table: a row for each.

    The ranks are processes on the CPU, so that the kernel counts what gloo sends. dp and
    pipeline are one process with two GPUs; in ddp2 each rank stands for a node with two.
    `names` are the script's strategies by default. A row has:

    loss, accuracy     after the last epoch
    predicted, counted bytes that a rank sends in a step; for bagua:async, in a round
    by_step            counted bytes of each step
    from_one           the largest difference of a weight of rank 0 from the same optimizer in
                       one process, which is a plain loop without the Trainer
    steps, apart       after which steps the ranks' weights were compared, and the consensus
                       distance: the largest distance of a rank's weights, as one vector, from
                       the mean over the ranks
    norm               the norm of this mean
    """
    names = STRATEGIES[stem] if names is None else names
    fits: Fits = {}
    groups = (
        (_fit_on_gpus, 1, [name for name in names if name in ONE_PROCESS]),
        (_fit_on_cpus, ranks, [name for name in names if name not in OWN_PROCESSES]),
        # It changes what its process knows of the ranks, so it gets processes of its own.
        (_fit_on_gpus, ranks, [name for name in names if name == "ddp2"]),
    )
    for function, processes, group in groups:
        if group:
            fits |= launch.call(function, processes, stem, group, epochs)[0]
    if "ddp_spawn" in names:
        fits |= _fit(stem, ["ddp_spawn"], epochs, ranks)

    serial_weights = _in_one_process(stem, epochs)
    rows = {name: _row(name, *fits[name], serial_weights, ranks) for name in names}
    print(table(rows, ranks))
    return rows


Fits = dict[str, tuple[dict[str, float], list[dict[str, list]]]]


def _fit(stem: str, names: Sequence[str], epochs: int, devices: int | str) -> Fits:
    """By name: the metrics of a fit with this strategy, and the records of its ranks."""
    script = importlib.import_module(stem)
    fits = {}
    for name in names:
        flags = ["--strategy", name, "--devices", str(devices), "--epochs", str(epochs)]
        record = Record()
        trainer, _ = script.fit(script.parse(flags), record)
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        fits[name] = metrics, record.ranks
    return fits


def _fit_on_cpus(stem: str, names: Sequence[str], epochs: int) -> Fits:
    """As one of several ranks. The kernel counts no bytes of NCCL, so GPUs are hidden."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return _fit(stem, names, epochs, "auto")


def _fit_on_gpus(stem: str, names: Sequence[str], epochs: int) -> Fits:
    """As a process, or as a rank that stands for a node, with two virtual GPUs."""
    first = 2 * int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    # All ranks see all GPUs, and NCCL refuses two ranks on one.
    multigpu.gpus(2 * int(os.environ["WORLD_SIZE"]), gpu="V100-16GB")
    return _fit(stem, names, epochs, f"{first},{first + 1}")


def _in_one_process(stem: str, epochs: int) -> Callable[[str], torch.Tensor]:
    """What one process learns in a plain loop: the weights, by the optimizer's name."""
    script: ModuleType = importlib.import_module(stem)
    args = script.parse(["--epochs", str(epochs)])
    train, test = script.read_digits()
    trained: dict[str, torch.Tensor] = {}

    def weights(optimizer: str) -> torch.Tensor:
        if optimizer not in trained:
            torch.manual_seed(args.seed)
            model = script.LitCNN(train, test, args)
            q_adam = QAdamOptimizer(model.parameters(), 0.001, 10) if optimizer else None
            settings = {"epochs": epochs, "batch_size": args.batch_size, "lr": 0.05}
            proof.train_serially(model, train, **settings, seed=args.seed, optimizer=q_adam)
            trained[optimizer] = flat_weights(model)
        return trained[optimizer]

    return weights


def _row(
    name: str,
    metrics: dict[str, float],
    records: list[dict[str, list]],
    serial_weights: Callable[[str], torch.Tensor],
    ranks: int,
) -> dict[str, Any]:
    """A strategy's row, as `compare` describes it.

    For bagua:async the copies of the last step are left out: at an epoch's end a rank waits
    while rounds go on.
    """
    copies = torch.stack([torch.stack(record["weights"]) for record in records]).double()
    mean = copies.mean(0)  # (copies, weights)
    away = copies[0, -1] - serial_weights("QAdam" if name == "bagua:qadam" else "")
    until = -1 if name == "bagua:async" else None
    half = 0.5 if name == "ddp_fp16" else 1
    return {
        **metrics,
        "predicted": half * predicted_bytes(name.split("_fp16")[0], len(away), ranks),
        "counted": median(records[0]["bytes"]),
        "by_step": records[0]["bytes"],
        "from_one": away.abs().max().item(),
        "steps": records[0]["steps"][:until],
        "apart": (copies - mean).norm(dim=-1).amax(0).tolist()[:until],
        "norm": mean.norm(dim=-1).tolist()[:until],
    }


def table(rows: dict[str, dict], ranks: int) -> str:
    """A line for each row, with numbers rounded to digits that are the same in each run."""
    lines = [
        f"{ranks} ranks".ljust(33)
        + "                      bytes per step       ranks    from one",
        " " * 33 + "  loss  accuracy  predicted    counted       apart     process",
    ]
    for name, row in rows.items():
        apart = row["apart"][-1]
        lines.append(
            f"{name:33}  {row['loss']:.2f}  {row['accuracy']:8.2f}  {row['predicted']:9,.0f}  "
            f"{row['counted']:9,.0f}  {'0' if apart == 0 else f'{apart:.0e}':>10}  "
            f"{_rounded(row['from_one']):>10}"
        )
    return "\n".join(lines)


def _rounded(difference: float) -> str:
    if difference <= LIMIT:
        return "< 1e-05"
    if not math.isfinite(difference):
        return f"{difference}"
    # Rounding magnifies the last bits, which differ between CPUs: the nearest power of ten.
    return f"~ {10.0 ** round(math.log10(difference)):.0e}"


def bytes_picture(rows: dict[str, dict]) -> "Figure":
    """A bar for each strategy: the bytes that a rank sends, as the kernel has counted them."""
    sent = {name: row["counted"] / 1000 for name, row in rows.items()}
    senders = {name: amount for name, amount in sent.items() if amount}
    least = min(senders, key=sent.get)
    ratio = max(senders.values()) / sent[least]
    title = f"{least} sends {sent['ddp'] / sent[least]:.1f} times fewer bytes than ddp"
    if ratio < 1.1:
        count = f"{len(senders)} of {len(sent)} send bytes through the network"
        title = f"{count}, and differ by {ratio - 1:.0%} at most"
    bars = {
        name + ("" if amount else ": 0"): {"sent": amount} for name, amount in sent.items()
    }
    rounds = " (async: per round)" if "bagua:async" in rows else ""
    return plots.stacked_bars(bars, f"kB per step and rank{rounds}, counted", title)


def consensus_picture(rows: dict[str, dict]) -> "Figure":
    """How far apart the ranks are, by step, for each strategy whose ranks are apart.

    The thick line is the norm of the weights of the first of them, to compare with.
    """
    apart = {name: row for name, row in rows.items() if max(row["apart"]) > 1e-6}
    fig = plots.figure(8, 3.2)
    axes = fig.add_subplot()
    for number, (name, row) in enumerate(apart.items()):
        look = plots.curve_look(number)
        axes.plot(row["steps"], row["apart"], markersize=3, linewidth=1, label=name, **look)
    first = next(iter(apart.values()))
    look = {"color": plots.INK, "linewidth": 2, "label": "norm of the weights"}
    axes.plot(first["steps"], first["norm"], **look)
    axes.set(xlabel="step", ylabel="consensus distance", yscale="log")
    # Just after an averaging round the distance is almost 0: begin the axis above that.
    axes.set_ylim(bottom=min(median(row["apart"]) for row in apart.values()) / 5)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    largest = max(farthest(row) for row in apart.values())
    fig.suptitle(
        f"The ranks' weights differ in {len(apart)} of {len(rows)} strategies, by at most "
        f"{largest:.1%} of their norm"
    )
    return fig


def farthest(row: dict[str, Any]) -> float:
    """The largest consensus distance of a run ÷ the norm of the weights."""
    return max(apart / norm for apart, norm in zip(row["apart"], row["norm"], strict=True))


# ---- PTL_Compressed: a slow link ------------------------------------------------------------

HIDDEN = 1024  # units of the CNN's widest layer: 540,362 weights


def over_slow_link(
    names: Sequence[str], megabits: float = 100, steps: int = 12
) -> dict[str, dict[str, float]]:
    """The seconds of a step of two ranks that a link of `megabits` Mbit/s joins.

    The link is between two network namespaces, so it needs root. Each rank computes 64 images.
    Where the link cannot be made, "measured" is missing; "predicted" is bytes ÷ rate.
    """
    weights = sum(weight.numel() for weight in CNN((1, 8, 8), hidden=HIDDEN).parameters())
    times = {
        name: {"predicted": predicted_bytes(name, weights, 2) * 8e-6 / megabits}
        for name in names
    }
    if reason := slow_link.unavailable_reason():
        print(f"Predicted, not measured: {reason}.")
        return times
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        command = [sys.executable, __file__, str(out), str(steps), *names]
        settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        settings["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns that an address has no name
        if slow_link.run(command, megabits, PYTHONPATH=str(ROOT), **settings):
            raise RuntimeError("a rank at the slow link has failed: see its message above")
        for name, seconds in json.loads(out.read_text()).items():
            times[name]["measured"] = seconds
    return times


def link_rank(out: Path, steps: int, names: Sequence[str]) -> None:
    """As one of two ranks: write the seconds of a step with each strategy, on rank 0."""
    seconds = {}
    for name in names:
        strategy = strategy_by_name(name)
        strategy.connect()
        torch.manual_seed(strategy.world.rank)
        model = CNN((1, 8, 8), hidden=HIDDEN)
        model, optimizer = strategy.setup(model, torch.optim.SGD(model.parameters(), 0.05))
        images, labels = torch.randn(64, 1, 8, 8), torch.arange(64) % 10
        for step in range(steps + 1):
            if step == 1:  # DDP makes its buckets anew after the first step
                strategy.barrier()
                began = time.perf_counter()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        strategy.barrier()
        seconds[name] = (time.perf_counter() - began) / steps
        strategy.close()
    if strategy.world.rank == 0:
        write_json(out, seconds)
    strategy.barrier()


def link_picture(times: dict[str, dict[str, float]], megabits: float = 100) -> "Figure":
    """Milliseconds per step over a slow link: predicted as bars, measured as points."""
    bars = {name: {"predicted": 1e3 * row["predicted"]} for name, row in times.items()}
    unit = f"ms per step at {megabits:g} Mbit/s; bars: predicted, bytes ÷ rate"
    fig = plots.stacked_bars(bars, unit, "Predicted: on a slow link the bytes are the time")
    measured = [1e3 * row["measured"] for row in times.values() if "measured" in row]
    if measured:
        axes = fig.axes[0]
        look = {"markerfacecolor": "white", "markeredgecolor": plots.EDGE}
        label = "measured, computing included"
        axes.plot(measured, range(len(measured)), "D", linestyle="none", label=label, **look)
        fig.legend(loc="outside lower right")
        longest = max(*measured, *(bar["predicted"] for bar in bars.values()))
        axes.set_xlim(0, 1.08 * longest)
        labels = [f"{name} {ms:.0f} ms" for name, ms in zip(times, measured, strict=True)]
        axes.set_title(f"Measured: {', '.join(labels)} per step")
    return fig


# ---- PTL_Compressed: what makes qadam differ from Adam --------------------------------------


class Outcome(NamedTuple):
    """A run in one process: its results, and how far its weights are from Adam's."""

    loss: float  # of the training images, after the last epoch
    accuracy: float  # of the test images
    largest: float  # the largest absolute difference in any weight
    median: float
    variance: float  # of the 1% of a layer's weights that end farthest, ÷ the layer's median


def qadam_in_one_process(
    warmups: Sequence[int] = (10, 100), epochs: int = 10, lr: float = 0.001, seed: int = 0
) -> dict[str, Outcome]:
    """What Adam learns in one process, and QAdam, which sends nothing there, by warm-up.

    Each trains `epochs` epochs of the digits, with 64 images per step.
    """
    # The model is so small that several threads only wait for each other.
    torch.set_num_threads(1)
    train, test = data.load(data.fetch(None))
    settings = Namespace(epochs=epochs, batch_size=64, lr=lr, seed=seed)

    def trained(make: Any) -> tuple[CNN, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = CNN(tuple(train[0][0].shape), data.num_classes(train, test), 64)
        optimizer = make(model.parameters())
        proof.train_serially(model, train, **vars(settings), optimizer=optimizer)
        return model, optimizer

    runs = {"Adam": trained(lambda weights: torch.optim.Adam(weights, lr))}
    for warmup in warmups:
        runs[f"QAdam, warm-up {warmup}"] = trained(
            lambda weights, steps=warmup: QAdamOptimizer(weights, lr, steps)
        )

    adam, _ = runs["Adam"]
    outcomes = {}
    for name, (model, optimizer) in runs.items():
        away = (flat_weights(model) - flat_weights(adam)).abs()
        with torch.no_grad():
            loss = F.cross_entropy(model(train.tensors[0]), train.tensors[1])
            right = model(test.tensors[0]).argmax(1) == test.tensors[1]
        outcomes[name] = Outcome(
            loss.item(),
            right.float().mean().item(),
            away.max().item(),
            away.median().item(),
            _variance_of_the_farthest(model, adam, optimizer),
        )
    return outcomes


def _variance_of_the_farthest(
    model: CNN, adam: CNN, optimizer: torch.optim.Optimizer
) -> float:
    """The variance of the weights farthest from Adam's ÷ the median; see Outcome.variance."""
    ratios = []
    for weight, of_adam in zip(model.parameters(), adam.parameters(), strict=True):
        if weight.ndim < 2:
            continue  # a bias has too few elements
        variance = optimizer.state[weight]["exp_avg_sq"].flatten()
        away = (weight - of_adam).abs().flatten()
        farthest = away.topk(max(1, len(away) // 100)).indices
        ratios.append((variance[farthest].median() / variance.median()).item())
    return median(ratios)


# ---- PTL_Decentralized: slow ranks ----------------------------------------------------------


class Timed(L.LightningModule):
    """A CNN on random images, which records when the parts of each step begin and end.

    `steps` has for each step a list of (part, start, end), in seconds of the machine's clock,
    which is the same for all ranks. Each step of each rank sleeps for `COMPUTE` seconds, as if
    a GPU computed. In each step one rank also pauses for `pause` seconds: the last one, or,
    with `in_turn`, each one in turn. `rounds` has the number of async's averaging rounds after
    each step.
    """

    def __init__(self, pause: float, in_turn: bool):
        super().__init__()
        torch.manual_seed(0)
        self.cnn = CNN((1, 8, 8))
        self.pause = pause
        self.in_turn = in_turn
        self.steps: list[list[tuple[str, float, float]]] = []
        self.rounds: list[int] = []

    def _record(self, part: str) -> None:
        now = time.perf_counter()
        self.steps[-1].append((part, self.began, now))
        self.began = now

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began = time.perf_counter()
        self.steps.append([])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        ranks = self.trainer.world_size
        if self.trainer.global_rank == (batch_idx % ranks if self.in_turn else ranks - 1):
            time.sleep(self.pause)
            self._record(PAUSE)
        time.sleep(COMPUTE)
        return F.cross_entropy(self.cnn(batch[0]), batch[1])

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self._record(FORWARD)

    def on_after_backward(self) -> None:
        self._record(BACKWARD)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._record(UPDATE)
        algorithm = getattr(self.trainer.strategy, "algorithm", None)
        self.rounds.append(getattr(algorithm, "averaging_rounds", 0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def _with_slow_rank(
    names: Sequence[str], steps: int, steps_in_turn: int, pause: float
) -> tuple[dict[str, list], dict[str, list], dict[str, list[int]]]:
    torch.set_num_threads(1)
    ranks = launch.find_world().size

    def recorded(name: str, steps: int, in_turn: bool) -> Timed:
        rows = steps * ranks * 16
        images = torch.randn(rows, 1, 8, 8)
        labels = torch.randint(0, 10, (rows,))
        loader = DataLoader(TensorDataset(images, labels), 16)
        asynchronous = name == "bagua:async"
        trainer = L.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=BaguaStrategy("async", sync_interval_ms=50)
            if asynchronous
            else strategy_by_name(name),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Timed(pause, in_turn)
        trainer.fit(module, loader)
        return module

    always_last = {name: recorded(name, steps, False) for name in names}
    in_turn = {name: recorded(name, steps_in_turn, True) for name in names}
    return (
        {name: module.steps for name, module in always_last.items()},
        {name: module.steps for name, module in in_turn.items()},
        {name: module.rounds for name, module in always_last.items()},
    )


# For each strategy, rank and step a list of (part, start, end).
Runs = dict[str, list[list[list[tuple[str, float, float]]]]]


def slow_rank(
    names: Sequence[str],
    steps: int = 24,
    steps_in_turn: int = 12,
    pause: float = 0.1,
    ranks: int = 2,
) -> tuple[Runs, Runs, dict[str, list[int]]]:
    """Each rank's steps with each strategy, if in each step one rank pauses.

    In the first result the last rank pauses in each of `steps` steps; in the second the ranks
    pause in turn, in `steps_in_turn` steps. result[name][rank][step] is a list of (part,
    start, end) in seconds since the strategy's first step. The third has, for the first one's
    strategies, the averaging rounds that rank 0 had made after each of its steps. The ranks
    are started once, for all strategies.
    """
    by_rank = launch.call(_with_slow_rank, ranks, names, steps, steps_in_turn, pause)
    always_last, in_turn, rounds = zip(*by_rank, strict=True)
    return _from_first_step(always_last), _from_first_step(in_turn), rounds[0]


def _from_first_step(by_rank: Sequence[dict[str, list]]) -> Runs:
    """The runs of all ranks, their times counted from each strategy's first step."""
    runs = {}
    for name in by_rank[0]:
        recorded = [of_rank[name] for of_rank in by_rank]
        first = min(start for rank in recorded for step in rank for _, start, _ in step)
        runs[name] = [
            [
                [(part, start - first, end - first) for part, start, end in step]
                for step in rank
            ]
            for rank in recorded
        ]
    return runs


def step_seconds(steps: list[list[tuple[str, float, float]]]) -> float:
    """The median seconds of a rank's steps. The first step, which warms up, is left out."""
    return median(step[-1][2] - step[0][1] for step in steps[1:])


def epoch_seconds(run: list[list[list[tuple[str, float, float]]]]) -> float:
    """The seconds from the first rank's first step to the end of the last rank's last step."""
    begin = min(steps[0][0][1] for steps in run)
    return max(steps[-1][-1][2] for steps in run) - begin


def slow_rank_picture(runs: dict[str, list]) -> "Figure":
    """Both ranks' steps by time, one panel per strategy; `runs` has slow_rank's results."""
    fig = plots.figure(8, 1 + 1.3 * len(runs))
    longest = max(end for run in runs.values() for rank in run for *_, end in rank[-1])
    known = {}
    for place, (name, run) in enumerate(runs.items()):
        axes = fig.add_subplot(len(runs), 1, place + 1)
        for rank, steps in enumerate(run):
            for number, step in enumerate(steps):
                for part, start, end in step:
                    look = PARTS[part]
                    known[part] = axes.barh(
                        rank,
                        end - start,
                        left=start,
                        height=0.6,
                        color=look.fill,
                        hatch=look.hatch,
                    )
                begin = step[0][1]
                axes.plot([begin, begin], [rank - 0.4, rank + 0.4], color=plots.INK, lw=0.5)
                if len(steps) == len(run[-1]) and step[-1][2] - begin > longest / 40:
                    axes.text(begin, rank - 0.42, f" {number + 1}", fontsize=7)
            if steps[-1][-1][2] < 0.9 * run[-1][-1][-1][2]:
                axes.text(
                    steps[-1][-1][2],
                    rank,
                    f"  the epoch's end: here it waits for rank {len(run) - 1}",
                    va="center",
                    fontsize=8,
                )
        fast = step_seconds(run[0])
        slow = step_seconds(run[-1])
        axes.set_title(
            f"{name}: a step takes {1e3 * fast:.1f} ms on rank 0, {1e3 * slow:.0f} ms on rank "
            f"{len(run) - 1}",
            fontsize=10,
            loc="left",
        )
        axes.set_yticks(range(len(run)), [f"rank {rank}" for rank in range(len(run))])
        axes.set_xlim(0, 1.02 * longest)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    fig.axes[-1].set_xlabel("seconds (measured); a thin line: a step begins")
    entries = {part: known[part] for part in PARTS if part in known}
    fig.legend(
        entries.values(),
        entries,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
        handlelength=1,
    )
    return fig


class Loop(NamedTuple):
    """A rank's steps in a loop without the Trainer."""

    seconds: float  # of all steps
    bytes_per_step: float  # that the rank sent, as the kernel counts them: the median


def one_slow_and_in_turn(
    names: Sequence[str], steps: int = 12, pause: float = 0.1, ranks: int = 4
) -> dict[str, tuple[Loop, Loop]]:
    """Rank 0's loop with each strategy: the last rank pauses in each step; the ranks in turn.

    The ranks are started once, for all strategies.
    """
    return launch.call(_loops, ranks, names, steps, pause)[0]


def _loops(names: Sequence[str], steps: int, pause: float) -> dict[str, tuple[Loop, Loop]]:
    return {
        name: (loop(name, steps, pause), loop(name, steps, pause, in_turn=True))
        for name in names
    }


def loop(name: str, steps: int, pause: float, in_turn: bool = False) -> Loop:
    """This rank's steps in a loop without the Trainer; for `launch.call`.

    The Trainer's ranks agree after each batch, in all strategies but async. In this loop a
    rank waits only for those for which the strategy waits. The last rank pauses in each step,
    or, with `in_turn`, each one in turn.
    """
    torch.set_num_threads(1)
    strategy = strategy_by_name(name)
    strategy.connect()
    rank, ranks = strategy.world.rank, strategy.world.size
    torch.manual_seed(0)
    model = CNN((1, 8, 8))
    model, optimizer = strategy.setup(model, torch.optim.SGD(model.parameters(), 0.05))
    images, labels = torch.randn(16, 1, 8, 8), torch.arange(16) % 10
    strategy.barrier()
    sent = [wire.bytes_sent()]
    began = time.perf_counter()
    for step in range(steps):
        if rank == (step % ranks if in_turn else ranks - 1):
            time.sleep(pause)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(wire.bytes_sent())
    seconds = time.perf_counter() - began
    strategy.barrier()
    strategy.close()
    return Loop(seconds, median(after - before for before, after in pairwise(sent)))


def main() -> None:
    if len(sys.argv) > 1:  # as a rank at the slow link
        out, steps, *names = sys.argv[1:]
        return link_rank(Path(out), int(steps), names)
    runs, _, rounds = slow_rank(["ddp", "bagua:async"])
    path = Path(__file__).with_name("one-slow-rank.png")
    print(plots.save(slow_rank_picture(runs), path).name)
    for name, run in runs.items():
        fast, slow = (1e3 * step_seconds(steps) for steps in run)
        print(f"{name}: {fast:.1f} ms per step on rank 0, {slow:.1f} ms on rank 1")
    print(f"averaging rounds of async by rank 0's steps: {rounds['bagua:async']}")


if __name__ == "__main__":
    main()
