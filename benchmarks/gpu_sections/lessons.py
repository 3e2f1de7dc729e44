"""Section: the lessons' scripts: each trains on the GPU and proves its result.

A script that needs more GPUs than the machine has runs on virtual GPUs beside the real one, or
is skipped; so is one whose libraries are missing.
"""

import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from processes import last_lines, run_limited
from section import Section, main

from multigpu.course import LESSONS

ROOT = Path(__file__).parent.parent.parent
SECONDS = 75.0  # for one script
REHEARSAL_SECONDS = 300.0
# In a rehearsal: one script with ranks, and one with the Trainer.
REHEARSED = (("PT_CNN_MultiGPU", "under torchrun"), ("PTL_Precision", "32"))


@dataclass(frozen=True)
class Run:
    """A program of `folder` with its flags.

    `proves` is False if the script cannot prove such a run, `epochs` if it has no --epochs.
    """

    stem: str
    flags: tuple[object, ...] = ()
    what: str = ""
    gpus: int = 1
    proves: bool = True
    epochs: bool = True
    folder: str = "scripts"


def runs(gpus: int) -> Iterator[Run]:
    """All runs on a machine with this many GPUs."""
    ranks = min(2, gpus)
    yield Run("PT_CNN_SingleGPU", proves=False)
    yield Run("PT_CNN_DataParallel", ("--devices", ranks), proves=False)
    yield Run("PT_CNN_ModelParallel", gpus=2, proves=False)
    yield Run("PT_CNN_Pipeline", gpus=2, proves=False)
    yield Run("PT_CNN_DDPSpawn", ("--nprocs", ranks), proves=False)
    yield Run("PT_CNN_MultiGPU", (), "under torchrun", proves=False)
    yield Run("PT_CNN_MultiGPU", (), "under torchrun, 2 ranks", gpus=2, proves=False)
    yield Run("PT_CNN_MultiGPU", ("--amp",), "with --amp", proves=False)
    yield Run("PT_CNN_HybridParallel", (), "under torchrun", gpus=2, proves=False)
    yield Run("PT_CNN_Scaling", (), "under torchrun", proves=False)
    yield Run("PTL_multiGPU", ("--devices", ranks), proves=False)
    for name in ("ddp", "bagua:gradient_allreduce", "dp"):
        flags = ("--devices", ranks, "--strategy", name)
        yield Run("PTL_Strategies", flags, name, proves=False)
    yield Run("PTL_Compressed", ("--devices", ranks), gpus=2, proves=False)
    yield Run("PTL_Decentralized", ("--devices", ranks), gpus=2, proves=False)
    yield Run("PTL_NodeBatch", ("--each", ranks), proves=False)
    for precision in ("32", "16", "bf16"):
        flags = ("--devices", 1, "--precision", precision)
        yield Run("PTL_Precision", flags, precision, proves=False)
    yield Run("PT_GPT_Memory", proves=False)
    two = "under torchrun, 2 ranks"
    yield Run("PT_GPT_TensorParallel", (), two, gpus=2, proves=False)
    yield Run("PT_GPT_Mesh", ("--mesh", 1, 1, 1, 2), two, gpus=2, proves=False)
    yield Run("PT_GPT_FSDP", (), "under torchrun", proves=False)
    cured = ("--patient", "wrong", "--cured")
    yield Run("PT_Clinic", cured, "under torchrun", proves=False, epochs=False)
    yield Run("PT_GPT_ContextExperts", (), two, gpus=2, proves=False)
    by_hand = {
        "zero": "15-fsdp",
        "tensor_parallel": "16-tensor-parallel",
        "experts": "19-context-experts",
    }
    for stem, slug in by_hand.items():
        yield Run(stem, (), two, gpus=2, proves=False, folder=f"lessons/{slug}")
    for lesson in LESSONS:
        for notebook in lesson.notebooks:
            stem = notebook.stem
            if not (stem in NAMED or stem.startswith(TENSORFLOW)):
                yield Run(stem)


TENSORFLOW = "TF_"  # lessons 07 and 08
# The stems that `runs` names. A lesson that is added later runs with --prove.
NAMED = {
    "PT_GPT_Memory",
    "PT_GPT_TensorParallel",
    "PT_GPT_Mesh",
    "PT_GPT_FSDP",
    "PT_Clinic",
    "PT_GPT_ContextExperts",
    "PT_CNN_SingleGPU",
    "PT_CNN_DataParallel",
    "PT_CNN_ModelParallel",
    "PT_CNN_Pipeline",
    "PT_CNN_DDPSpawn",
    "PT_CNN_MultiGPU",
    "PT_CNN_HybridParallel",
    "PT_CNN_Scaling",
    "PTL_multiGPU",
    "PTL_Strategies",
    "PTL_NodeBatch",
    "PTL_Precision",
    "PTL_Compressed",
    "PTL_Decentralized",
}


def command(run: Run, out: Path, quick: bool) -> list[object]:
    """The command line of a run, which writes its results into `out`."""
    words: list[object] = [sys.executable]
    if run.what.startswith("under torchrun") or run.stem == "PT_CNN_Pipeline":
        words += ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        words += [f"--nproc-per-node={run.gpus}"]
    words += [ROOT / run.folder / f"{run.stem}.py", *run.flags, "--out", out]
    words += ["--prove"] if run.proves else []
    return [*words, *(["--epochs", 1] if quick and run.epochs else [])]


def execute(run: Run, quick: bool, workers: int) -> dict:
    """Run a script; return a row with its verdict, device and time, or how it failed."""
    with tempfile.TemporaryDirectory() as out:
        began = time.monotonic()
        seconds = REHEARSAL_SECONDS if quick else SECONDS
        # Scripts that run side by side share the cores.
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        code, output = run_limited(command(run, Path(out), quick), seconds, environment)
    proofs = re.findall(r"^proof: .*$", output, re.MULTILINE)
    ok = code == 0 and (not run.proves or any(line.endswith("holds") for line in proofs))
    # The lessons' lines about their device: "device: …", "devices: …", "2 × cuda, …", or the
    # sentence that virtual GPUs compute.
    device = r"^(?:devices?: |This machine has .*?: |(?=\d+ × ))(.*)$"
    devices = re.findall(device, output, re.MULTILINE)
    row = {
        "case": " ".join(part for part in (run.stem, run.what) if part),
        "ok": ok,
        "seconds": time.monotonic() - began,
        "device": devices[0] if devices else None,
        "proof": proofs[-1].removeprefix("proof: ") if proofs else None,
    }
    if ok:
        return row
    why = f"took longer than {seconds:.0f} s" if code is None else f"exit code {code}"
    return row | {"error": why, "log": last_lines(output)}


def real(section: Section) -> None:
    missing = [one for one in ("sklearn", "matplotlib") if not importlib.util.find_spec(one)]
    if missing:
        section.skip("the lessons' scripts", f"{' and '.join(missing)} not installed")
        return
    if importlib.util.find_spec("tensorflow") is None:
        section.skip("lessons 07 and 08", "TensorFlow is not installed")
    else:
        section.skip("lessons 07 and 08", "gpu-check tests PyTorch alone")
    gpus = int(section.card.facts.get("gpus", 2))
    chosen = []
    for run in runs(gpus):
        if run.gpus > gpus:
            section.skip(run.stem, f"it needs {run.gpus} GPUs, and this machine has {gpus}")
        elif not section.quick or (run.stem, run.what) in REHEARSED:
            chosen.append(run)
    # Nothing is timed here, so scripts share the machine.
    workers = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
    with ThreadPoolExecutor(workers) as pool:
        for row in pool.map(lambda run: execute(run, section.quick, workers), chosen):
            section.row(**row)


if __name__ == "__main__":
    main(real)
