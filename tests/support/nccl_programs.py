"""Programs whose ranks are processes, on virtual GPUs that look like CUDA."""

import json
from pathlib import Path

import virtual_ranks

HEAD = """
import json, os, sys, time
from datetime import timedelta
rank, port, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
os.environ.update(
    RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
    MASTER_PORT=port,
)
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
from multigpu.virtual import face
from multigpu.virtual.options import VARIABLE, Options
options = Options(gpus=size, timeout=2.0, **json.loads(sys.argv[4]))
os.environ[VARIABLE] = options.to_json()
if not face.is_on():
    face.put_on(options)
import torch
import torch.distributed as dist

def start(**more):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", **more)

def full(value, count=1):
    return torch.full((count,), float(value), device="cuda")

def error_of(function, *arguments, **more):
    try:
        function(*arguments, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
"""


def run(tmp_path: Path, program: str, size: int = 2, **options: bool) -> list:
    """The processes of a program's ranks, ended; each with its output as one text.

    `options` are more of `multigpu virtual`'s.
    """
    return virtual_ranks.start_ranks(HEAD + program, size, tmp_path, size, json.dumps(options))


def results(tmp_path: Path, program: str, size: int = 2) -> list:
    """What each rank prints last, as JSON."""
    return virtual_ranks.results(run(tmp_path, program, size))
