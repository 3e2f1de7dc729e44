"""The file of one's own GPU: `multigpu virtual --gpu FILE`, in JSON or TOML.

    name = "my card"
    memory = "24GiB"
    bandwidth = "936 GB/s"
    fp64 = "0.56 TFLOP/s"
    fp32 = "35.6 TFLOP/s"
    fp16 = "71 TFLOP/s"
    host = "PCIe4"
    capability = "8.6"

The fields are those of Gpu (sim/presets.py). With `like`, the name of a preset, a file
has only what differs from it. Without `tf32` the GPU has no TF32 units, without `bf16` it has
bfloat16 units from capability 8.0 on, and without `shares` it reaches its peaks.
"""

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from multigpu.errors import UserError, did_you_mean
from multigpu.virtual.sim.presets import GPUS, LINKS, Gpu, Shares, size_in_bytes

NEEDED = ("name", "memory", "bandwidth", "fp64", "fp32", "fp16", "host", "capability")
PREFIXES = {"": 1.0, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def is_file(word: str) -> bool:
    """Whether a word of `--gpu` means a file, and not a preset's name."""
    return word not in GPUS and (Path(word).suffix in (".json", ".toml") or "/" in word)


def read(path: str) -> Gpu:
    """The GPU that the file describes. Raises UserError, naming the file and the field."""
    values = _values(path)
    try:
        return _gpu(values)
    except UserError as error:
        raise UserError(f"--gpu {path}: {error}") from None


def _values(path: str) -> dict[str, Any]:
    """The fields of the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.endswith(".toml") else json.loads(text)
    except OSError as error:
        raise UserError(
            f"--gpu {path} cannot be read ({error.strerror}): give a preset's name, or a file "
            f"with the fields of a GPU."
        ) from None
    except ValueError as error:
        raise UserError(f"--gpu {path} is no JSON or TOML file: {error}.") from None
    if not isinstance(values, dict):
        raise UserError(f"--gpu {path} has no fields: give name, memory and so on.")
    return values


def _gpu(values: dict[str, Any]) -> Gpu:
    """The GPU with these fields of a file. Raises UserError for a wrong or missing one."""
    like = values.pop("like", None)
    if like is not None and like not in GPUS:
        hint = did_you_mean(like, GPUS) or f"use one of {', '.join(GPUS)}."
        raise UserError(f"like is {like!r}: {hint}")
    names = [field.name for field in fields(Gpu)]
    for name in values:
        if name not in names:
            hint = did_you_mean(name, names) or f"use {', '.join(names)} and like."
            raise UserError(f"there is no field {name!r}: {hint}")
    missing = [] if like else [name for name in NEEDED if name not in values]
    if missing:
        raise UserError(
            f"there is no {', '.join(missing)}: give each of them, or a preset's name as "
            f"`like`, whose figures are then taken."
        )
    base = GPUS[like] if like else None
    shares = values.pop("shares", None)
    read = {name: READ[name](name, value) for name, value in values.items()}
    if shares is not None:
        read["shares"] = _shares(shares, base and base.shares)
    if base is not None:
        return replace(base, **read)
    read.setdefault("tf32", read["fp32"])
    read.setdefault("bf16", read["capability"] >= (8, 0))
    return Gpu(**read)


def _rate(unit: str) -> Callable[[str, Any], float]:
    """Reads a figure with this unit; a number alone is without a prefix."""

    def read(name: str, value: Any) -> float:
        match = re.fullmatch(rf"(\d+\.?\d*|\.\d+) ?([MGTP]?){unit}", str(value))
        rate = 0.0
        if match:
            rate = float(match[1]) * PREFIXES[match[2]]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            rate = float(value)
        if not 0 < rate < float("inf"):
            raise UserError(f'{name} is {value!r}: give a figure such as "900 G{unit}".')
        return rate

    return read


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[^\s,](?:[^\n,]*[^\s,])?", value):
        raise UserError(f"{name} is {value!r}: give a text without commas.")
    return value


def _host(name: str, value: Any) -> str:
    if value not in LINKS:
        raise UserError(f"{name} is {value!r}: use one of {', '.join(LINKS)}.")
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name} is {value!r}: give true or false.")
    return value


def _capability(name: str, value: Any) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d)", str(value))
    if not match:
        raise UserError(f'{name} is {value!r}: give a compute capability such as "8.6".')
    return int(match[1]), int(match[2])


def _shares(values: Any, base: Shares | None) -> Shares:
    """The Shares of a file; what it does not give is from `base`. Raises UserError."""
    names = [field.name for field in fields(Shares)]
    if not isinstance(values, dict) or not set(values) <= set(names):
        raise UserError(f"shares is {values!r}: give a table with {', '.join(names)}.")
    merged = (asdict(base) if base else {}) | values
    missing = [name for name in names if name not in merged]
    if missing:
        raise UserError(
            f"shares has no {', '.join(missing)}: give each of them, or a preset as `like`."
        )
    for name, value in merged.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise UserError(f"shares.{name} is {value!r}: give a number.")
    return Shares(**merged)


READ: dict[str, Callable[[str, Any], Any]] = {
    "name": _name,
    "memory": lambda name, value: size_in_bytes(value),
    "bandwidth": _rate("B/s"),
    **dict.fromkeys(("fp64", "fp32", "tf32", "fp16"), _rate("FLOP/s")),
    "host": _host,
    "bf16": _switch,
    "capability": _capability,
}
