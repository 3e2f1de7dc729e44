"""The longer experiments of lesson 18: the stacks of ranks that wait, timelines, losses."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

import multigpu
from multigpu import launch, plots
from multigpu.course import find_root
from multigpu.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCRIPT = find_root() / "scripts" / "PT_Clinic.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
NOT_ALLOWED = (
    "py-spy may not read another process here: run it as root, or in a container that was\n"
    "started with --cap-add SYS_PTRACE"
)


def _script() -> ModuleType:
    """scripts/PT_Clinic.py as a module."""
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the stacks of ranks that wait ----------------------------------------------------------


def stacks(patient: str, ranks: int = 2, seconds: float = 60) -> None:
    """Start a patient with torchrun; when its ranks wait, print what py-spy shows of each.

    Then end the run. If py-spy is not allowed to look, print what would allow it.
    """
    flags = (f"--nproc-per-node={ranks}", SCRIPT, "--patient", patient, "--timeout", seconds)
    # Not sys.executable: the ranks must be torchrun's children.
    python = Path(sys.prefix, "bin", "python")
    command = [str(word) for word in (python, *TORCHRUN, *flags)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as run:
        try:
            texts = _when_they_wait(run, ranks, seconds)
        finally:
            run.terminate()  # torchrun ends its ranks
    for rank, text in enumerate(texts):
        print(f"$ py-spy dump --pid PROCESS_OF_RANK_{rank}")
        print(_main_thread(text))


def _when_they_wait(run: subprocess.Popen, ranks: int, seconds: float) -> Sequence[str]:
    """The dump of each rank, in torch.distributed, and the same 0.3 s later."""
    before: list[str] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until and run.poll() is None:
        of_rank = {
            int(environment["RANK"]): child.pid
            for child in psutil.Process(run.pid).children()
            if "RANK" in (environment := child.environ())
        }
        dumps = [_dump(of_rank[rank]) for rank in sorted(of_rank)]
        if NOT_ALLOWED in dumps:
            return [NOT_ALLOWED]
        waiting = len(dumps) == ranks and all("distributed_c10d" in text for text in dumps)
        if waiting and dumps == before:
            return dumps
        before = dumps
        time.sleep(0.3)
    raise TimeoutError(f"the ranks did not wait at the same time within {seconds:.0f} s")


def _dump(process: int) -> str:
    """What `py-spy dump` prints for a process; "" if it cannot be read yet."""
    if shutil.which("py-spy") is None:
        raise UserError(
            "py-spy is not installed: `pip install py-spy`, then run this cell again."
        )
    command = ["py-spy", "dump", "--pid", str(process)]
    plain = {name: value for name, value in os.environ.items() if name != "CLICOLOR_FORCE"}
    done = subprocess.run(command, capture_output=True, text=True, env=plain)
    if done.returncode and "ermission" in done.stderr:
        return NOT_ALLOWED
    return done.stdout


def _main_thread(text: str) -> str:
    """The stack of the main thread alone, without the wrappers of decorators."""
    _, separator, stack = text.partition('"MainThread"\n')
    lines = stack.partition("\nThread")[0].splitlines() if separator else [text]
    return "\n".join(line for line in lines if line and "wrapper (torch" not in line)


def quiet() -> None:
    """Leave out what gloo itself writes to stderr: the error has the same text."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


# ---- patients in this notebook's ranks ------------------------------------------------------


def _run(patient: str, cured: bool, device: torch.device, images: int) -> float:
    """A patient on this rank, as in the script. Returns the loss over all images."""
    script = _script()
    torch.manual_seed(0)
    rows = torch.rand(images, 64).to(device)
    labels = rows[:, :10].argmax(1)
    model = script.new_model().to(device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    script.PATIENTS[patient](model, rows, labels.clone(), rank, ranks, cured)
    with torch.no_grad():
        return F.cross_entropy(model(rows), labels).item()


def final_losses(patient: str) -> tuple[float, float]:
    """The loss after a patient's training on two ranks on the CPU: ill, and cured."""
    return launch.call(_on_the_cpu, 2, patient)[0]


def _on_the_cpu(patient: str) -> tuple[float, float]:
    dist.init_process_group("gloo")
    ill, cured = (_run(patient, cured, torch.device("cpu"), 160) for cured in (False, True))
    dist.destroy_process_group()
    return ill, cured


def timelines(patient: str, images: int = 64) -> tuple[multigpu.Timeline, multigpu.Timeline]:
    """A patient's steps, of 32 images each, on two virtual V100s: ill, and cured."""
    of_ranks = launch.call(_on_virtual_gpus, 2, patient, images)
    ill, cured = (
        multigpu.Timeline.of_ranks(list(runs)) for runs in zip(*of_ranks, strict=True)
    )
    return ill, cured


def _on_virtual_gpus(patient: str, images: int) -> list[multigpu.Timeline]:
    timelines = []
    with multigpu.gpus(2, gpu="V100-16GB", link="NVLink2") as gpus:
        dist.init_process_group("nccl")
        gpu = gpus[dist.get_rank()]
        torch.cuda.set_device(gpu)
        for cured in (False, True):
            dist.barrier(device_ids=[gpu.index])
            began = multigpu.elapsed()
            _run(patient, cured, gpu, images)
            timelines.append(multigpu.timeline(since=began))
        dist.destroy_process_group()
    return timelines


def draw(timelines: dict[str, multigpu.Timeline]) -> "Figure":
    """Timelines below each other, with the same seconds."""
    figure = plots.figure(8, 2.5 * len(timelines))
    until = max(timeline.end - timeline.start for timeline in timelines.values())
    for place, (name, timeline) in enumerate(timelines.items(), 1):
        axes = figure.add_subplot(len(timelines), 1, place)
        timeline.plot(axes, name, until=until)
    return figure
