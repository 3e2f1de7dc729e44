"""Which of the GPUs a process sees: CUDA_VISIBLE_DEVICES."""

import os
import re
from collections.abc import Mapping

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(count: int, environ: Mapping[str, str] = os.environ) -> list[int]:
    """The numbers of the GPUs, out of `count`, that a process sees as cuda:0, cuda:1, …

    CUDA reads the variable up to the first entry that names no GPU. If a GPU is named twice,
    the process sees none. Without the variable it sees all. A virtual GPU has no UUID, so
    entries such as GPU-5a3b name none.
    """
    text = environ.get(VARIABLE)
    if text is None:
        return list(range(count))
    numbers: list[int] = []
    for entry in text.split(","):
        # As CUDA does, take the digits with which an entry begins.
        found = re.match(r"\s*\+?(\d+)", entry)
        if not found or int(found[1]) >= count:
            break
        if int(found[1]) in numbers:
            return []
        numbers.append(int(found[1]))
    return numbers
