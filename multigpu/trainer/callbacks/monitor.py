"""The metric that ModelCheckpoint and EarlyStopping monitor: its mode and its value."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from multigpu.errors import UserError, did_you_mean

IS_BETTER = {"min": torch.lt, "max": torch.gt}
WORST = {"min": float("inf"), "max": -float("inf")}


def check_mode(mode: str, callback: str) -> str:
    """Return `mode`. Raises UserError if it is not "min" or "max"."""
    if mode not in IS_BETTER:
        raise UserError(
            f"{callback}(mode={mode!r}): "
            "expected 'min' (lower is better) or 'max' (higher is better)."
        )
    return mode


def missing_metric(monitor: str, names: Iterable[str], callback: str) -> UserError:
    """Return the error for a metric that was not logged. `names` are the logged metrics."""
    logged = ", ".join(sorted(names)) or "none"
    hint = did_you_mean(monitor, names) or (
        f"call self.log({monitor!r}, …) before {callback} reads it."
    )
    return UserError(
        f"{callback}(monitor={monitor!r}): there is no such metric; the metrics are {logged}: "
        f"{hint}"
    )


def to_score(value: Any) -> Tensor:
    """A metric as a tensor of shape () on the CPU. Comparing it needs no copy from the GPU."""
    return torch.as_tensor(value).detach().squeeze().cpu().clone()
