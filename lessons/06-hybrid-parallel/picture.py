"""Draws replicas-of-stages.png, the picture on this page, from a simulation.

python lessons/06-hybrid-parallel/picture.py
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from multigpu import launch, vgpu
from multigpu.vgpu.sim.spans import format_seconds

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
MICRO_BATCHES = 4


def one_step() -> vgpu.Timeline:
    """The third training step of this rank, from forward to update."""
    # Import Halves here, because this function is sent to the new processes by value.
    from PT_CNN_HybridParallel import Halves

    first, second = vgpu.start(2, compute=False)
    dist.init_process_group("vgpu")
    halves = Halves(first, second, MICRO_BATCHES, (1, 28, 28), hidden=320)
    vgpu.number_micro_batches(halves.conv1, halves.fc2, MICRO_BATCHES)
    model = DDP(halves)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images = torch.empty(4096, 1, 28, 28, device=first)
    labels = torch.empty(4096, dtype=torch.long, device=second)
    for _ in range(3):
        optimizer.zero_grad()
        began = vgpu.elapsed()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return vgpu.timeline(since=began)


if __name__ == "__main__":
    timeline = vgpu.Timeline.of_ranks(launch.call(one_step, 2))
    on_rank_0 = [e for e in timeline.events if e.kind == "collective" and e.device < 2]
    assert {event.name for event in on_rank_0} == {"allreduce"}
    seconds = sum(event.end - event.start for event in on_rank_0)
    step = timeline.end - timeline.start
    title = "Stages exchange micro-batches; the replicas' all-reduce takes "
    title += f"{format_seconds(seconds)} of {format_seconds(step)}"
    path = Path(__file__).with_name("replicas-of-stages.png")
    print(timeline.plot(path, title).name)
