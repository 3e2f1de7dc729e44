"""Which metric does a callback watch, and which way is better? Asked by ModelCheckpoint and EarlyStopping."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from multigpu.errors import UserError, did_you_mean

BETTER = {"min": torch.lt, "max": torch.gt}
WORST = {"min": float("inf"), "max": -float("inf")}


def checked_mode(mode: str, who: str) -> str:
    """`mode`, if it is "min" or "max". Raises UserError otherwise."""
    if mode not in BETTER:
        raise UserError(
            f"{who}(mode={mode!r}): the mode is 'min' (lower is better) or 'max' (higher is better)."
        )
    return mode


def missing(monitor: str, names: Iterable[str], who: str) -> UserError:
    """The error that says that nobody logged `monitor`; `names` are the metrics that exist."""
    names = sorted(names)
    near = did_you_mean(monitor, names)
    have = f"the metrics are {', '.join(names)}" if names else "no metric was logged yet"
    hint = near or f"call self.log({monitor!r}, ...) in the LightningModule."
    if monitor.startswith(("val", "test")) and f"'{monitor[:3]}" not in near:
        hint = f"log it in validation_step, and let a validation run before it is asked for ({who} asks after each epoch)."
    return UserError(f"{who}(monitor={monitor!r}): there is no such metric; {have}: {hint}")


def score(value: Any) -> Tensor:
    """A metric as a tensor without shape, on the CPU: comparing it then costs one copy from the GPU, not several."""
    return torch.as_tensor(value).detach().squeeze().cpu().clone()
