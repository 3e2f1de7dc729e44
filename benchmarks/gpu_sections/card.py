"""Find this machine's GPU, and the virtual GPU that simulates it; write both as JSON.

    python benchmarks/gpu_sections/card.py --device cuda --out FILE [--gpu PRESET_OR_FILE]

The preset is found by the words of the GPU's name. Another GPU needs --gpu, as in
`multigpu virtual`.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from multigpu import GPUS, Gpu
from multigpu.errors import UserError
from multigpu.files import write_json
from multigpu.virtual import gpu_file

# A card with such a word has other figures than the preset with the rest of its name.
OTHER_FIGURES = {"MIG", "NVL", "Ti", "Laptop", "D", "PCIe", "PCIE"}


def preset_of(name: str) -> str:
    """The preset whose words are all in the GPU's name, as get_device_name gives it."""
    words = set(re.split(r"[ -]", re.sub(r"RTX (?=\d)", "RTX", name)))
    fitting = [preset for preset in GPUS if set(preset.split("-")) <= words]
    if not fitting or words & OTHER_FIGURES:
        raise UserError(
            f"no preset has the figures of {name}: give one that is like it with --gpu, or a "
            f"file (multigpu/virtual/gpu_file.py). Presets: {', '.join(GPUS)}."
        )
    return max(fitting, key=len)


def simulated(gpu: str, memory: int) -> Gpu:
    """The Gpu of a preset or a file, with this memory in bytes."""
    if gpu not in GPUS and not gpu_file.is_file(gpu):
        raise UserError(f"there is no GPU {gpu!r}: use a file, or one of {', '.join(GPUS)}.")
    found = gpu_file.read(gpu) if gpu_file.is_file(gpu) else GPUS[gpu]
    return replace(found, memory=memory)


def this_card(gpu: str | None) -> dict:
    """The first GPU: its name, the preset or file `gpu`, memory in bytes, and facts."""
    properties = torch.cuda.get_device_properties(0)
    shown = ("multi_processor_count", "L2_cache_size", "clock_rate", "memory_clock_rate")
    shown += ("total_memory", "memory_bus_width")
    facts = {name: getattr(properties, name, None) for name in shown}
    facts["compute_capability"] = f"{properties.major}.{properties.minor}"
    facts["gpus"] = torch.cuda.device_count()
    name = properties.name
    return {
        "name": name,
        "gpu": gpu or preset_of(name),
        "memory": properties.total_memory,
        "facts": facts | software(),
    }


def software() -> dict[str, object]:
    """Versions, the host's processor and cores, and what nvidia-smi says of the first GPU."""
    facts: dict[str, object] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "host": platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
    }
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name"))
        facts["host"] = model.partition(":")[2].strip()
    wanted = "driver_version,persistence_mode,power.limit,clocks.max.sm,clocks.max.memory"
    command = ["nvidia-smi", "--id=0", f"--query-gpu={wanted}", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        facts["nvidia_smi"] = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
        sys.exit(f"torch {torch.__version__} is installed: gpu-check needs 2.11 or later.")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"torch {torch.__version__} sees no NVIDIA GPU: run gpu-check on a machine where "
            f"nvidia-smi lists one, or rehearse it with --device cpu."
        )
    try:
        if args.device == "cuda":
            card = this_card(args.gpu)
        else:
            card = {"name": "CPU", "gpu": "A100-40GB", "memory": 40 * 2**30}
            card["facts"] = software()
        # A wrong --gpu shows here, and not in each section.
        simulated(card["gpu"], card["memory"])
        write_json(args.out, card)
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
