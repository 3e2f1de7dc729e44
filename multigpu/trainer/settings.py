"""The Trainer's arguments that its loops read, checked and completed."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigpu.errors import UserError

LIMITS = (
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
)
# What None means.
DEFAULTS = {
    "precision": "32-true",
    "max_steps": -1,
    "val_check_interval": 1.0,
    "num_sanity_val_steps": 2,
    "log_every_n_steps": 50,
}
# The whole numbers, and the least that each can be.
LEAST = {
    "max_epochs": -1,
    "min_epochs": -1,
    "max_steps": -1,
    "min_steps": -1,
    "accumulate_grad_batches": 1,
    "log_every_n_steps": 0,  # never
    "check_val_every_n_epoch": 1,
    "fast_dev_run": 0,
}


@dataclass(kw_only=True, eq=False)
class Settings:
    """The arguments of the same names; the Trainer is a Settings, so they are its attributes.

    Users can change them between runs (trainer.max_epochs = 20), and callbacks can change them
    during a run. Raises UserError for a number that is out of range.
    """

    precision: str | int | None = None
    fast_dev_run: int | bool = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int | None = -1
    min_steps: int | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: float | None = None
    log_every_n_steps: int | None = None
    enable_model_summary: bool | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: bool | str | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    default_root_dir: str | Path | None = None

    def __post_init__(self) -> None:
        """Replace None by the defaults, check the numbers, and apply fast_dev_run."""
        for name, default in DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        if self.fast_dev_run in (0, 1):  # True and 1 mean the same
            self.fast_dev_run = bool(self.fast_dev_run)
        if self.num_sanity_val_steps == -1:  # all batches
            self.num_sanity_val_steps = float("inf")
        self.default_root_dir = os.path.expanduser(self.default_root_dir or os.getcwd())
        self._check_numbers()
        if self.fast_dev_run:
            batches = int(self.fast_dev_run)
            self.max_epochs = 1
            self.max_steps = batches
            for name in LIMITS:
                setattr(self, name, batches)
            self.num_sanity_val_steps = 0
            self.val_check_interval = 1.0
            self.check_val_every_n_epoch = 1
        if self.overfit_batches:
            self.limit_train_batches = self.overfit_batches
            self.limit_val_batches = self.overfit_batches

    def _check_numbers(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, bool) or value < least):
                limit = ", or -1 for no limit" if least == -1 else ""
                raise UserError(
                    f"{name} is {value!r}: expected a whole number from {max(0, least)} "
                    f"up{limit}."
                )
        for name in (*LIMITS, "overfit_batches", "val_check_interval"):
            self._check_batches(name, getattr(self, name))
        if self.check_val_every_n_epoch is None and type(self.val_check_interval) is not int:
            raise UserError(
                "check_val_every_n_epoch=None counts batches across epochs: "
                "give val_check_interval as a number of batches."
            )

    def _check_batches(self, name: str, value: Any) -> None:
        """Raises UserError unless `value` is a number of batches, a fraction, or None."""
        if value is None:
            return
        is_number = type(value) in (int, float) and value >= 0
        too_large = type(value) is float and value > 1
        never = value == 0 and name == "val_check_interval"
        if not is_number or too_large or never:
            raise UserError(
                f"{name} is {value!r}: expected a number of batches, or a fraction from "
                f"0.0 to 1.0."
            )

    def validates_in(self, epoch: int) -> bool:
        """Whether check_val_every_n_epoch lets this epoch validate."""
        every = self.check_val_every_n_epoch
        return every is None or (epoch + 1) % every == 0

    def batches_between_validations(self, epoch: float, validates: bool) -> float:
        """val_check_interval as a number of batches; infinity: validate at the epoch's end.

        epoch   batches per epoch; val_check_interval can be a fraction of this number
        """
        interval = self.val_check_interval
        if type(interval) is int:
            if validates and self.check_val_every_n_epoch is not None and interval > epoch:
                raise UserError(
                    f"val_check_interval={interval}, but an epoch has {epoch} batches: give "
                    f"at most {epoch}, or check_val_every_n_epoch=None to count across epochs."
                )
            return interval
        if epoch == float("inf"):
            if validates and interval != 1.0:
                raise UserError(
                    f"val_check_interval={interval} is a fraction, but the dataloader has no "
                    f"length: give a whole number."
                )
            return epoch
        return max(1, int(epoch * interval))
