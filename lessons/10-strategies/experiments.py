"""The experiments of lesson 10: slow ranks, and QAdam's warm-up.

python lessons/10-strategies/experiments.py draws one-slow-rank.png.
"""

import time
from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import multigpu.trainer as L
from multigpu import data, launch, plots, proof, wire
from multigpu.comparison import flat_weights
from multigpu.models import CNN
from multigpu.strategies import BaguaStrategy, QAdamOptimizer, strategy_by_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The parts of a step, and how they are drawn.
PARTS = {
    "pause of the slow rank": plots.PARTS["idle"],
    "forward": plots.PARTS["forward"],
    "backward, with what it waits for": plots.PARTS["backward"],
    "update": plots.PARTS["update"],
}
PAUSE, FORWARD, BACKWARD, UPDATE = PARTS

COMPUTE = 0.05  # seconds of a step's computing, so that async can average during the epoch


# ---- sitting 3: slow ranks ------------------------------------------------------------------


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


# ---- sitting 2: what makes qadam differ from Adam -------------------------------------------


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


def main() -> None:
    runs, _, rounds = slow_rank(["ddp", "bagua:async"])
    path = Path(__file__).with_name("one-slow-rank.png")
    print(plots.save(slow_rank_picture(runs), path).name)
    for name, run in runs.items():
        fast, slow = (1e3 * step_seconds(steps) for steps in run)
        print(f"{name}: {fast:.1f} ms per step on rank 0, {slow:.1f} ms on rank 1")
    print(f"averaging rounds of async by rank 0's steps: {rounds['bagua:async']}")


if __name__ == "__main__":
    main()
