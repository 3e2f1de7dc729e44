"""Which GPU this machine has, and which virtual GPU simulates it.

    python benchmarks/gpu_sections/card.py --device cuda --out FILE

A GPU has a preset in multigpu.GPUS, or figures of its data sheet here, or, if it is
unknown, an estimate from torch.cuda.get_device_properties. `source` says which.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from multigpu import GPUS, Gpu
from multigpu.files import write_json
from multigpu.virtual import control

# Words of the name that torch.cuda.get_device_name gives → the preset. The first match wins.
PRESETS = (
    ("A100-SXM4-80GB", "A100-80GB"),
    ("A100-SXM4-40GB", "A100-40GB"),
    ("A100-PCIE-40GB", "A100-40GB"),
    ("H100 80GB HBM3", "H100-80GB"),
    ("V100-SXM2-16GB", "V100-16GB"),
    ("V100-SXM2-32GB", "V100-32GB"),
    ("H200", "H200"),
    ("GB200", "GB200"),
    ("B200", "B200"),
    ("T4", "T4"),
    ("A10", "A10"),
    ("A10G", "A10G"),
    ("L4", "L4"),
    ("L40S", "L40S"),
    ("RTX 3060", "RTX3060-12GB"),
    ("RTX 3090", "RTX3090"),
    ("RTX 4090", "RTX4090"),
    ("RTX 5090", "RTX5090"),
)
# Words of the name → the most similar preset, and the figures in which the GPU differs from
# it: the peaks of dense matrices in FLOP/s, and the bandwidth in bytes/s. Where a data sheet
# gives a peak with sparsity, half of it is used.
# H100 PCIe: "NVIDIA H100 Tensor Core GPU" datasheet (2022), PCIe: 26 / 51; TF32 756 and fp16
#   1,513 with sparsity; 2 TB/s.
# A100 80GB PCIe: "NVIDIA A100 Tensor Core GPU" datasheet (2021): 1,935 GB/s.
# V100 PCIe: "NVIDIA V100 Tensor Core GPU" datasheet (2020): 7 / 14 / 112.
_H100_PCIE = {"bandwidth": 2e12, "fp64": 26e12, "fp32": 51e12, "tf32": 378e12}
_V100_PCIE = {"fp64": 7e12, "fp32": 14e12, "tf32": 14e12, "fp16": 112e12}
SHEETS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("H100 PCIe", "H100-80GB", {**_H100_PCIE, "fp16": 756.5e12}),
    ("A100 80GB PCIe", "A100-80GB", {"bandwidth": 1935e9}),
    ("V100-PCIE-16GB", "V100-16GB", _V100_PCIE),
    ("V100-PCIE-32GB", "V100-32GB", _V100_PCIE),
)
# A slice of a GPU (MIG), and cards of the same name with other figures, are estimated.
OTHER_FIGURES = ("MIG", "NVL", "Ti", "Laptop", "4090 D", "5090 D")
# For an unknown GPU, by its compute capability (major, minor): float32 multiply-adds, and fp16
# multiply-adds on tensor cores, per SM and clock. NVIDIA, "CUDA C++ Programming Guide", table
# "Throughput of Native Arithmetic Instructions" (float32), and the architectures' white papers
# (tensor cores, dense, with sums in float32). TF32 has half of fp16.
PER_CLOCK = {
    (7, 0): (64, 512),
    (7, 5): (64, 512),
    (8, 0): (64, 1024),
    (8, 6): (128, 256),
    (8, 9): (128, 512),
    (9, 0): (128, 2048),
    (10, 0): (128, 4096),
    (12, 0): (128, 256),
}


@dataclass(frozen=True)
class Card:
    """A GPU of this machine.

    name    as torch.cuda.get_device_name gives it
    gpu     what simulates it, with this GPU's memory
    preset  the preset of `gpu`'s other figures
    source  where the simulation's figures come from
    facts   what the report says about the machine
    """

    name: str
    gpu: Gpu
    preset: str
    source: str
    facts: dict[str, object]

    def as_dict(self) -> dict:
        """The card as plain values, for a JSON file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "Card":
        """The card that `as_dict` has written."""
        like = GPUS[values["preset"]]
        figures = {}
        for name, value in values["gpu"].items():
            kind = type(getattr(like, name))
            if isinstance(value, dict):
                figures[name] = kind(**value)
            else:
                figures[name] = tuple(value) if kind is tuple else value
        return cls(**{**values, "gpu": Gpu(**figures)})


def simulated(properties: Any) -> tuple[Gpu, str, str]:
    """The Gpu that simulates a GPU with these CUDA properties, its preset, and its source."""
    name, memory = properties.name, properties.total_memory
    if not any(part in name for part in OTHER_FIGURES):
        for part, preset in PRESETS:
            if re.search(rf"\b{part}\b", name):
                return replace(GPUS[preset], memory=memory), preset, f"the preset {preset}"
        for part, preset, figures in SHEETS:
            if re.search(rf"\b{part}\b", name):
                gpu = replace(GPUS[preset], name=name, memory=memory, **figures)
                source = f"the data sheet of {part}, with the other figures of {preset}"
                return with_units(gpu, properties.multi_processor_count), preset, source
    return *estimated(properties), "an estimate from torch.cuda.get_device_properties"


def with_units(gpu: Gpu, units: int) -> Gpu:
    """The Gpu with this number of SMs, if it has shares of its peaks, which depend on it."""
    shares = getattr(gpu, "shares", None)
    return gpu if shares is None else replace(gpu, shares=replace(shares, sms=units))


def estimated(properties: Any) -> tuple[Gpu, str]:
    """A Gpu from the CUDA properties alone, and the preset that has its other figures.

    A peak is units × clock, and the bandwidth is the memory's clock × width. Clocks are in
    kHz, and the width is in bits; there are two transfers per clock.
    """
    version = (properties.major, properties.minor)
    known = [key for key in PER_CLOCK if key <= version] or [min(PER_CLOCK)]
    fp32_units, tensor_units = PER_CLOCK[max(known)]
    clock = properties.clock_rate * 1e3 * properties.multi_processor_count
    fp32 = 2 * fp32_units * clock
    fp16 = 2 * tensor_units * clock
    fast_fp64 = version in ((7, 0), (8, 0), (9, 0), (10, 0))
    preset = "V100-16GB" if version < (8, 0) else "A100-40GB"
    if version >= (9, 0):
        preset = "H100-80GB"
    gpu = replace(
        GPUS[preset],
        name=properties.name,
        memory=properties.total_memory,
        bandwidth=2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8,
        fp64=fp32 / (2 if fast_fp64 else 64),
        fp32=fp32,
        tf32=fp16 / 2 if version >= (8, 0) else fp32,
        fp16=fp16,
        bf16=version >= (8, 0),
    )
    return with_units(gpu, properties.multi_processor_count), preset


def this_card() -> Card:
    """The first GPU of this machine."""
    properties = torch.cuda.get_device_properties(0)
    gpu, preset, source = simulated(properties)
    shown = ("total_memory", "multi_processor_count", "L2_cache_size", "clock_rate")
    shown += ("memory_clock_rate", "memory_bus_width")
    facts: dict[str, object] = {name: getattr(properties, name, None) for name in shown}
    facts["compute_capability"] = f"{properties.major}.{properties.minor}"
    facts["gpus"] = torch.cuda.device_count()
    facts |= software()
    return Card(properties.name, gpu, preset, source, facts)


def stand_in() -> Card:
    """The card of a rehearsal, in which the CPU has the GPU's place."""
    preset = "A100-40GB"
    gpu = replace(GPUS[preset], name="CPU")
    return Card("CPU", gpu, preset, "nothing: this is a rehearsal", software())


def software() -> dict[str, object]:
    """Versions, the host's processor and cores, and what nvidia-smi says of the first GPU."""
    facts: dict[str, object] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "host": _processor(),
        "cores": len(os.sched_getaffinity(0)),
    }
    with suppress(Exception):
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    wanted = "driver_version,persistence_mode,power.limit,clocks.max.sm,clocks.max.memory"
    with suppress(OSError, subprocess.SubprocessError):
        facts["nvidia_smi"] = subprocess.run(
            ["nvidia-smi", "--id=0", f"--query-gpu={wanted}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.strip()
    return facts


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def check_versions(device: str) -> None:
    """Exit with one sentence if torch is too old, or sees no GPU."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < (2, 11):
        sys.exit(f"torch {torch.__version__} is installed: gpu-check needs 2.11 or later.")
    if device == "cuda" and not (torch.version.cuda and torch.cuda.is_available()):
        sys.exit(
            f"torch {torch.__version__} sees no NVIDIA GPU: run gpu-check on a machine where "
            f"nvidia-smi lists one, or exercise its code with --device cpu --quick."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    check_versions(args.device)
    card = this_card() if args.device == "cuda" else stand_in()
    # A typing error in the figures shows here, and not in each section.
    with control.running(1, gpu=card.gpu, compute=False):
        pass
    write_json(args.out, card.as_dict())


if __name__ == "__main__":
    main()
