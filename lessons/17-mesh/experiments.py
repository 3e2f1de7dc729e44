"""The longer experiments of lesson 17: layouts of a GPT with 6.9 billion weights, predicted.

    python lessons/17-mesh/experiments.py

runs `multigpu virtual --world` for each of LAYOUTS and PUBLISHED, one after the other, and
writes layouts.json. Times and memory are simulated.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from multigpu.files import write_json

HERE = Path(__file__).parent
FILE = HERE / "layouts.json"
CLUSTER = ("--gpus-per-node", 8, "--gpu", "A100-80GB", "--link", "NVLink3")
CLUSTER += ("--between-nodes", "HDR200")
PEAK = 312e12  # of an A100 in bfloat16
LAYERS, HIDDEN, WORDS = 32, 4096, 51_200

# GPUs and sequences of a step; for each layout (stages, copies, shards, tensor) the sequences
# of a rank's micro-batch.
LAYOUTS = {
    (64, 512): {
        (1, 64, 1, 1): 4,
        (1, 1, 64, 1): 4,
        (1, 8, 8, 1): 4,
        (1, 1, 32, 2): 8,
        (1, 1, 8, 8): 8,
        (1, 1, 4, 16): 16,
        (2, 4, 8, 1): 4,
        (8, 1, 8, 1): 4,
        (2, 1, 16, 2): 4,
        (2, 1, 4, 8): 8,
    },
    (1024, 1024): {
        (1, 1024, 1, 1): 1,
        (1, 1, 1024, 1): 1,
        (1, 128, 8, 1): 1,
        (1, 1, 512, 2): 2,
        (1, 64, 8, 2): 2,
        (1, 1, 128, 8): 8,
        (2, 64, 8, 1): 1,
        (8, 16, 8, 1): 1,
        (2, 1, 64, 8): 4,
        (8, 1, 16, 8): 4,
    },
}
# The table's name: GPUs, layout, sequences of a step, of a micro-batch, their length, MFU.
PUBLISHED = {
    "LLM Foundry, MPT-7B": (8, (1, 1, 8, 1), 96, 6, 2048, 0.642),
    "FMS FSDP, Llama 2 7B": (128, (1, 16, 8, 1), 256, 2, 4096, None),
}


def predict(
    gpus: int, mesh: tuple[int, ...], batch: int, micro_batch: int, length: int
) -> dict:
    """The predicted step of a layout, and whether it fits.

    seconds   of the step, at the data sheet's peaks and at sourced efficiencies; None if it
              does not fit
    gib       the peak of the fullest rank that ran: the first one of each stage
    host      seconds that this machine took, and GiB of its largest process
    """
    ranks = [stage * gpus // mesh[0] for stage in range(mesh[0])]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        words = [sys.executable, "-m", "multigpu.cli", "virtual", "--world", gpus]
        words += ["--as-rank", ",".join(map(str, ranks)), *CLUSTER, "--shapes-only"]
        words += ["--steps", 2, "--timeout", 300, "--json", file, HERE / "seven_billion.py"]
        words += ["--mesh", *mesh, "--batch", batch, "--micro-batch", micro_batch]
        words += ["--length", length]
        began = time.perf_counter()
        with subprocess.Popen(
            [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as run:
            text = run.stdout.read().decode()
            _, status, used = os.wait4(run.pid, 0)
            run.returncode = os.waitstatus_to_exitcode(status)
        host = [time.perf_counter() - began, used.ru_maxrss / 2**20]
        report = json.loads(file.read_text()) if file.exists() else {}
    fits = report.get("fit", {}).get("fits", True)
    if run.returncode and fits:
        raise RuntimeError(text)
    seconds = (
        [report[name]["step_seconds"] for name in ("step_at_peaks", "step")] if fits else None
    )
    gib = max(gpu["peak_reserved_bytes"] for gpu in report["gpus"]) / 2**30
    return {
        "gpus": gpus,
        "mesh": mesh,
        "batch": batch,
        "micro_batch": micro_batch,
        "length": length,
        "seconds": seconds,
        "gib": gib,
        "host": host,
    }


def predict_all() -> None:
    """Write layouts.json; prints a line for each layout."""
    found = {"layouts": [], "published": {}}
    for (gpus, batch), layouts in LAYOUTS.items():
        for mesh, micro_batch in layouts.items():
            row = predict(gpus, mesh, batch, micro_batch, 2048)
            print(row, flush=True)
            found["layouts"].append(row)
    for name, (gpus, mesh, batch, micro_batch, length, _) in PUBLISHED.items():
        found["published"][name] = predict(gpus, mesh, batch, micro_batch, length)
        print(found["published"][name], flush=True)
    write_json(FILE, found)


if __name__ == "__main__":
    predict_all()
