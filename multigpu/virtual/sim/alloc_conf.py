"""PYTORCH_ALLOC_CONF, or its older name PYTORCH_CUDA_ALLOC_CONF: the allocator's settings.

These keys are simulated: expandable_segments, large_segment_size_mb, max_split_size_mb,
max_non_split_rounding_mb. Others, such as backend, garbage_collection_threshold and
roundup_power2_divisions, have no effect.

Source: PyTorch, c10/core/AllocatorConfig.h (2.13) and c10/cuda/CUDACachingAllocator.cpp.
"""

import math
import os
from dataclasses import dataclass

MIB = 2**20
# Bytes: the unit of all sizes, the largest request of the small pool, that pool's segments,
# the least request that has a segment for itself, and the unit of such segments.
UNIT = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
OWN_SEGMENT = 10 * MIB
LARGE_UNIT = 2 * MIB
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass
class Settings:
    """The settings of the allocator, in bytes."""

    expandable: bool = False
    large_segment: int = 20 * MIB
    max_split: float = math.inf
    max_rounding: int = 20 * MIB

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """Settings from a text such as "max_split_size_mb:128,expandable_segments:True".

        Raises ValueError for a value that a key cannot have.
        """
        settings = cls()
        # The values of roundup_power2_divisions have commas, too, but no key that counts.
        for part in map(str.strip, text.split(",")):
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
            except (KeyError, ValueError):
                raise ValueError(
                    f"{VARIABLES[0]} has {part!r}, which is no value of {key}: give one such "
                    f"as expandable_segments:True or max_split_size_mb:128."
                ) from None
        return settings

    def segment(self, size: int) -> int:
        """The bytes of the segment that is taken for a request of `size` bytes."""
        if size <= SMALL:
            return SMALL_SEGMENT
        if size < OWN_SEGMENT:
            return self.large_segment
        return -(-size // LARGE_UNIT) * LARGE_UNIT


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
