"""Section: the lessons' scripts run on the GPU; some prove their result."""

import os
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from section import Section, last_lines, main

ROOT = Path(__file__).parent.parent.parent
# The GPUs that each run needs, and its command; RANKS is 2, or 1 on a machine with one GPU.
RUNS = (
    (1, "python scripts/PT_CNN_SingleGPU.py"),
    (1, "python scripts/PT_CNN_DataParallel.py --devices RANKS"),
    (2, "python scripts/PT_CNN_ModelParallel.py"),
    (2, "torchrun scripts/PT_CNN_Pipeline.py"),
    (1, "python scripts/PT_CNN_DDPSpawn.py --nprocs RANKS"),
    (1, "torchrun scripts/PT_CNN_MultiGPU.py"),
    (1, "torchrun scripts/PT_CNN_MultiGPU.py --amp"),
    (2, "torchrun scripts/PT_CNN_HybridParallel.py"),
    (1, "torchrun scripts/PT_CNN_Scaling.py"),
    (1, "python scripts/PT_CNN_Elastic.py --prove"),
    (1, "python scripts/PTL_multiGPU.py --devices RANKS"),
    (1, "python scripts/PTL_Strategies.py --devices RANKS --strategy ddp"),
    (1, "python scripts/PTL_Strategies.py --devices RANKS --strategy dp"),
    (2, "python scripts/PTL_Compressed.py --devices RANKS"),
    (2, "python scripts/PTL_Decentralized.py --devices RANKS"),
    (1, "python scripts/PTL_NodeBatch.py --each RANKS"),
    (1, "python scripts/PTL_Precision.py --devices 1 --precision 16"),
    (1, "python scripts/PTL_Precision.py --devices 1 --precision bf16"),
    (1, "python scripts/PT_GPT_Memory.py"),
    (1, "torchrun scripts/PT_GPT_FSDP.py"),
    (2, "torchrun scripts/PT_GPT_TensorParallel.py"),
    (2, "torchrun scripts/PT_GPT_Mesh.py --mesh 1 1 1 2"),
    (1, "torchrun scripts/PT_Clinic.py --patient wrong --cured"),
    (2, "torchrun scripts/PT_GPT_ContextExperts.py"),
)


def command(run: str, ranks: int) -> list[str]:
    """The words of a run's command, with this number of ranks."""
    starter, program, *flags = run.replace("RANKS", str(ranks)).split()
    words = [sys.executable]
    if starter == "torchrun":
        words += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        words += [f"--nproc-per-node={ranks}"]
    return [*words, str(ROOT / program), *flags]


def real(section: Section) -> None:
    gpus = int(section.card["facts"].get("gpus", 2))
    chosen = []
    for needs, run in RUNS:
        if needs > gpus:
            section.skip(run, f"it needs {needs} GPUs, and this machine has {gpus}")
        elif not section.quick or "PT_CNN_MultiGPU" in run:
            chosen.append(run)
    # Nothing is timed here, so scripts share the machine.
    cores = len(os.sched_getaffinity(0))
    workers = max(1, min(4, cores // 2))

    def execute(run: str) -> None:
        with section.item(run), tempfile.TemporaryDirectory() as out:
            began = time.monotonic()
            words = [*command(run, min(2, gpus)), "--out", out]
            code, output = section.run(words, OMP_NUM_THREADS=str(max(1, cores // workers)))
            proofs = re.findall(r"^proof: (.*)$", output, re.MULTILINE)
            ok = code == 0 and all(proof.endswith("holds") for proof in proofs)
            section.row(
                case=run,
                ok=ok,
                seconds=time.monotonic() - began,
                proof=proofs[-1] if proofs else None,
                log="" if ok else f"exit code {code}\n{last_lines(output)}",
            )

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(execute, chosen))


if __name__ == "__main__":
    main(
        "Each script ran to its end with exit code 0, and its proof holds if it makes one.",
        {"ok": "", "seconds": "s", "proof": ""},
        real,
    )
