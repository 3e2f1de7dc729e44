"""Peak memory of GPTs: the formula of `multigpu memory`, virtual GPUs, published figures.

    python benchmarks/memory.py

Each case runs lessons/14-memory/measure.py under `multigpu virtual --shapes-only`. `meter` is
torch.cuda.max_memory_allocated of its second step, `report` the peak that the command reports.
It writes benchmarks/memory.json and takes some minutes.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multigpu import GPUS
from multigpu.files import write_json
from multigpu.memory import MODELS, Model, Step, Training

HERE = Path(__file__).parent
MEASURE = HERE.parent / "lessons" / "14-memory" / "measure.py"
GPU = "A100-80GB"
# Model, sequences of 2,048 tokens, optimizer, precision, checkpointing, attention.
CASES = (
    ("gpt-1.3b", 4, "adamw", "fp32", "none", "flash"),
    ("gpt-1.3b", 2, "adamw", "fp32", "none", "math"),
    ("gpt-1.3b", 8, "adamw", "bf16-mixed", "none", "flash"),
    ("gpt-1.3b", 4, "adamw", "bf16-mixed", "selective", "math"),
    ("gpt-1.3b", 16, "adamw", "bf16-mixed", "full", "flash"),
    ("gpt-1.3b", 2, "sgd", "fp32", "selective", "flash"),
    ("gpt-1.3b", 1, "sgd", "bf16-mixed", "full", "math"),
    ("gpt-7b", 1, "adamw", "bf16-mixed", "none", "flash"),
    ("gpt-7b", 4, "adamw", "bf16-mixed", "none", "math"),
    ("gpt-7b", 4, "sgd", "fp32", "full", "math"),
    ("gpt-7b", 4, "sgd", "bf16-mixed", "selective", "math"),
    ("gpt-13b", 8, "adamw", "bf16-mixed", "full", "flash"),
    ("gpt-13b", 2, "adamw", "fp32", "none", "math"),
    ("gpt-13b", 1, "sgd", "bf16-mixed", "full", "flash"),
)
# Heads, layers, hidden units, MB of the peak with Adam: GPT-2 on an A100-40GB, 1 sequence of
# 2,048 tokens, vocabulary 49,280 (sail-sg/Adan, fused_adan/README.md, "Memory Comparison").
# Only pairs that differ in the layers alone.
ADAN = (
    (6, 6, 768, 4490), (6, 24, 768, 12471),
    (12, 6, 768, 5848), (12, 24, 768, 17907),
    (16, 6, 768, 6775), (16, 24, 768, 21596),
    (16, 6, 1024, 7302), (16, 24, 1024, 23530),
    (6, 6, 1536, 6880), (6, 24, 1536, 19660),
    (12, 6, 1536, 8235), (12, 24, 1536, 25096),
    (16, 6, 1536, 9141), (16, 24, 1536, 28720),
    (16, 6, 2048, 11098), (16, 24, 2048, 34357),
)  # fmt: skip


def measured(model: Model, training: Training) -> tuple[int, int]:
    """The meter's and the report's peak, in bytes, from a run with shapes only."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        flags = {**vars(model), **vars(training)}
        command = [
            *(sys.executable, "-m", "multigpu.cli", "virtual", "--gpus", "1", "--gpu", GPU),
            *("--memory", "2048GiB", "--shapes-only", "--json", str(report), str(MEASURE)),
            *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        fit = json.loads(report.read_text(encoding="utf-8"))["fit"]
    (peak,) = re.findall(r"peak: ([\d,]+) bytes", done.stdout)
    return int(peak.replace(",", "")), fit["peak_bytes"]


def rows() -> Iterator[dict[str, Any]]:
    """Each case with its three peaks, in bytes."""
    for name, *settings in CASES:
        model, training = MODELS[name], Training(*settings)
        meter, report = measured(model, training)
        moment, formula = Step(model, training, GPUS[GPU]).peak()
        error = max(abs(formula / other - 1) for other in (meter, report))
        found = {"formula": formula, "meter": meter, "report": report, "error": error}
        print(name, *settings, moment, f"{error:.2%}", flush=True)
        yield {"model": name, **vars(training), "moment": moment, **found}


def layer_of_adan(heads: int, hidden: int) -> tuple[float, float]:
    """MB that one layer adds: by the formula, and with what GPT-2 keeps beside it.

    The source does not name its program. Both are of a first step in 32 bit, whose peak has no
    gradients and no optimizer state yet: the figures agree with that, and not with a later
    step. Hugging Face's GPT-2 keeps masks and outputs of dropout (2 sbh + 5 as²b), and three
    tensors of 4 sbh elements, because its GELU consists of several operations.
    """
    step = Step(Model(1, hidden, heads), Training(attention="math"), GPUS[GPU])
    own = 4 * step.model.block + step.whole_block()
    theirs = own + (2 + 48) * step.hidden + 5 * step.pairs
    return own / 1e6, theirs / 1e6


def adan() -> list[dict[str, Any]]:
    """What one layer adds to the published peaks, beside the formula."""
    found = []
    for few, many in zip(ADAN[::2], ADAN[1::2], strict=True):
        heads, layers, hidden, peak = many
        published = (peak - few[3]) / (layers - few[1])
        own, theirs = layer_of_adan(heads, hidden)
        row = {"heads": heads, "hidden": hidden, "published_mb": published, "formula_mb": own}
        found.append(row | {"their_model_mb": theirs, "error": theirs / published - 1})
    return found


def zero() -> list[dict[str, Any]]:
    """The activations of GPT-2 with 1.5 billion weights, 32 × 1,024 tokens, in GB.

    Published: Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 3.2.
    """
    model, found = Model(48, 1600, 25, 1024, 50_257), []
    for checkpointing, published in (("none", 60), ("full", 8)):
        for attention in ("flash", "math"):
            training = Training(32, "adamw", "bf16-mixed", checkpointing, attention)
            step = Step(model, training, GPUS[GPU])
            formula = model.layers * step.kept_block() / 1e9
            row = {"checkpointing": checkpointing, "attention": attention}
            found.append(row | {"published_gb": published, "formula_gb": formula})
    return found


def h100() -> list[dict[str, Any]]:
    """The GPT that gpu_check trained on an H100, whose peaks are measured, in MiB.

    In mixed precision that program casts the logits to 32 bit before the loss, so log-softmax
    stays in 32 bit: 2 bytes more for each of them.
    """
    report = json.loads((HERE / "gpu" / "NVIDIA-H100-80GB-HBM3.json").read_text("utf-8"))
    model, found = Model(6, 512, 8, 512, 32_000), []
    for row in report["sections"]["memory"]["rows"]:
        name, precision, batch = row["case"].split()
        if name == "gpt":
            how = "bf16-mixed" if precision == "bf16" else "fp32"
            step = Step(model, Training(int(batch), "sgd", how), GPUS["H100-80GB"])
            cast = 2 * step.logits if step.mixed else 0
            formula, measured = (step.peak()[1] + cast) / 2**20, row["allocated"] / 2**20
            error = formula / measured - 1
            found.append(
                {"case": row["case"], "measured": measured, "formula": formula}
                | {"error": error}
            )
    return found


def main() -> None:
    cases = list(rows())
    result = {
        "gpu": GPU,
        "rows": cases,
        "error": max(row["error"] for row in cases),
        "adan": adan(),
        "zero": zero(),
        "h100": h100(),
    }
    write_json(HERE / "memory.json", result)


if __name__ == "__main__":
    main()
