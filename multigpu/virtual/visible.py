"""Which of the GPUs a process sees: CUDA_VISIBLE_DEVICES."""

import os
import re
from collections.abc import Mapping

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(count: int, environ: Mapping[str, str] = os.environ) -> list[int]:
    """The numbers of the GPUs, out of `count`, that a process sees as cuda:0, cuda:1, …

    CUDA reads the variable up to the first entry that names no GPU: by its number, or by the
    begin of its UUID. If a GPU is named twice, the process sees none. Without the variable it
    sees all.
    """
    text = environ.get(VARIABLE)
    if text is None:
        return list(range(count))
    numbers: list[int] = []
    for entry in text.split(","):
        number = _number(entry, count)
        if number is None:
            break
        if number in numbers:
            return []
        numbers.append(number)
    return numbers


def _number(entry: str, count: int) -> int | None:
    """The number of the GPU that an entry of the variable names; None if it names none."""
    if entry.strip().startswith("GPU-"):
        named = [number for number in range(count) if uuid(number).startswith(entry.strip())]
        return named[0] if len(named) == 1 else None
    # As CUDA does, take the digits with which an entry begins.
    digits = re.match(r"\s*\+?(\d+)", entry)
    return int(digits[1]) if digits and int(digits[1]) < count else None


def uuid(number: int) -> str:
    """The UUID of the machine's GPU with this number, as nvidia-smi prints it."""
    return f"GPU-00000000-0000-0000-0000-{number:012x}"
