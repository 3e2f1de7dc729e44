"""Lesson 12's script, which records what it does, and waits where a test wants to kill it.

The variable EVENTS names a folder, and AGENT is the number of the rank's torchrun. Each
process adds a line to its file `processes`, and each rank writes the images of its steps to
`rows-PROCESS.jsonl`.
The variable FAULT is MOMENT:COUNT:RANK. When that rank comes to that moment for the COUNT-th
time in its process, it writes its process and its parent to the file `marker`, and waits for a
second. It does so once: not if there is a marker.

The moments: start (torch is imported, and no process group exists), join (it exists), ready
(the newest checkpoint is loaded), step, save (half of the file is written), evaluation.
"""

import json
import os
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import PT_CNN_Elastic as lesson
import torch.distributed as dist

from multigpu import elastic, files, launch

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


def before(module: ModuleType, name: str, moment: str) -> None:
    """Come to `moment` whenever this function of the lesson or of the library begins."""
    original = getattr(module, name)

    def wrapped(*args, **keywords):
        reach(moment)
        return original(*args, **keywords)

    setattr(module, name, wrapped)


append("processes", f"{os.getpid()} {os.getppid()} {RANK} {os.environ['AGENT']}")
before(elastic, "join", "start")
before(lesson, "train_to_end", "ready")
before(lesson, "accuracy", "evaluation")

original_atomic = files.atomic


@contextmanager
def slow_atomic(path: Path):
    with original_atomic(path) as temporary:
        if path.name.startswith("step-"):
            temporary.write_bytes(b"half a checkpoint")
            reach("save")
        yield temporary


files.atomic = slow_atomic

original_load = elastic.Checkpoints.load


def load(checkpoints, parts):
    """Give each start a number that no other start has, also if it saves nothing."""
    reach("join")
    position = original_load(checkpoints, parts) or asdict(lesson.Position())
    number = [time.time_ns()]
    dist.broadcast_object_list(number, src=0)
    return {**position, "starts": number[0]}


elastic.Checkpoints.load = load

original_shard = lesson.own_shard
# The images of each step that this rank has begun and not yet recorded.
images_of_steps: list[list[int]] = []


def own_shard(batch, rank, ranks):
    shard = original_shard(batch, rank, ranks)
    real = batch[rank::ranks].tolist()
    assert shard[: len(real)].tolist() == real
    images_of_steps.append(real)
    return shard


lesson.own_shard = own_shard

original_epoch = lesson.train_epoch
trained = []  # the run


def train_epoch(run, train):
    trained[:] = [run]
    return original_epoch(run, train)


lesson.train_epoch = train_epoch

original_add_up = elastic.add_up


def add_up(number):
    """After a training step: record its images."""
    found = original_add_up(number)
    position = trained[0].position
    row = [position.starts, position.steps, images_of_steps.pop(0)]
    append(f"rows-{os.getpid()}.jsonl", json.dumps(row))
    reach("step")
    return found


elastic.add_up = add_up

if __name__ == "__main__":
    launch.start(lesson.main, lesson.parse())
