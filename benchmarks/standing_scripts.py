"""The scripts of standing.py, and what a GPU does with each."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "outside"))
from case import NUMBER, TWO_RANKS, Case  # noqa: E402
from cases import CASES  # noqa: E402

H100 = json.loads((ROOT / "benchmarks/gpu/NVIDIA-H100-80GB-HBM3.json").read_text())
RESERVED = next(
    row["bytes"]
    for row in H100["sections"]["allocator"]["rows"]
    if row["case"] == "reserved then"
)
SMALL = "--epochs 3 --out out"
SERIAL = f"PT_CNN_SingleGPU.py {SMALL}"


@dataclass(frozen=True)
class Script:
    """A script, and what a GPU does with it.

    case      where it is and how it starts; its losses or weights are those of the reference
    expected  or else a pattern of what GPUs print
    source    who says so
    profile   FakeGPU's name of the GPU
    """

    case: Case
    expected: str = ""
    source: str = ""
    profile: str = "v100"


def own(name: str, folder: str, command: str, **more) -> Case:
    """A script of this repository."""
    return Case(name, "", folder, command, **more)


def cnn(name: str, start: str = "", gpus: int = 2) -> Script:
    """A lesson's script; its reference is lesson 01's, on the CPU."""
    losses = rf"(?:loss|accuracy) {NUMBER}"
    command = f"{start} {name}.py {SMALL}".strip()
    more = {"gpus": gpus, "losses": losses, "reference_command": SERIAL}
    return Script(own(name, "scripts", command, **more))


TWO = own("two_gpus", "lessons/virtual", "two_gpus.py", losses=rf"loss {NUMBER}")
WRONG_GPU = {"two_gpus.py": [('hidden.to("cuda:1")', "hidden")]}
TOO_LARGE = {"two_gpus.py": [("4096", "300_000"), ("512", "8")]}
RANKS = rf"(\d+) × \w+, test accuracy {NUMBER}"
DDP = own("ddp", "lessons/05-ddp-cluster", f"{TWO_RANKS} ddp.py weights.pt", losses=RANKS)
STILL = f"{TWO_RANKS} stands_still.py"
PUBLIC = [
    "ddp_series_single_gpu",
    "ddp_series_multigpu",
    "ddp_series_multigpu_torchrun",
    "mnist",
    "imagenet_dummy_data_parallel",
    "super_resolution",
    "nanoGPT_float32",
    "nanoGPT_ddp_float32",
    "llms_from_scratch_ddp_torchrun",
    "jia-zhuang_single_gpu_train",
]
SCRIPTS = (
    Script(TWO),
    Script(
        replace(TWO, name="two_gpus, a tensor on the wrong GPU", smaller=WRONG_GPU),
        r"RuntimeError: Expected all tensors to be on the same device.*cuda:[01].*cuda:[01]",
        "the text of the error is an H100's (benchmarks/gpu)",
    ),
    Script(
        replace(
            TWO, name="two_gpus, 1.2 GB on 1 GiB", smaller=TOO_LARGE, options="--memory 1GiB"
        ),
        r"OutOfMemoryError: CUDA out of memory",
        "the text of the error is an H100's (benchmarks/gpu)",
        "a100-1g",
    ),
    Script(
        own(
            "reserved_memory",
            "benchmarks/small",
            "reserved.py",
            gpus=1,
            options="--gpu H100-80GB",
        ),
        rf"reserved {RESERVED}\b",
        "measured on an H100 (benchmarks/gpu)",
        "h100",
    ),
    Script(
        own("all_reduce", "benchmarks/small", f"{TWO_RANKS} all_reduce.py"),
        r"(?s)rank [01] of 2: 3\b.*rank [01] of 2: 3\b",
        "NCCL: all-reduce leaves the sum on each rank",
    ),
    Script(
        own("stands_still", "lessons/virtual", STILL, options="--timeout 20"),
        r"stands still|(?i:all_?reduce.*time|timed out)",
        "NCCL: a collective that a rank does not enter does not end; torch's watchdog ends it",
    ),
    Script(DDP),
    cnn("PT_CNN_SingleGPU", gpus=1),
    cnn("PT_CNN_DataParallel"),
    cnn("PT_CNN_ModelParallel"),
    cnn("PT_CNN_Pipeline", TWO_RANKS),
    cnn("PT_CNN_DDPSpawn"),
    cnn("PT_CNN_MultiGPU", TWO_RANKS),
    cnn("PT_CNN_HybridParallel", TWO_RANKS, gpus=4),
    *(Script(case) for name in PUBLIC for case in CASES if case.name == name),
)
