"""Compare strategies by one run with each: loss, bytes sent and consensus distance."""

import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from multigpu import launch, plots, proof, slow_link, wire
from multigpu.errors import UserError, pluralize
from multigpu.files import write_json
from multigpu.strategies import (
    BaguaStrategy,
    PipelineStrategy,
    QAdamOptimizer,
    Strategy,
    strategy_by_name,
)
from multigpu.strategies.bagua.async_average import AsyncModelAverage
from multigpu.strategies.costs import predicted_bytes
from multigpu.trainer import Callback, LightningModule, Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS_BETWEEN_COPIES = 5
QADAM_WARMUP = 10  # steps


def strategy_for_short_run(name: str) -> Strategy:
    """Return the strategy with this name, with settings for a short run.

    bagua:async averages every 10 ms. pipeline has 2 micro-batches.
    """
    if name == "bagua:async":
        return BaguaStrategy("async", sync_interval_ms=10)
    return PipelineStrategy(micro_batches=2) if name == "pipeline" else strategy_by_name(name)


def flat_weights(model: nn.Module) -> torch.Tensor:
    """A copy of all parameters, as one vector on the CPU."""
    return torch.cat(
        [parameter.detach().reshape(-1).cpu() for parameter in model.parameters()]
    )


class Record(Callback):
    """Records a fit on each rank. Afterwards `ranks` has the records of all ranks, in order.

    loss              the loss of each epoch, over all ranks
    bytes             the bytes that the rank sent in each step, as the kernel counts them; for
                      bagua:async one number, the bytes per averaging round
    ends              the time at which each step ended, in seconds
    weights           copies of the rank's weights: after step 1, 1 + STEPS_BETWEEN_COPIES, …
                      and at the end
    steps             the number of steps made at each copy
    device            "cpu", "cuda" or "vgpu"
    averaging_rounds  for bagua:async, the number of averaging rounds until the end

    The copies are compared after the run. `bytes` does not contain what the Trainer itself
    sends between two steps.
    """

    def __init__(self) -> None:
        lists = ("loss", "bytes", "ends", "weights", "steps")
        self.record: dict[str, Any] = {name: [] for name in lists}
        self.ranks: list[dict[str, Any]] = []
        self.sent_before_step = 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.sent_before_step = wire.bytes_sent()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.record["bytes"].append(wire.bytes_sent() - self.sent_before_step)
        self.record["ends"].append(time.perf_counter())
        if trainer.global_step % STEPS_BETWEEN_COPIES == 1:
            self._copy(trainer.global_step, pl_module)

    def _copy(self, step: int, module: LightningModule) -> None:
        weights = self.record["weights"]
        steps = self.record["steps"]
        if step in steps:  # the last step, which is copied again at the end
            weights.pop()
            steps.pop()
        weights.append(flat_weights(module))
        steps.append(step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record["loss"].append(float(trainer.callback_metrics["loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._copy(trainer.global_step, pl_module)
        self.record["device"] = trainer.strategy.device.type
        algorithm = getattr(trainer.strategy, "algorithm", None)
        # With one rank, or while async warms up, there is no thread.
        if isinstance(algorithm, AsyncModelAverage) and algorithm.thread:
            self.record["averaging_rounds"] = algorithm.averaging_rounds
            self.record["bytes"] = [bytes_per_round(algorithm)]
        self.ranks = trainer.strategy.gather_objects(self.record)

    def state_dict(self) -> dict[str, Any]:
        """The records, which ddp_spawn returns from the processes that it trains in."""
        return {"ranks": self.ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ranks = state_dict["ranks"]


def bytes_per_round(algorithm: AsyncModelAverage) -> float:
    """Bytes that this rank sends per averaging round, vote included: the mean of three rounds.

    Call it while nothing else is sent. The count begins and ends between two rounds, so it
    contains only whole rounds. (It can have one vote more or less, which is 50 bytes.)
    """
    with algorithm.round_lock:
        before = wire.bytes_sent()
        first = algorithm.averaging_rounds
    while algorithm.averaging_rounds < first + 3 and algorithm.thread.is_alive():
        time.sleep(0.001)
    with algorithm.round_lock:
        return (wire.bytes_sent() - before) / max(1, algorithm.averaging_rounds - first)


def summarize(
    name: str,
    records: list[dict[str, Any]],
    model: nn.Module,
    test: TensorDataset,
    megabits: float,
) -> dict[str, Any]:
    """One strategy's row, from the ranks' records; `model` gets rank 0's last weights.

    "consensus_distance" is a list with one number for each copy, made at "consensus_steps":
    the largest Euclidean distance of a rank's weights from the mean over the ranks. (Papers
    often take the root mean square over the ranks.) "weights_norm" is the norm of this mean.
    """
    copies = [torch.stack(record["weights"]) for record in records]
    every = torch.stack(copies).double()  # (ranks, copies, N)
    mean = every.mean(0)  # (copies, N)
    distances = (every - mean).norm(dim=-1)  # (ranks, copies)
    first = records[0]
    ends = first["ends"]
    nn.utils.vector_to_parameters(first["weights"][-1], model.parameters())
    with torch.no_grad():
        correct = model(test.tensors[0]).argmax(1) == test.tensors[1]
    expected = predicted_bytes(name, every.shape[-1], len(records))
    return {
        "loss": first["loss"][-1],
        "losses": first["loss"],
        "test_accuracy": correct.float().mean().item(),
        "device": first["device"],
        "ranks": len(records),
        "bytes_predicted": expected,
        "bytes_counted": statistics.median(first["bytes"]),
        "link_seconds_predicted": expected * 8e-6 / megabits,
        "seconds": (ends[-1] - ends[0]) / max(1, len(ends) - 1),
        "bytes_by_step": first["bytes"],
        "averaging_rounds": first.get("averaging_rounds"),
        "consensus_steps": first["steps"],
        "consensus_distance": distances.amax(0).tolist(),
        "weights_norm": mean.norm(dim=-1).tolist(),
    }


def table(rows: dict[str, dict], ranks: int) -> str:
    """The table of all rows, with numbers rounded to digits that are the same in each run.

    The last column is empty unless `compare_with_serial` was called.
    """
    titles = "loss  accuracy  bytes predicted  counted  consensus distance  from serial"
    lines = [f"{pluralize(ranks, 'rank'):34}  {titles}"]
    for name, row in rows.items():
        counted = f"{row['bytes_counted']:,.0f}"
        # NCCL's bytes do not pass through the kernel's sockets.
        if row["device"] == "cuda" and row["bytes_predicted"]:
            counted = "not counted"
        distance = row["consensus_distance"][-1]
        line = (
            f"{name:34}  {row['loss']:.2f}  {row['test_accuracy']:8.2f}  "
            f"{row['bytes_predicted']:15,.0f}  {counted:>7}  "
            f"{'0' if distance == 0 else f'{distance:.0e}':>18}  {_from_serial_text(row):>11}"
        )
        lines.append(line.rstrip())
    return "\n".join(lines)


def _from_serial_text(row: dict[str, Any]) -> str:
    difference = row.get("difference_from_serial")
    if difference is None:
        return ""
    return "within 1e-5" if difference <= 1e-5 else f"{difference:.0e}"


def measure_link(
    rows: dict[str, dict],
    script: str,
    names: Sequence[str],
    flags: Sequence[object],
    megabits: float,
) -> None:
    """Add `link_seconds_measured` to the rows of `names`: seconds per step of `script`.

    The two ranks run in two network namespaces, which a link of `megabits` Mbit/s joins.
    Raises UserError if the link cannot be made, if there is nothing to measure, or if a rank
    fails.
    """
    if not names:
        raise UserError(
            "--measure-link: none of these strategies has ranks that a launcher starts, "
            "as ddp has."
        )
    if rows[names[0]]["ranks"] != 2:
        raise UserError(
            f"--measure-link: the link joins two ranks, but there are "
            f"{rows[names[0]]['ranks']}: give --ranks 2."
        )
    if why_not := slow_link.unavailable_reason():
        raise UserError(
            f"--measure-link: {why_not}. Leave the flag out: the times are then predicted."
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, "--strategy", *names, *map(str, flags)]
        silent = ["sh", "-c", 'exec "$@" >/dev/null', "sh"]
        failed = slow_link.run(
            [*silent, *command, "--out", folder],
            megabits,
            OMP_NUM_THREADS="1",
            TORCH_CPP_LOG_LEVEL="ERROR",
        )
        if failed:
            raise UserError("a rank on the slow link has failed: see its message above.")
        results = json.loads((Path(folder) / "metrics.json").read_text())["strategies"]
    for name in names:
        rows[name]["link_seconds_measured"] = results[name]["seconds"]


def bytes_picture(rows: dict[str, dict]) -> "Figure":
    """A bar for each strategy: the bytes that a rank sends.

    On CUDA they are predicted, because the kernel does not count NCCL's bytes.
    """
    predicted = any(row["device"] == "cuda" for row in rows.values())
    key = "bytes_predicted" if predicted else "bytes_counted"
    sent = {name: row[key] / 1000 for name, row in rows.items()}
    most = "ddp" if "ddp" in sent else max(sent, key=sent.get)
    least = min(filter(sent.get, sent), key=sent.get, default="")
    title = "Nothing is sent"
    if least:
        title = f"{least} sends {sent[most] / sent[least]:.1f} times fewer bytes than {most}"
    bars = {
        name + ("" if amount else ": 0"): {"sent": amount} for name, amount in sent.items()
    }
    source = "predicted" if predicted else "counted by the kernel"
    unit = f"kB per step and rank (async: per round), {source}"
    return plots.stacked_bars(bars, unit, title)


def consensus_picture(rows: dict[str, dict]) -> "Figure":
    """The consensus distance by step, of each strategy whose distance exceeds 1e-6.

    The grey line is the norm of the weights, to compare with: the mean of these strategies.
    """
    apart = {name: row for name, row in rows.items() if max(row["consensus_distance"]) > 1e-6}
    fig = plots.figure(8, 3.2)
    axes = fig.add_subplot()
    for number, (name, row) in enumerate(apart.items()):
        axes.plot(
            row["consensus_steps"],
            row["consensus_distance"],
            markersize=3,
            linewidth=1,
            label=name,
            **plots.curve_look(number),
        )
    axes.set(xlabel="step", ylabel="consensus distance")
    title = f"The ranks' weights differ in {len(apart)} of {len(rows)} strategies"
    if apart:
        norms = torch.tensor([row["weights_norm"] for row in apart.values()]).mean(0)
        steps = next(iter(apart.values()))["consensus_steps"]
        axes.plot(steps, norms, color="grey", linewidth=2, label="norm of the weights")
        axes.set_yscale("log")
        # Just after an averaging round the distance is almost 0: begin the axis above that.
        medians = [statistics.median(row["consensus_distance"]) for row in apart.values()]
        axes.set_ylim(bottom=min(medians) / 5)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        largest = max(
            distance / norm
            for row in apart.values()
            for distance, norm in zip(
                row["consensus_distance"], row["weights_norm"], strict=True
            )
        )
        title += f", by at most {largest:.1%} of their norm"
    fig.suptitle(title)
    return fig


def link_picture(rows: dict[str, dict], megabits: float) -> "Figure":
    """Milliseconds per step over a slow link: predicted as bars, measured as points."""
    bars = {
        name: {"predicted": 1e3 * row["link_seconds_predicted"]} for name, row in rows.items()
    }
    unit = f"ms per step at {megabits:g} Mbit/s; bars: predicted, bytes ÷ rate"
    fig = plots.stacked_bars(bars, unit, "")
    axes = fig.axes[0]
    times = _measured_milliseconds(rows)
    title = "Predicted: on a slow link the bytes are the time"
    if times:
        positions = [list(rows).index(name) for name in times]
        label = "measured, computing included"
        look = {"markerfacecolor": "white", "markeredgecolor": plots.EDGE}
        axes.plot(times.values(), positions, "D", linestyle="none", label=label, **look)
        fig.legend(loc="outside lower right")
        longest = max(*times.values(), *(bar["predicted"] for bar in bars.values()))
        axes.set_xlim(0, 1.08 * longest)
        slow = "ddp" if "ddp" in times else max(times, key=times.get)
        fast = min(times, key=times.get)
        title = f"Measured: {fast} is {times[slow] / times[fast]:.1f} times as fast as {slow}"
    axes.set_title(title)
    return fig


def _measured_milliseconds(rows: dict[str, dict]) -> dict[str, float]:
    return {
        name: 1e3 * row["link_seconds_measured"]
        for name, row in rows.items()
        if "link_seconds_measured" in row
    }


def compare_with_serial(
    rows: dict[str, dict],
    records: dict[str, list[dict]],
    make: Callable[[], nn.Module],
    train: TensorDataset,
    args: Namespace,
    *,
    batch_size: int,
) -> None:
    """Add `difference_from_serial` to each row.

    It is the largest absolute difference between rank 0's weights and a serial run's. The
    serial run takes --epochs, --lr and --seed from `args`; `batch_size` is the number of
    images in a global batch. It uses SGD; for bagua:qadam it uses QAdam in one process with
    lr / 50, whose variance is frozen as well, so that only the bytes make a difference. The
    row of bagua:qadam also gets `difference_from_adam`, from Adam, which never freezes it.
    `make()` returns a new model.
    """
    settings = {
        "epochs": args.epochs,
        "batch_size": batch_size,
        "lr": args.lr,
        "seed": args.seed,
    }
    on_cuda = any(row["device"] == "cuda" for row in rows.values())
    device = torch.device("cuda" if on_cuda else "cpu")
    data = TensorDataset(*(tensor.to(device) for tensor in train.tensors))
    optimizers: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
        "SGD": None,  # proof.train_serially's default
        "QAdam": lambda weights: QAdamOptimizer(weights, args.lr / 50, QADAM_WARMUP),
        "Adam": lambda weights: torch.optim.Adam(weights, args.lr / 50),
    }
    trained: dict[str, torch.Tensor] = {}

    def difference(name: str, optimizer: str) -> float:
        if optimizer not in trained:
            model = make().to(device)
            how = optimizers[optimizer]
            own = how(model.parameters()) if how else None
            weights = proof.train_serially(model, data, **settings, optimizer=own)
            trained[optimizer] = flat_weights(weights)
        last = records[name][0]["weights"][-1]
        return (last - trained[optimizer]).abs().max().item()

    for name, row in rows.items():
        qadam = name == "bagua:qadam"
        row["difference_from_serial"] = difference(name, "QAdam" if qadam else "SGD")
        if qadam:
            row["difference_from_adam"] = difference(name, "Adam")


def report(
    rows: dict[str, dict],
    exact: Sequence[str],
    args: Namespace,
    world: launch.World,
    *,
    ranks: int,
    batch_size: int,
) -> None:
    """Print the table, the proof and the measured times; save the figures and metrics.json.

    With --prove the strategies of `exact` must equal the serial run; exit code 1 if they do
    not. The loss and accuracy in metrics.json are ddp's; without ddp, the first strategy's.
    `batch_size` is the number of images in a global batch of all `ranks`.
    """
    print(table(rows, ranks))
    if "difference_from_adam" in rows.get("bagua:qadam", {}):
        print(
            f"bagua:qadam is compared with QAdam in one process. From Adam it is "
            f"{rows['bagua:qadam']['difference_from_adam']:.0e} away."
        )
    verdict = _verdict(rows, exact, args)
    times = _measured_milliseconds(rows)
    if times:
        slow = times.get("ddp", max(times.values()))
        texts = (
            f"{name} {ms:.0f}" + (f" ({slow / ms:.1f} times as fast)" if ms != slow else "")
            for name, ms in times.items()
        )
        print(f"measured at {args.link:g} Mbit/s, ms per step: {', '.join(texts)}")
    pictures = {
        "bytes": bytes_picture(rows),
        "consensus": consensus_picture(rows),
        "link": link_picture(rows, args.link),
    }
    paths = [
        plots.save(picture, args.out / f"{name}.png") for name, picture in pictures.items()
    ]
    print("figures:", *paths)
    representative = rows.get("ddp") or next(iter(rows.values()))
    metrics = {
        "world_size": ranks,
        "nodes": world.nodes,
        "launcher": world.launcher,
        "devices": ranks,
        "device": representative["device"],
        "batch_size": batch_size,
        "link_megabits": args.link,
        "loss": representative["loss"],
        "test_accuracy": representative["test_accuracy"],
        "proof": verdict,
        "strategies": rows,
    }
    print(f"metrics: {write_json(args.out / 'metrics.json', metrics)}", flush=True)
    if verdict and not verdict["holds"]:
        sys.exit(1)


def _verdict(
    rows: dict[str, dict], exact: Sequence[str], args: Namespace
) -> dict[str, Any] | None:
    """Print and return the proof; None without --prove, or if none of `exact` was run."""
    differences = {
        name: row["difference_from_serial"]
        for name, row in rows.items()
        if name in exact and "difference_from_serial" in row
    }
    if differences:
        verb = "equals" if len(differences) == 1 else "equal"
        epochs = pluralize(args.epochs, "epoch")
        claim = f"{', '.join(differences)} {verb} one process after {epochs}"
        return proof.verdict(claim, max(differences.values()), 1e-5)
    if args.prove:
        print("proof: none of these strategies equals one process: see 'from serial' above")
    return None
