"""Moves a batch to its device, through the user's hooks if there are any."""

from typing import Any

import torch

from multigpu.trainer.datamodule import LightningDataModule
from multigpu.trainer.hooks import DataHooks, is_overridden
from multigpu.trainer.module import LightningModule
from multigpu.trainer.precision import Precision

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class BatchTransfer:
    """A callable that returns a batch on `device`, in the run's precision.

    hooks   the three HOOKS, each from the data module (if overridden there) or the module
    """

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        datamodule: LightningDataModule | None,
        module: LightningModule,
    ):
        self.device = device
        self.precision = precision
        self.hooks = [
            getattr(datamodule if is_overridden(name, datamodule, DataHooks) else module, name)
            for name in HOOKS
        ]

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        before, move, after = self.hooks
        batch = before(self.precision.convert_batch(batch), dataloader_idx)
        batch = move(batch, self.device, dataloader_idx)
        return after(batch, dataloader_idx)
