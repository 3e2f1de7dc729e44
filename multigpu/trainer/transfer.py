"""Moves a batch to its device, through the user's hooks if there are any."""

from typing import Any

import torch

from multigpu.trainer.datamodule import LightningDataModule
from multigpu.trainer.hooks import DataHooks, is_overridden, to_device
from multigpu.trainer.module import LightningModule
from multigpu.trainer.precision import Precision

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class BatchTransfer:
    """A callable that returns a batch on `device`, in the run's precision.

    hooks   the three HOOKS, each from the data module (if overridden there) or the module;
            None if neither overrides any
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
        of_data = [is_overridden(name, datamodule, DataHooks) for name in HOOKS]
        of_module = [is_overridden(name, module, DataHooks) for name in HOOKS]
        self.hooks = None
        if any(of_data) or any(of_module):
            self.hooks = [
                getattr(datamodule if first else module, name)
                for name, first in zip(HOOKS, of_data, strict=True)
            ]

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        batch = self.precision.convert_batch(batch)
        if self.hooks is None:  # a dataloader's batches are on the CPU
            return batch if self.device.type == "cpu" else to_device(batch, self.device)
        before, move, after = self.hooks
        batch = before(batch, dataloader_idx)
        batch = move(batch, self.device, dataloader_idx)
        return after(batch, dataloader_idx)
