"""PYTORCH_ALLOC_CONF, or its older name PYTORCH_CUDA_ALLOC_CONF: the allocator's settings.

These keys are simulated: expandable_segments, large_segment_size_mb, max_split_size_mb,
max_non_split_rounding_mb, roundup_power2_divisions. Others, such as backend and
garbage_collection_threshold, have no effect.

Source: PyTorch, c10/core/AllocatorConfig.h (2.13) and c10/cuda/CUDACachingAllocator.cpp.
"""

import math
import os
from dataclasses import dataclass, field

MIB = 2**20
# Bytes: the unit of all sizes, the largest request of the small pool, that pool's segments,
# the least request that has a segment for itself, and the unit of such segments.
UNIT = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
OWN_SEGMENT = 10 * MIB
LARGE_UNIT = 2 * MIB
# The sizes with roundup_power2_divisions of their own: 1 MiB, 2 MiB, … 32 GiB and more.
INTERVALS = 16
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass
class Settings:
    """The settings of the allocator, in bytes. `divisions` are by powers of 2, from 1 MiB."""

    expandable: bool = False
    large_segment: int = 20 * MIB
    max_split: float = math.inf
    max_rounding: int = 20 * MIB
    divisions: list[int] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """Settings from a text such as "max_split_size_mb:128,expandable_segments:True".

        Raises ValueError for a value that a key cannot have.
        """
        settings = cls()
        for part in _parts(text):
            key, _, value = (word.strip() for word in part.partition(":"))
            try:
                if key == "expandable_segments":
                    settings.expandable = {"True": True, "False": False}[value]
                elif key == "large_segment_size_mb":
                    settings.large_segment = int(value) * MIB
                elif key == "max_split_size_mb":
                    settings.max_split = int(value) * MIB
                elif key == "max_non_split_rounding_mb":
                    settings.max_rounding = int(value) * MIB
                elif key == "roundup_power2_divisions":
                    settings.divisions = _divisions(value)
            except (KeyError, ValueError):
                raise ValueError(
                    f"{VARIABLES[0]} has {part!r}, which is no value of {key}: give one such "
                    f"as expandable_segments:True or max_split_size_mb:128."
                ) from None
        return settings

    def round(self, size: int) -> int:
        """`size` as the allocator rounds it up."""
        if self.divisions:
            interval = min(max(size.bit_length() - 21, 0), INTERVALS - 1)
            divisions = self.divisions[interval]
            if divisions > 1 and size > UNIT * divisions:
                unit = (1 << size.bit_length() - 1) // divisions
                return -(-size // unit) * unit
        return max(UNIT, -(-size // UNIT) * UNIT)

    def segment(self, size: int) -> int:
        """The bytes of the segment that is taken for a request of `size` bytes."""
        if size <= SMALL:
            return SMALL_SEGMENT
        if size < OWN_SEGMENT:
            return self.large_segment
        return -(-size // LARGE_UNIT) * LARGE_UNIT


def _parts(text: str) -> list[str]:
    """The settings of a text: what commas outside of brackets separate."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _divisions(value: str) -> list[int]:
    """roundup_power2_divisions of each interval: "8", or "[256:1,512:2,>:8]" by MiB."""
    if not value.startswith("["):
        return [int(value)] * INTERVALS
    divisions = [0] * INTERVALS
    last = None
    for part in value.strip("[]").split(","):
        size, _, number = part.partition(":")
        first = (last or 0) + 1 if size.strip() == ">" else int(size).bit_length() - 1
        end = INTERVALS if size.strip() == ">" else first + 1
        start = 0 if last is None else first
        divisions[start:end] = [int(number)] * (end - start)
        last = first
    return divisions[:INTERVALS]


_override: list[str] = []


def set_settings(text: str) -> None:
    """Let devices without allocations have these settings, instead of the environment's."""
    Settings.parse(text)
    _override[:] = [text]


def forget() -> None:
    """Let the environment's settings count again."""
    _override.clear()


def settings_text() -> str:
    """The settings that a device's first allocation will read."""
    texts = (os.environ.get(name, "") for name in VARIABLES)
    return _override[0] if _override else next(filter(None, texts), "")
