"""torch.cuda.memory's snapshot and history, as torch.cuda._memory_viz and its page read them.

With _record_memory_history, each entry has the Python frames of its allocation, without those
of this package. C++ frames are missing, and so are the frames of a free and the options
`context` and `stacks`.
"""

import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from multigpu.virtual.sim import alloc_conf, machine
from multigpu.virtual.sim.allocator import USED, Chunk
from multigpu.virtual.sim.memory import Meter

PACKAGE = str(Path(__file__).parents[2])
STATES = {True: "active_allocated", False: "inactive"}


class _History:
    """The entries of one device, the last `most` of them, and the frames of what exists."""

    def __init__(self, most: int):
        self.entries: deque[dict[str, Any]] = deque(maxlen=most)
        self.frames: dict[int, list[dict[str, Any]]] = {}

    def __call__(self, action: str, address: int, size: int, stream: int) -> None:
        frames = [] if action.startswith("free") else _frames()
        if action == "alloc":
            self.frames[address] = frames
        elif action == "free_completed":
            self.frames.pop(address, None)
        self.entries.append(
            {
                "action": action,
                # CUDA's allocator has no address for a request that did not fit.
                "device_free" if action == "oom" else "addr": address,
                "size": size,
                "stream": stream,
                "time_us": time.time_ns() // 1000,
                "frames": frames,
            }
        )


def _frames() -> list[dict[str, Any]]:
    """The frames of the program and of torch, the innermost first."""
    frames = []
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            name, line = code.co_name, frame.f_lineno
            frames.append({"filename": code.co_filename, "line": line, "name": name})
        frame = frame.f_back
    return frames


def record(
    enabled: str | bool | None,
    context: Any = None,
    stacks: Any = None,
    max_entries: int = sys.maxsize,
    clear_history: bool = False,
    *more: Any,
) -> None:
    """_cuda_record_memory_history: record what the allocators do from now on, or no longer.

    With "state" only the frames of what exists are kept.
    """
    most = 0 if enabled == "state" else min(max_entries, sys.maxsize)
    for meter in machine.current().meters:
        allocator = meter.allocator
        if not enabled:
            allocator.record = None
        elif allocator.record is None or clear_history:
            allocator.record = _History(most)


def record_legacy(
    enabled: bool,
    record_context: bool = True,
    trace_alloc_max_entries: int = 1,
    *more: Any,
) -> None:
    """_cuda_record_memory_history_legacy: as `record`, with the arguments of torch 2.0."""
    record("all" if enabled else None, max_entries=trace_alloc_max_entries)


def is_enabled() -> bool:
    """Whether a history is recorded."""
    return any(meter.allocator.record is not None for meter in machine.current().meters)


def snapshot(*arguments: Any) -> dict[str, Any]:
    """_cuda_memorySnapshot: all segments with their blocks, and the history of each device."""
    meters = machine.current().meters
    conf = alloc_conf.Settings.parse(alloc_conf.settings_text())
    return {
        "segments": [segment for meter in meters for segment in _segments(meter)],
        "device_traces": [
            list(getattr(meter.allocator.record, "entries", [])) for meter in meters
        ],
        "allocator_settings": {
            alloc_conf.VARIABLES[0]: alloc_conf.settings_text(),
            "expandable_segments": conf.expandable,
        },
        "external_annotations": [],
    }


def _segments(meter: Meter) -> list[dict[str, Any]]:
    """The device's contiguous ranges of memory, as torch's snapshot describes segments."""
    # What is freed has to be given back first.
    meter.living()
    frames = getattr(meter.allocator.record, "frames", {})
    segments = []
    for chunks in meter.allocator.ranges():
        used = [chunk for chunk in chunks if chunk.state == USED]
        pool = chunks[0].pool
        segments.append(
            {
                "device": meter.index,
                "address": chunks[0].address,
                "total_size": sum(chunk.size for chunk in chunks),
                "allocated_size": sum(chunk.size for chunk in used),
                "active_size": sum(chunk.size for chunk in used),
                "requested_size": sum(chunk.requested for chunk in used),
                "stream": pool.stream,
                "segment_type": "small" if pool.small else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": meter.allocator.settings.expandable,
                "frames": [],
                "blocks": [_block(chunk, frames) for chunk in chunks],
            }
        )
    return segments


def _block(chunk: Chunk, frames: dict[int, list]) -> dict[str, Any]:
    return {
        "address": chunk.address,
        "size": chunk.size,
        "requested_size": chunk.requested if chunk.state == USED else 0,
        "state": STATES[chunk.state == USED],
        "frames": frames.get(chunk.address, []) if chunk.state == USED else [],
    }
