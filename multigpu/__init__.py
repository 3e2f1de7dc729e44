"""The library of the course on training with many GPUs.

    import multigpu
    first, second = multigpu.gpus(2)

`gpus` gives the devices cuda:0, cuda:1, …: real GPUs, or virtual ones. What virtual GPUs have
and CUDA has no name for is here: `timeline`, `elapsed`, `label`, `memory_held`, `marked`,
`number_micro_batches`, the tables of GPUs and links that can be simulated, and the time of a
collective in a `Network` (`collective_seconds`). `open_lesson` begins a lesson's notebook.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigpu.lesson import open_lesson as open_lesson
    from multigpu.virtual.choice import gpus as gpus
    from multigpu.virtual.control import elapsed as elapsed
    from multigpu.virtual.control import label as label
    from multigpu.virtual.control import marked as marked
    from multigpu.virtual.control import memory_held as memory_held
    from multigpu.virtual.control import number_micro_batches as number_micro_batches
    from multigpu.virtual.control import timeline as timeline
    from multigpu.virtual.sim.network import Network as Network
    from multigpu.virtual.sim.network import collective_seconds as collective_seconds
    from multigpu.virtual.sim.presets import GPUS as GPUS
    from multigpu.virtual.sim.presets import LINKS as LINKS
    from multigpu.virtual.sim.presets import NETWORKS as NETWORKS
    from multigpu.virtual.sim.presets import Gpu as Gpu
    from multigpu.virtual.sim.presets import Link as Link
    from multigpu.virtual.sim.timeline import Timeline as Timeline

__version__ = "1.0.0"

# Each is imported when it is used: torch's import takes a second.
_PLACES = {
    "gpus": "multigpu.virtual.choice",
    "open_lesson": "multigpu.lesson",
    "Timeline": "multigpu.virtual.sim.timeline",
    **dict.fromkeys(
        ("elapsed", "label", "marked", "memory_held", "number_micro_batches", "timeline"),
        "multigpu.virtual.control",
    ),
    **dict.fromkeys(("Network", "collective_seconds"), "multigpu.virtual.sim.network"),
    **dict.fromkeys(
        ("GPUS", "LINKS", "NETWORKS", "Gpu", "Link"), "multigpu.virtual.sim.presets"
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'multigpu' has no attribute {name!r}")
    # First, because under `multigpu virtual` the GPUs start right after it, by these modules.
    import_module("torch")
    return getattr(import_module(_PLACES[name]), name)
