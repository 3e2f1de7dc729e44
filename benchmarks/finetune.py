"""Fine-tune a Llama with 6.7 billion parameters, by shapes: `python benchmarks/finetune.py`.

Each row is lessons/virtual/finetune.py as rank 0 of a node: does it fit, what is its peak, how
long does a step take? It needs `pip install transformers peft` and writes finetune.json.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from multigpu.files import write_json

HERE = Path(__file__).parent
SCRIPT = HERE.parent / "lessons" / "virtual" / "finetune.py"
# Of each GPU: one sequence of 2,048 tokens, activations recomputed.
FLAGS = ("--model", "7b", "--bf16", "--checkpointing", "--length", "2048")
A100S = ("--world", "8", "--gpu", "A100-80GB", "--link", "NVLink3")
RTX4090S = ("--world", "2", "--gpu", "RTX4090", "--link", "PCIe4")
# (what is trained, GPUs, how they are called, the script's flags)
ROWS = (
    ("all weights", "8 × A100-80GB", A100S, ()),
    ("all weights", "8 × A100-80GB", A100S, ("--fsdp",)),
    ("LoRA", "2 × RTX4090", RTX4090S, ("--lora",)),
    ("LoRA", "2 × RTX4090", RTX4090S, ("--lora", "--fsdp")),
)


def predict(trains: str, gpus: str, machine: tuple[str, ...], flags: tuple[str, ...]) -> dict:
    """A row of finetune.json."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "multigpu.cli", "virtual", *machine]
        command += ["--shapes-only", "--steps", "2", "--json", file]
        command += [SCRIPT, *FLAGS, "--batch-size", machine[1], *flags]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode and "OutOfMemoryError" not in done.stdout + done.stderr:
            sys.exit(done.stdout + done.stderr)
        report = json.loads(file.read_text())
    steps = [report.get(name) for name in ("step_at_peaks", "step")]
    return {
        "trains": trains,
        "gpus": gpus,
        "sharding": "FSDP2" if "--fsdp" in flags else "DDP",
        "fits": report["fit"]["fits"],
        "peak_gib": report["fit"]["peak_bytes"] / 2**30,
        "gib_by_kind": {
            kind: nbytes / 2**30 for kind, nbytes in report["fit"]["bytes_by_kind"].items()
        },
        # From the data sheet's peaks to sourced efficiencies; none if it does not fit.
        "step_seconds": [step and step["step_seconds"] for step in steps],
    }


def main() -> None:
    rows = []
    for row in ROWS:
        rows.append(predict(*row))
        print(json.dumps(rows[-1]), flush=True)
    write_json(HERE / "finetune.json", {"flags": " ".join(FLAGS), "rows": rows})


if __name__ == "__main__":
    main()
