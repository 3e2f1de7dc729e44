"""The same script for a reference: what says CUDA is translated, and nothing else.

"CPU"   for the CPU, with gloo
"vgpu"  for this library's virtual GPUs by their own name, with control.start written out
"""

import re
from pathlib import Path

ANY = r"torch\.(?:accelerator|cuda)"
# For each reference, pairs (pattern, text); {gpus} stands for the number of GPUs.
RULES = {
    "CPU": (
        (rf"{ANY}\.is_available\(\)", "True"),
        (rf"{ANY}\.device_count\(\)", "{gpus}"),
        (r"torch\.accelerator\.current_accelerator\(\)", 'torch.device("cpu")'),
        # id() takes the argument, whatever it is, and does nothing.
        (rf"{ANY}\.(?:set_device|set_device_index|device_index)\(", "id("),
        (r"torch\.cuda\.(?:synchronize|empty_cache)\([^()]*\)", "None"),
        (r"(['\"])cuda(?::\d|:{[^}]*})?\1", r"\1cpu\1"),
        (r"(['\"])nccl\1", r"\1gloo\1"),
        (r"\.(?:cuda|pin_memory)\([^()]*\)", ""),
        (r"device_ids=\[[^]]*\]", "device_ids=None"),
        (r", device_id=\w+", ""),
        # Virtual GPUs leave torch.compile out.
        (r"torch\.compile\((\w+(?:\.\w+)*)\)", r"\1"),
    ),
    "vgpu": (
        (r"torch\.cuda\.amp\.GradScaler\(", 'torch.amp.GradScaler("vgpu", '),
        (r"torch\.cuda\.amp\.autocast\(", 'torch.autocast("vgpu", torch.float16, '),
        (r"torch\.cuda\.nvtx\.\w+\(.*\)", "None"),  # marks, which torch.vgpu does not have
        (r"torch\.cuda\.", "torch.vgpu."),
        (r"\.cuda\(", ".vgpu("),
        (r"(['\"])cuda((?::\d|:{[^}]*})?)\1", r"\1vgpu\2\1"),
        (r"(['\"])nccl\1", r"\1vgpu\1"),
        (r"torch\.compile\((\w+(?:\.\w+)*)\)", r"\1"),
    ),
}


def translate(
    folder: Path, reference: str, gpus: int, more: dict[str, list[tuple[str, str]]]
) -> None:
    """Translate all Python files of `folder`, in place.

    `more` has, for single files, the pairs (pattern, text) that only a reader of the script
    knows, such as the name of a variable with a GPU's number. They come first. Raises
    ValueError if such a pattern is not there.
    """
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        for pattern, new in more.get(str(path.relative_to(folder)), ()):
            text, count = re.subn(pattern, new, text)
            if not count:
                raise ValueError(f"{path.name} has no {pattern!r}: mend its entry in cases/.")
        for pattern, new in RULES[reference]:
            text = re.sub(pattern, new.replace("{gpus}", str(gpus)), text)
        path.write_text(text)
