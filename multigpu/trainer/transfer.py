"""Moves a batch to its device, through the user's hooks if there are any."""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.trainer.datamodule import LightningDataModule
from multigpu.trainer.hooks import DataHooks, is_overridden, to_device
from multigpu.trainer.module import LightningModule
from multigpu.trainer.precision import Precision

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class BatchTransfer:
    """A callable that returns a batch on `device`, in the run's precision.

    __init__ looks up once which hooks the user has overridden.
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
        self.hooks = transfer_hooks(datamodule, module)
        # A dataloader's batches are on the CPU.
        self.nothing_to_do = precision.plain and self.hooks is None and device.type == "cpu"

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        if self.nothing_to_do:
            return batch
        if not self.precision.plain:
            batch = self.precision.convert_batch(batch)
        if self.hooks is None:
            return batch if self.device.type == "cpu" else to_device(batch, self.device)
        before, move, after = self.hooks
        batch = before(batch, dataloader_idx)
        batch = move(batch, self.device, dataloader_idx)
        return after(batch, dataloader_idx)


def transfer_hooks(
    datamodule: LightningDataModule | None, module: LightningModule
) -> list[Callable[..., Any]] | None:
    """Return the three HOOKS, each from the data module (if overridden there) or the module.

    Returns None if neither overrides any hook.
    """
    owners = [
        next(
            (owner for owner in (datamodule, module) if is_overridden(name, owner, DataHooks)),
            None,
        )
        for name in HOOKS
    ]
    if not any(owner is not None for owner in owners):
        return None
    return [
        getattr(module if owner is None else owner, name)
        for name, owner in zip(HOOKS, owners, strict=True)
    ]
