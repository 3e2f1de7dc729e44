"""What elastic training costs, measured on this machine's CPU: `python benchmarks/elastic.py`.

It writes benchmarks/elastic.json. Its rows, medians of the repeats:
- a save in every ten steps: by how much of a step's time the average step becomes longer, for
  the wide CNN of lesson 03 (28×28 images, 320 hidden units: 16 MB with the optimizer's state)
  on two ranks. The same numbers are measured for a save that training waits for.
- a killed rank: seconds from its death to the first new step ÷ seconds from the command to the
  first step of the same job.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from multigpu import elastic, launch
from multigpu.files import write_json
from multigpu.launch import rendezvous
from multigpu.models import CNN

SCRIPT = Path(__file__).parents[1] / "scripts" / "PT_CNN_Elastic.py"
BATCHES = (64, 512)  # images of a rank
STEPS = 20  # in a block; a save in every ten
BLOCKS = 7
STARTS = 5

# Writes the time of each start's first step, and of the kill. TIMES is the file.
TIMED = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
import PT_CNN_Elastic as lesson
from multigpu import launch
def note(what):
    with open(os.environ["TIMES"], "a") as file:
        file.write(f"{{what}} {{time.time()}}\\n")
kill = signal.raise_signal
def noted_kill(number):
    note("death")
    kill(number)
signal.raise_signal = noted_kill
seen = []
def first(*_):
    if os.environ["RANK"] == "0" and not seen:
        seen.append(note("step"))
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(first)
if __name__ == "__main__":
    launch.start(lesson.main, lesson.parse())
"""


def cost_of_saves(batch: int, folder: str) -> dict[str, list[float]]:
    """Seconds per step, by block: without saves, with a thread, with awaited saves."""
    world = launch.find_world()
    torch.set_num_threads(1)
    store = rendezvous.open_store(world, torch.device("cpu"))
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    torch.manual_seed(0)
    ddp = DDP(CNN((1, 28, 28), hidden=320))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    images, labels = torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    writer = elastic.Writer(elastic.CheckpointFolder(Path(folder)))
    times: dict[str, list[float]] = {"none": [], "thread": [], "wait": []}
    for block in range(BLOCKS + 1):  # the first one warms up
        for way, values in times.items():
            dist.barrier()
            began = time.perf_counter()
            for step in range(STEPS):
                F.cross_entropy(ddp(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                if way != "none" and world.rank == 0 and step % 10 == 0:
                    parts = {"model": ddp.module.state_dict(), "opt": optimizer.state_dict()}
                    writer.save(block, {"format": 1, "parts": parts, "settings": {}})
                    if way == "wait":
                        writer.wait()
            dist.barrier()
            if block > 0:
                values.append((time.perf_counter() - began) / STEPS)
            writer.wait()
    del ddp
    dist.destroy_process_group()
    return times


def restart() -> tuple[float, float]:
    """Seconds from the command to the first step, and from a death to the first new step."""
    with tempfile.TemporaryDirectory() as name:
        timed = Path(name) / "timed.py"
        timed.write_text(TIMED.format(folder=str(SCRIPT.parent)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr=127.0.0.1", "--nproc-per-node=2", "--max-restarts=1"]
        command += [str(timed), "--epochs", "1", "--kill", "1", "12", "--out", f"{name}/out"]
        environment = os.environ | {"TIMES": f"{name}/times", "OMP_NUM_THREADS": "1"}
        began = time.time()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, env=environment, check=True, **quiet)
        lines = (Path(name) / "times").read_text().split()
    first, death, new = (float(value) for value in lines[1::2])
    assert lines[::2] == ["step", "death", "step"], lines
    return first - began, new - death


def row(what: str, values: list[float], unit: str, goal: str) -> dict:
    """A row of the report, printed too."""
    found = {
        "what": what,
        "median": statistics.median(values),
        "range": [min(values), max(values)],
        "unit": unit,
        "goal": goal,
    }
    print(f"{what}: {found['median']:.2f} {unit} ({found['range'][0]:.2f} to ", end="")
    print(f"{found['range'][1]:.2f}), goal {goal}", flush=True)
    return found


def main() -> None:
    rows = []
    for batch in BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            times, _ = launch.call(cost_of_saves, 2, batch, folder)
        step = statistics.median(times["none"])
        for way, name in (("thread", "by a thread"), ("wait", "waited for")):
            more = [
                100 * (saved - none) / none
                for saved, none in zip(times[way], times["none"], strict=True)
            ]
            what = f"a save in every ten steps, {name}, batch {batch} a rank"
            rows.append(
                row(what, more, "% of a step", "under 5" if way == "thread" else "none")
            )
        print(f"    a step takes {1e3 * step:.0f} ms")
    found = [restart() for _ in range(STARTS)]
    rows.append(row("command to first step", [first for first, _ in found], "s", "none"))
    rows.append(row("death to first new step", [new for _, new in found], "s", "none"))
    ratios = [new / first for first, new in found]
    what = "death to first new step ÷ command to first step"
    rows.append(row(what, ratios, "times", "at most 1.5"))
    write_json(Path(__file__).with_suffix(".json"), {"rows": rows})


if __name__ == "__main__":
    main()
