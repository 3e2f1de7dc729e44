"""Virtual GPUs: a torch device for machines without GPUs.

The devices `vgpu:0 … vgpu:k` compute real numbers on the CPU and raise CUDA's errors. They
meter their memory and run a simulated clock.

    from multigpu import vgpu
    first, second = vgpu.start(count=2, gpu="V100-16GB", link="NVLink2")
    model.to(first)
    torch.vgpu.memory_allocated(first)
    vgpu.timeline().plot("step.png")
    vgpu.stop()
"""

from typing import TYPE_CHECKING, Any

from multigpu.vgpu.sim.presets import GPUS, LINKS, NETWORKS, Gpu, Link
from multigpu.vgpu.sim.timeline import Timeline

if TYPE_CHECKING:
    from multigpu.vgpu.control import (
        computes,
        devices,
        elapsed,
        label,
        marked,
        memory_held,
        number_micro_batches,
        running,
        start,
        stop,
        timeline,
    )

__all__ = [
    "GPUS",
    "LINKS",
    "NETWORKS",
    "Gpu",
    "Link",
    "Timeline",
    "computes",
    "devices",
    "elapsed",
    "label",
    "marked",
    "memory_held",
    "number_micro_batches",
    "running",
    "start",
    "stop",
    "timeline",
]


def __getattr__(name: str) -> Any:
    # control.py needs torch, whose import takes a second. What is imported above does not.
    if name in __all__:
        from multigpu.vgpu import control

        return getattr(control, name)
    raise AttributeError(f"module 'multigpu.vgpu' has no attribute {name!r}")
