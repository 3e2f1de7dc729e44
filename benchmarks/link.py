"""Measure steps/s of strategies over a link of 100 Mbit/s: `python benchmarks/link.py`.

The link is between two network namespaces, which need root and iproute2. Communication
dominates, because the model has 2 million weights and little to compute. bytegrad sends a
quarter of ddp's bytes; the goal is 3.3 times ddp's steps/s. It writes benchmarks/link.json.
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

from multigpu import slow_link, wire
from multigpu.errors import UserError
from multigpu.files import write_json
from multigpu.strategies import BaguaStrategy, DDPStrategy, HorovodStrategy
from multigpu.strategies.base import Strategy

MEGABITS = 100
STEPS = 5
ROUNDS = 5
STRATEGIES = {
    "ddp": DDPStrategy,
    "horovod": HorovodStrategy,
    "bytegrad": lambda: BaguaStrategy("bytegrad"),
    "decentralized": lambda: BaguaStrategy("decentralized"),
    "low_precision_decentralized": lambda: BaguaStrategy("low_precision_decentralized"),
}


def measure(make: Callable[[], Strategy]) -> tuple[float, float]:
    """Seconds per step, and bytes that this rank sends per step."""
    strategy = make()
    strategy.connect()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000, bias=False) for _ in range(2)])
    model, optimizer = strategy.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    batch = torch.randn(1, 1000)

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
    measurements: dict[str, list] = {name: [] for name in STRATEGIES}
    for _ in range(ROUNDS):
        for name, make in STRATEGIES.items():
            measurements[name].append(measure(make))
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
    rows = []
    of_ddp = measurements["ddp"]
    for name, pairs in measurements.items():
        # the ratio of the steps per second in each round
        ratios = [ddp[0] / other[0] for ddp, other in zip(of_ddp, pairs, strict=True)]
        row = {
            "strategy": name,
            "steps/s relative to ddp": round(statistics.median(ratios), 2),
        }
        row |= {"min": round(min(ratios), 2), "max": round(max(ratios), 2), "rounds": ROUNDS}
        row |= {"bytes per step and rank": round(statistics.median(pair[1] for pair in pairs))}
        rows.append(row)
        print(row)
    write_json(
        Path(__file__).with_suffix(".json"),
        {"Mbit/s": MEGABITS, "weights": 2_000_000, "rows": rows},
    )


if __name__ == "__main__":
    main()
