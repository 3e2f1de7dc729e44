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

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


def one_step() -> vgpu.Timeline:
    """The third training step of this rank, from forward to update."""
    # Import Halves here, because this function is sent to the new processes by value.
    from PT_CNN_HybridParallel import Halves

    first, second = vgpu.start(2, compute=False)
    dist.init_process_group("vgpu")
    model = DDP(Halves(first, second, 4, (1, 28, 28), hidden=320))
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
    title = "Stages send micro-batches on; at the end of backward, replicas sum gradients"
    path = Path(__file__).with_name("replicas-of-stages.png")
    print(vgpu.Timeline.of_ranks(launch.call(one_step, 2)).plot(path, title=title).name)
