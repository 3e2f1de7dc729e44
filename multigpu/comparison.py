"""How do strategies compare? One run by each: what it learned, what it sent, how far apart its ranks were."""

import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from multigpu import launch, plots, proof, slow_link, wire
from multigpu.errors import UserError, pluralize
from multigpu.files import write_json
from multigpu.strategies.bagua.async_average import AsyncModelAverage
from multigpu.strategies.costs import predicted
from multigpu.trainer import Callback

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVERY = 5  # steps between two copies of the weights


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters as one vector on the CPU, a copy."""
    return torch.cat(
        [parameter.detach().reshape(-1).cpu() for parameter in model.parameters()]
    )


class Record(Callback):
    """What each rank has seen of a fit; afterwards `ranks` has it of all, by rank.

    loss      of each epoch, over all ranks
    bytes     that the rank sent in each step, as the kernel counts them; for bagua:async one number, those of a sync
    ends      when each step ended, in seconds
    weights   copies of its weights: after step 1, 1 + EVERY, … and at the end
    device    "cpu", "cuda" or "vgpu"

    The copies are compared after the run, and what the Trainer itself sends between two steps is not in `bytes`.
    """

    def __init__(self) -> None:
        self.told: dict = {"loss": [], "bytes": [], "ends": [], "weights": []}
        self.ranks: list[dict] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.before = wire.sent()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.told["bytes"].append(wire.sent() - self.before)
        self.told["ends"].append(time.perf_counter())
        if trainer.global_step % EVERY == 1:
            self.told["weights"].append(weights(pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.told["loss"].append(float(trainer.callback_metrics["loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.told["weights"].append(weights(pl_module))
        self.told["device"] = trainer.strategy.device.type
        algorithm = getattr(trainer.strategy, "algorithm", None)
        if (
            isinstance(algorithm, AsyncModelAverage) and algorithm.thread
        ):  # else one rank, or still warming up
            self.told |= {"syncs": algorithm.syncs, "bytes": [of_a_sync(algorithm)]}
        self.ranks = trainer.strategy.gather_objects(self.told)

    def state_dict(self) -> dict:
        """What ddp_spawn, which trains copies in other processes, brings back."""
        return {"ranks": self.ranks}

    def load_state_dict(self, state_dict: dict) -> None:
        self.ranks = state_dict["ranks"]


def of_a_sync(algorithm: AsyncModelAverage) -> float:
    """Bytes that this rank sends in a sync of a running async, vote included: the mean of three, while all else is silent.

    Whole ones: a count that begins or ends inside a sync has a part of it too much. (A vote more or less is 50 bytes.)
    """
    with algorithm.syncing:
        before, first = wire.sent(), algorithm.syncs
    while algorithm.syncs < first + 3 and algorithm.thread.is_alive():
        time.sleep(0.001)
    with algorithm.syncing:
        return (wire.sent() - before) / max(1, algorithm.syncs - first)


def compared(
    name: str, told: list[dict], model: nn.Module, test: TensorDataset, megabits: float
) -> dict:
    """One strategy's row, from what a Record has of each rank. `model` takes rank 0's last weights, to be tested.

    The spread is the largest distance of a rank's weights from the mean over the ranks, at the moments of the copies.
    """
    every = torch.stack(
        [torch.stack(rank["weights"]) for rank in told]
    ).double()  # (ranks, moments, N)
    first, ends = told[0], told[0]["ends"]
    nn.utils.vector_to_parameters(first["weights"][-1], model.parameters())
    with torch.no_grad():
        hits = model(test.tensors[0]).argmax(1) == test.tensors[1]
    expected = predicted(name, every.shape[-1], len(told))
    return {
        "loss": first["loss"][-1], "losses": first["loss"], "test_accuracy": hits.float().mean().item(),
        "device": first["device"], "ranks": len(told), "bytes_predicted": expected, "bytes_counted": statistics.median(first["bytes"]),
        "link_seconds_predicted": expected * 8e-6 / megabits,
        "seconds": (ends[-1] - ends[0]) / max(1, len(ends) - 1),
        "bytes_each": first["bytes"], "syncs": first.get("syncs"), "spread": (every - every.mean(0)).norm(dim=-1).amax(0).tolist(),
    }  # fmt: skip


def table(rows: dict[str, dict], ranks: int) -> str:
    """All rows, rounded to what is the same in each run; `from_serial` is in a row where it was asked for."""
    lines = [
        f"{pluralize(ranks, 'rank'):34}  loss  accuracy  bytes predicted  counted  spread at end  from serial"
    ]
    for name, row in rows.items():
        away = row.get("from_serial")
        serial = "" if away is None else "within 1e-5" if away <= 1e-5 else f"{away:.0e}"
        apart = "0" if row["spread"][-1] == 0 else f"{row['spread'][-1]:.0e}"
        sent = (
            "not counted"
            if row["device"] == "cuda" and row["bytes_predicted"]
            else f"{row['bytes_counted']:,.0f}"
        )
        start = f"{name:34}  {row['loss']:.2f}  {row['test_accuracy']:8.2f}  {row['bytes_predicted']:15,.0f}"
        lines.append(f"{start}  {sent:>7}  {apart:>13}  {serial:>11}".rstrip())
    return "\n".join(lines)


def measured(
    rows: dict[str, dict],
    script: str,
    names: Sequence[str],
    flags: Sequence[object],
    megabits: float,
) -> None:
    """Add `link_seconds_measured` to the rows of `names`: seconds a step of `script` with a rank in each of two network
    namespaces, joined by a cable of `megabits` Mbit/s.

    Raises UserError where there can be no such link, where nothing is to be measured, or if a rank fails.
    """
    if not names:
        raise UserError(
            "--measure-link: none of these strategies has ranks that a launcher starts, as ddp has."
        )
    if rows[names[0]]["ranks"] != 2:
        raise UserError(
            f"--measure-link: a cable has two ends, and there are {rows[names[0]]['ranks']} ranks: give --ranks 2."
        )
    if why_not := slow_link.obstacle():
        raise UserError(
            f"--measure-link: {why_not}. Leave it out, and the times are predicted."
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            script,
            "--strategy",
            *names,
            *map(str, flags),
            "--out",
            folder,
        ]
        silent = ["sh", "-c", 'exec "$@" >/dev/null', "sh"]
        if slow_link.run(
            [*silent, *command], megabits, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR"
        ):
            raise UserError("a rank on the slow link has failed: its message stands above.")
        found = json.loads((Path(folder) / "metrics.json").read_text())["strategies"]
    for name in names:
        rows[name]["link_seconds_measured"] = found[name]["seconds"]


def bytes_picture(rows: dict[str, dict]) -> "Figure":
    """A bar a strategy."""
    sent = {name: row["bytes_counted"] / 1000 for name, row in rows.items()}
    most, least = (
        "ddp" if "ddp" in sent else max(sent, key=sent.get),
        min(filter(sent.get, sent), key=sent.get, default=""),
    )
    title = (
        f"{least} sends {sent[most] / sent[least]:.1f} times fewer bytes than {most}"
        if least
        else "Nothing is sent"
    )
    bars = {
        name + ("" if amount else ": 0"): {"sent": amount} for name, amount in sent.items()
    }
    return plots.stacked(
        bars, "kB a step and rank (async: a sync), counted by the kernel", title
    )


def spread_picture(rows: dict[str, dict]) -> "Figure":
    """A curve for each strategy whose ranks were ever apart, a moment in EVERY steps."""
    apart = {name: row["spread"] for name, row in rows.items() if max(row["spread"]) > 1e-6}
    fig = plots.figure(8, 3.2)
    axes = fig.add_subplot()
    for colour, mark, (name, spread) in zip(plots.RANKS, "os^Dv", apart.items(), strict=False):
        steps = [1 + EVERY * place for place in range(len(spread))]
        axes.plot(
            steps, spread, marker=mark, markersize=3, linewidth=1, color=colour, label=name
        )
    axes.set(xlabel="step", ylabel="largest distance from the mean")
    if apart:
        axes.set_yscale("log")
        axes.set_ylim(
            bottom=min(map(statistics.median, apart.values())) / 5
        )  # just after a sync it is next to nothing
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    equal = f"of {len(rows) - len(apart)} they never are"
    axes.set_title(
        f"The ranks of {pluralize(len(apart), 'strategy').replace('ys', 'ies')} are apart, and stay near; {equal}",
        fontsize=11,
    )
    axes.spines[["top", "right"]].set_visible(False)
    return fig


def link_picture(rows: dict[str, dict], megabits: float) -> "Figure":
    """Predicted milliseconds as bars; what was measured as a point."""
    bars = {
        name: {"predicted": 1e3 * row["link_seconds_predicted"]} for name, row in rows.items()
    }
    fig = plots.stacked(
        bars, f"ms a step at {megabits:g} Mbit/s; bars: predicted, bytes ÷ rate", ""
    )
    axes, times = (
        fig.axes[0],
        {
            n: 1e3 * row["link_seconds_measured"]
            for n, row in rows.items()
            if "link_seconds_measured" in row
        },
    )
    title = "Predicted: on a slow link the bytes are the time"
    if times:
        axes.plot(
            times.values(),
            [list(rows).index(name) for name in times],
            "D",
            color="black",
            label="measured, computing included",
        )
        fig.legend(frameon=False, loc="outside lower right", fontsize=8)
        axes.set_xlim(
            0, 1.08 * max(*times.values(), *(bar["predicted"] for bar in bars.values()))
        )
        slow, fast = max(times, key=times.get), min(times, key=times.get)
        slow = "ddp" if "ddp" in times else slow
        title = f"Measured: {fast} is {times[slow] / times[fast]:.1f} times as fast as {slow}"
    axes.set_title(title)
    return fig


def from_serial(
    rows: dict[str, dict],
    found: dict[str, list[dict]],
    make: Any,
    train: TensorDataset,
    args: Namespace,
) -> None:
    """Add `from_serial` to each row: the largest difference between rank 0's last weights and a serial run's.

    The serial run is by SGD, and by Adam with lr / 50 for bagua:qadam. `make()` gives a new model.
    """
    same = {
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "lr": args.lr,
        "seed": args.seed,
    }
    ends: dict[bool, torch.Tensor] = {}
    place = torch.device(
        "cuda" if any(row["device"] == "cuda" for row in rows.values()) else "cpu"
    )
    here = TensorDataset(*(tensor.to(place) for tensor in train.tensors))
    for name, row in rows.items():
        if (adam := name == "bagua:qadam") not in ends:
            model = make().to(place)
            optimizer = torch.optim.Adam(model.parameters(), args.lr / 50) if adam else None
            ends[adam] = weights(proof.serial(model, here, **same, optimizer=optimizer))
        row["from_serial"] = (found[name][0]["weights"][-1] - ends[adam]).abs().max().item()


def report(
    rows: dict[str, dict], exact: Sequence[str], args: Namespace, world: launch.World
) -> None:
    """Print the table; with --prove, whether those of `exact` equal the serial run; draw; write metrics.json.

    Its loss and accuracy are ddp's, or the first strategy's. Exit code 1 if the proof fails.
    """
    one, verdict = rows.get("ddp") or next(iter(rows.values())), None
    print(table(rows, args.ranks))
    if away := {
        name: row["from_serial"]
        for name, row in rows.items()
        if name in exact and "from_serial" in row
    }:
        verb = "equals" if len(away) == 1 else "equal"
        what = f"{', '.join(away)} {verb} one process after {pluralize(args.epochs, 'epoch')}"
        verdict = proof.verdict(what, max(away.values()), 1e-5)
    elif args.prove:
        print(
            "proof: none of these is meant to equal one process; how far away each is, says the table"
        )
    if times := {
        n: 1e3 * row["link_seconds_measured"]
        for n, row in rows.items()
        if "link_seconds_measured" in row
    }:
        slow = times.get("ddp", max(times.values()))
        each = (
            f"{n} {ms:.0f}" + (f" ({slow / ms:.1f} times as fast)" if ms != slow else "")
            for n, ms in times.items()
        )
        print(f"measured at {args.link:g} Mbit/s, ms a step: {', '.join(each)}")
    pictures = {
        "bytes": bytes_picture(rows),
        "spread": spread_picture(rows),
        "link": link_picture(rows, args.link),
    }
    paths = [
        plots.save(picture, args.out / f"{name}.png") for name, picture in pictures.items()
    ]
    print("figures:", *paths)
    told = {
        "world_size": args.ranks,
        "nodes": world.nodes,
        "launcher": world.launcher,
        "devices": args.ranks,
    }
    told |= {
        "device": one["device"],
        "batch_size": args.batch_size,
        "link_megabits": args.link,
    }
    told |= {
        "loss": one["loss"],
        "test_accuracy": one["test_accuracy"],
        "proof": verdict,
        "strategies": rows,
    }
    print(f"metrics: {write_json(args.out / 'metrics.json', told)}", flush=True)
    if verdict and not verdict["holds"]:
        sys.exit(1)
