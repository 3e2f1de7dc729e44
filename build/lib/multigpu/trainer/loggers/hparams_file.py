"""hparams.yaml: a run's hyperparameters, which yaml.safe_load and Lightning can read."""

import warnings
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import yaml

from multigpu.files import atomic


class HparamsDumper(yaml.SafeDumper):
    """A yaml.SafeDumper that first converts common objects to plain values."""

    def represent_data(self, data: Any) -> yaml.Node:
        return super().represent_data(_to_plain(data))


def write_hparams(path: str | Path, hparams: Mapping[str, Any]) -> None:
    """Write the hyperparameters as YAML, sorted by name.

    Numbers, strings, None, dates, lists, dicts and sets are not converted. Tuples become
    lists, Enums become their names, and paths become strings. Namespaces and dataclasses
    become dicts. Tensors and NumPy values of shape () become numbers. Other values are left
    out with a warning, as in Lightning.
    """
    writable = {}
    for name, value in hparams.items():
        try:
            yaml.dump(value, Dumper=HparamsDumper)
        except (yaml.YAMLError, TypeError, ValueError):
            kind = type(value).__name__
            warnings.warn(
                f"hparams.yaml leaves out {name!r}: YAML cannot hold a value of type {kind}.",
                stacklevel=2,
            )
        else:
            writable[name] = value
    with atomic(path) as temporary:
        temporary.write_text(yaml.dump(writable, Dumper=HparamsDumper), encoding="utf-8")


def _to_plain(value: Any) -> Any:
    """The value as one of the exact types that SafeDumper accepts, if that is possible."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Namespace):
        return vars(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, torch.Tensor | np.generic) and value.shape == ():
        return value.item()
    if isinstance(value, Mapping):
        return value if type(value) is dict else dict(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, frozenset):
        return set(value)
    # SafeDumper raises an error for subclasses of these types.
    for kind in (list, str, int, float):
        if isinstance(value, kind) and type(value) not in (kind, bool):
            return kind(value)
    return value
