"""Measure strategies over a link of 100 Mbit/s: `python benchmarks/link.py`, as root.

The link joins two network namespaces, which needs iproute2. The table has a row for each
strategy and each size of the model: milliseconds per step, steps/s relative to ddp in the same
round, and bytes. There is little to compute, so communication dominates. bytegrad sends a
quarter of ddp's bytes; the goal with 2 million weights is 3.3 times ddp's steps/s. Smaller
models gain less, because bytegrad sends twice, one after the other, and its messages cost time
that does not depend on their size. It writes benchmarks/link.json.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.files import write_json
from multigpu.network import slow_link, wire
from multigpu.strategies import BaguaStrategy, DDPStrategy, HorovodStrategy
from multigpu.strategies.base import Strategy

MEGABITS = 100
STEPS = 5
ROUNDS = 5
WIDTHS = {512: 524_288, 1000: 2_000_000}  # width of two linear layers: number of weights
STRATEGIES = {
    "ddp": DDPStrategy,
    "horovod": HorovodStrategy,
    "bytegrad": lambda: BaguaStrategy("bytegrad"),
    "decentralized": lambda: BaguaStrategy("decentralized"),
    "low_precision_decentralized": lambda: BaguaStrategy("low_precision_decentralized"),
}


def measure(make: Callable[[], Strategy], width: int) -> tuple[float, float]:
    """Seconds per step, and bytes that this rank sends per step."""
    strategy = make()
    strategy.connect()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    model, optimizer = strategy.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    batch = torch.randn(1, width)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    # DDP rebuilds its buckets after the first step.
    step()
    dist.barrier()
    began = time.perf_counter()
    sent_before = wire.bytes_sent()
    for _ in range(STEPS):
        step()
    sent = wire.bytes_sent() - sent_before
    dist.barrier()
    seconds = time.perf_counter() - began
    strategy.close()
    return seconds / STEPS, sent / STEPS


def rank(out: Path) -> None:
    """Measure the strategies in turn; each of the two ranks runs this."""
    measurements: dict[int, dict[str, list]] = {
        width: {name: [] for name in STRATEGIES} for width in WIDTHS
    }
    for width, by_strategy in measurements.items():
        for _ in range(ROUNDS):
            for name, make in STRATEGIES.items():
                by_strategy[name].append(measure(make, width))
    if dist.get_rank() == 0:
        write_json(out, measurements)
    dist.barrier()


def main() -> None:
    if len(sys.argv) > 1:
        return rank(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        try:
            code = slow_link.run(
                [sys.executable, __file__, str(out)], MEGABITS, OMP_NUM_THREADS="1"
            )
        except UserError as error:
            print(f"benchmarks/link.py is skipped: {error}")
            return
        if code:
            sys.exit(code)
        measurements = json.loads(out.read_text())
    content = {
        "Mbit/s": MEGABITS,
        "rounds": ROUNDS,
        "weights": {
            str(weights): table(measurements[str(width)]) for width, weights in WIDTHS.items()
        },
    }
    for weights, rows in content["weights"].items():
        for name, row in rows.items():
            print(weights, name, row)
    write_json(Path(__file__).with_suffix(".json"), content)


def table(measurements: dict[str, list]) -> dict[str, dict]:
    """The strategies' rows for one size of the model.

    ms         milliseconds per step, the median of all rounds
    times_ddp  steps/s divided by ddp's in the same round: the median, with min and max
    bytes      per step and rank
    """
    rows = {}
    for name, pairs in measurements.items():
        # the ratio of the steps per second in each round
        ratios = [
            ddp[0] / other[0] for ddp, other in zip(measurements["ddp"], pairs, strict=True)
        ]
        rows[name] = {
            "ms": round(1e3 * statistics.median(pair[0] for pair in pairs)),
            "times_ddp": round(statistics.median(ratios), 2),
            "min": round(min(ratios), 2),
            "max": round(max(ratios), 2),
            "bytes": round(statistics.median(pair[1] for pair in pairs)),
        }
    return rows


if __name__ == "__main__":
    main()
