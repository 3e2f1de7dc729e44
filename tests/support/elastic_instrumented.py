"""Lesson 12's script, which records what it does, and waits where a test wants to kill it.

The variable EVENTS names a folder, and AGENT is the number of the rank's torchrun. Each
process adds a line to its file `processes`, and each rank writes the images of its steps to
`rows-PROCESS.jsonl`.
The variable FAULT is MOMENT:COUNT:RANK. When that rank comes to that moment for the COUNT-th
time in its process, it writes its process and its parent to the file `marker`, and waits for a
second. It does so once: not if there is a marker.

The moments: start (torch is imported, and no process group exists), join, warm-up, step, save
(half of the file is written), evaluation.
"""

import json
import os
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import PT_CNN_Elastic as lesson
import torch
import torch.distributed as dist

from multigpu import files, launch

EVENTS = Path(os.environ["EVENTS"])
RANK = int(os.environ.get("RANK", "0"))
SECONDS = 1.0
counts: Counter[str] = Counter()


def append(name: str, text: str) -> None:
    """One write, so that lines of several processes do not mix."""
    with open(EVENTS / name, "a") as file:
        file.write(text + "\n")


def reach(moment: str) -> None:
    """Wait here, once, if FAULT says so."""
    counts[moment] += 1
    marker = EVENTS / "marker"
    here = f"{moment}:{counts[moment]}:{RANK}"
    if here == os.environ.get("FAULT") and not marker.exists():
        files.write_json(marker, {"worker": os.getpid(), "agent": os.getppid()})
        time.sleep(SECONDS)


def before(name: str, moment: str) -> None:
    """Come to `moment` whenever the lesson's function `name` begins."""
    original = getattr(lesson, name)

    def wrapped(*args):
        reach(moment)
        return original(*args)

    setattr(lesson, name, wrapped)


append("processes", f"{os.getpid()} {os.getppid()} {RANK} {os.environ['AGENT']}")
before("set_up", "start")
before("read_data", "join")
before("warm_up", "warm-up")
before("evaluate", "evaluation")

original_atomic = files.atomic


@contextmanager
def slow_atomic(path: Path):
    with original_atomic(path) as temporary:
        if path.name.startswith("step-"):
            temporary.write_bytes(b"half a checkpoint")
            reach("save")
        yield temporary


files.atomic = slow_atomic

original_load = lesson.load_newest


def load_newest(run, folder):
    """Give each start a number that no other start has, also if it saves nothing."""
    original_load(run, folder)
    number = [time.time_ns()]
    dist.broadcast_object_list(number, src=0)
    run.position.starts = number[0]


lesson.load_newest = load_newest

original_shard = lesson.own_shard
# The images of each step that this rank has begun and not yet recorded.
images_of_steps: list[list[int]] = []


def own_shard(batch, world):
    shard = original_shard(batch, world)
    real = batch[world.rank :: world.size].tolist()
    assert shard[: len(real)].tolist() == real
    images_of_steps.append(real)
    return shard


lesson.own_shard = own_shard

original_add_up = lesson.add_up


def add_up(run, number):
    """After a training step: record its images."""
    found = original_add_up(run, number)
    # A training step adds up a tensor, its loss. A signal is looked for with the number 0.0.
    is_loss = isinstance(number, torch.Tensor)
    if run.model.module.training and is_loss and images_of_steps:
        row = [run.position.starts, run.position.steps, images_of_steps.pop(0)]
        append(f"rows-{os.getpid()}.jsonl", json.dumps(row))
        reach("step")
    return found


lesson.add_up = add_up

if __name__ == "__main__":
    launch.start(lesson.main, lesson.parse())
