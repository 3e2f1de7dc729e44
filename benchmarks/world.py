"""Hold `multigpu virtual --world` beside published steps: `python benchmarks/world.py`.

Each row is a run of megatron.py as one rank of so many A100s (of a pipeline, one rank for each
stage), shapes only. The prediction is a range: from kernels that reach the data sheet's peaks
to the sourced efficiencies of the GPU's preset. No constant was fitted to these rows.

Published:
- Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
  Megatron-LM" (SC21, arXiv 2104.04473), table 1: TFLOP/s a GPU, with its formula of the FLOPs
  (section 5). Nodes of 8 A100-80GB with NVLink and 8 × 200 Gb/s InfiniBand, fp16, full
  recomputation. The rows with up to 4 stages. Those with stages were measured with an
  interleaved schedule, which megatron.py does not have: its bubble is larger.
- Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv
  2205.05198), table 5: seconds of an iteration of the model with 22 billion parameters on 8
  GPUs, with full recomputation, and with selective recomputation and sequence parallelism.

The null model computes as many FLOP/s a GPU as in the table's first row.

The last row has no published time: lessons/virtual/llama.py, 6.7 billion parameters with FSDP2
on 1,024 H100s, for the host's time (goal: under two minutes) and memory (under 8 GB) of the
command, which are measured. It writes benchmarks/world.json.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from multigpu.files import write_json

HERE = Path(__file__).parent
WORDS = 51_200
LENGTH = 2048
A100S = ("--gpu", "A100-80GB", "--link", "NVLink3", "--between-nodes", "HDR200")
H100S = ("--gpu", "H100-80GB", "--link", "NVLink4", "--between-nodes", "NDR400")
SELECTIVE = ("--recompute", "selective", "--sequence-parallel")


class Row(NamedTuple):
    """A published step; `tflops` is per GPU, or `seconds` are given."""

    table: str
    gpus: int
    tensor: int
    stages: int
    micro_batch: int
    batch: int
    layers: int
    hidden: int
    heads: int
    tflops: float | None = None
    seconds: float | None = None
    more: tuple[str, ...] = ()

    def flops(self) -> float:
        """FLOPs of an iteration with full recomputation: SC21's formula (section 5)."""
        size = 96 * self.batch * LENGTH * self.layers * self.hidden**2
        attention = LENGTH / (6 * self.hidden)
        logits = WORDS / (16 * self.layers * self.hidden)
        return size * (1 + attention + logits)

    def published(self) -> float:
        """Seconds of an iteration."""
        return self.seconds or self.flops() / (self.gpus * self.tflops * 1e12)


ROWS = (
    Row("SC21, table 1", 32, 1, 1, 16, 512, 24, 2304, 24, tflops=137),
    Row("SC21, table 1", 64, 2, 1, 16, 512, 30, 3072, 32, tflops=138),
    Row("SC21, table 1", 128, 4, 1, 16, 512, 36, 4096, 32, tflops=142),
    Row("SC21, table 1", 256, 8, 1, 8, 1024, 40, 6144, 48, tflops=135),
    Row("SC21, table 1", 512, 8, 2, 4, 1536, 48, 8192, 64, tflops=138),
    Row("SC21, table 1", 1024, 8, 4, 2, 1792, 60, 10240, 80, tflops=140),
    Row("2205.05198, table 5", 8, 8, 1, 4, 4, 48, 6144, 64, seconds=1.42),
    Row("2205.05198, table 5", 8, 8, 1, 4, 4, 48, 6144, 64, seconds=1.10, more=SELECTIVE),
)


def run(world: int, ranks: list[int], *words: str) -> dict[str, Any]:
    """The report of a run of the command, with the host's seconds and the largest process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "multigpu.cli", "virtual", "--world", str(world)]
        command += ["--as-rank", ",".join(map(str, ranks)), "--gpus-per-node", "8"]
        command += ["--shapes-only", "--json", str(file), *words]
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        report = json.loads(file.read_text())
    return report | {"host_seconds": seconds}


def predict(row: Row) -> dict[str, Any]:
    """A row of world.json."""
    flags = {
        "layers": row.layers,
        "hidden": row.hidden,
        "heads": row.heads,
        "micro-batch": row.micro_batch,
        "batch": row.batch,
        "tensor": row.tensor,
        "stages": row.stages,
        "length": LENGTH,
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    ranks = [stage * row.gpus // row.stages for stage in range(row.stages)]
    report = run(
        row.gpus, ranks, *A100S, "--steps", "2", str(HERE / "megatron.py"), *words, *row.more
    )
    fastest = report["step_at_peaks"]["step_seconds"]
    seconds = report["step"]["step_seconds"]
    return {
        "table": row.table,
        "gpus": row.gpus,
        "tensor": row.tensor,
        "stages": row.stages,
        "recomputation": "selective" if row.more else "full",
        "published_seconds": row.published(),
        "at_peaks_seconds": fastest,
        "predicted_seconds": seconds,
        "inside": fastest <= row.published() <= seconds,
        "error": seconds / row.published() - 1,
        "peak_gib": max(gpu["peak_bytes"] for gpu in report["gpus"]) / 2**30,
        "host_seconds": report["host_seconds"],
    }


def null_seconds(row: Row) -> float:
    """Seconds at as many FLOP/s a GPU as in the first row of its table."""
    first = next(other for other in ROWS if other.table == row.table)
    rate = first.flops() / first.gpus / first.published()
    return row.flops() / row.gpus / rate


def llama() -> dict[str, Any]:
    """The row of the model with 6.7 billion parameters on 1,024 H100s."""
    tokens = 2 * 2048 * 1024
    words = ("--tokens-per-step", str(tokens), str(HERE.parent / "lessons/virtual/llama.py"))
    report = run(1024, [0], *H100S, *words)
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {
        "step_seconds": report["step"]["step_seconds"],
        "step_at_peaks_seconds": report["step_at_peaks"]["step_seconds"],
        "tokens_per_second": report["step"]["tokens_per_second"],
        "mfu": report["step"]["mfu"],
        "mfu_at_peaks": report["step_at_peaks"]["mfu"],
        "peak_gib": report["gpus"][0]["peak_bytes"] / 2**30,
        "host_seconds": report["host_seconds"],
        "largest_process_gb": largest / 1e9,
    }


def main() -> None:
    example = llama()
    print(
        f"Llama, 1,024 H100s: {example['step_at_peaks_seconds'] * 1e3:.0f} to "
        f"{example['step_seconds'] * 1e3:.0f} ms; host {example['host_seconds']:.0f} s, "
        f"{example['largest_process_gb']:.2f} GB"
    )
    rows = []
    for row in ROWS:
        result = predict(row)
        result["null_error"] = null_seconds(row) / row.published() - 1
        rows.append(result)
        print(
            f"{row.table:<20} {row.gpus:>5} GPUs: published {row.published():6.2f} s, "
            f"predicted {result['at_peaks_seconds']:6.2f} to "
            f"{result['predicted_seconds']:6.2f} s ({result['error']:+.0%}), "
            f"null {result['null_error']:+.0%}; host {result['host_seconds']:.0f} s",
            flush=True,
        )
    summary = {
        "rows": len(rows),
        "inside": sum(row["inside"] for row in rows),
        "mean_error": mean(abs(row["error"]) for row in rows),
        "null_error": mean(abs(row["null_error"]) for row in rows),
    }
    print(
        f"{summary['inside']} of {summary['rows']} inside the range; mean |error| at sourced "
        f"efficiencies {summary['mean_error']:.1%}, null {summary['null_error']:.1%}"
    )
    write_json(HERE / "world.json", {"summary": summary, "rows": rows, "llama": example})


if __name__ == "__main__":
    main()
