"""Numbers for each strategy: loss, bytes, consensus distance, difference from serial."""

import math
import statistics
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from multigpu import proof
from multigpu.comparison.digits import QADAM_WARMUP
from multigpu.comparison.record import flat_weights
from multigpu.errors import pluralize
from multigpu.strategies import QAdamOptimizer
from multigpu.strategies.costs import predicted_bytes


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
    For bagua:async both lists end before the last copy: at an epoch's end a rank waits for the
    others while rounds go on, so the distance then is that of no step.
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
    until = -1 if name == "bagua:async" and len(first["steps"]) > 1 else None
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
        "consensus_steps": first["steps"][:until],
        "consensus_distance": distances.amax(0).tolist()[:until],
        "weights_norm": mean.norm(dim=-1).tolist()[:until],
    }


def table(rows: dict[str, dict], ranks: int) -> str:
    """The table of all rows, with numbers rounded to digits that are the same in each run.

    `distance` is the last consensus distance. The last column is empty unless
    `compare_with_serial` was called.
    """
    lines = [
        f"{pluralize(ranks, 'rank'):33}                      bytes per step",
        f"{'':33}  loss  accuracy  predicted    counted  distance  from serial",
    ]
    for name, row in rows.items():
        counted = f"{row['bytes_counted']:,.0f}"
        # NCCL's bytes do not pass through the kernel's sockets.
        if row["device"] == "cuda" and row["bytes_predicted"]:
            counted = "not counted"
        distance = row["consensus_distance"][-1]
        line = (
            f"{name:33}  {row['loss']:.2f}  {row['test_accuracy']:8.2f}  "
            f"{row['bytes_predicted']:9,.0f}  {counted:>9}  "
            f"{'0' if distance == 0 else f'{distance:.0e}':>8}  {_from_serial_text(row):>11}"
        )
        lines.append(line.rstrip())
    return "\n".join(lines)


def _from_serial_text(row: dict[str, Any]) -> str:
    difference = row.get("difference_from_serial")
    if difference is None:
        return ""
    if difference <= 1e-5:
        return "within 1e-5"
    if not math.isfinite(difference):
        return f"{difference}"
    # Rounding magnifies the last bits, which differ between CPUs: the nearest power of ten.
    return f"about {10.0 ** round(math.log10(difference)):.0e}"


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
    lr / 50, whose variance is frozen as well, so only the bytes make a difference. The
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
