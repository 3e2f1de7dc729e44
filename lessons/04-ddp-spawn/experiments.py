"""What processes do with a tensor; how long noisy runs take, repeated: median and range."""

import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch


def set_to_zero(rank: int, tensor: torch.Tensor) -> None:
    """Set `tensor` to zero, in place. mp.spawn gives the rank, which is not used."""
    tensor.zero_()


def seconds(action: Callable[[], object], repeats: int = 5) -> list[float]:
    """The seconds of `repeats` calls of `action`, after one call that does not count."""
    action()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return times


def images_per_s(folder: str | Path) -> list[float]:
    """The images/s of a run's epochs without the first one, from metrics.json in `folder`."""
    epochs = json.loads((Path(folder) / "metrics.json").read_text())["epochs"]
    return [epoch["images_per_s"] for epoch in epochs[1:]]


def spread(values: Iterable[float], unit: str, digits: int = 2) -> str:
    """The median and the range of noisy values, as text: "2.10 s (1.95 to 2.60, 5 times)"."""
    values = list(values)
    low, middle, high = (
        f"{value:,.{digits}f}"
        for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} {unit} ({low} to {high}, {len(values)} times)"
