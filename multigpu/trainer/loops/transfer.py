"""How does a batch come to its device? Through the user's hooks, if there are any."""

from typing import Any

from multigpu.trainer.hooks import DataHooks, overridden, to_device

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def own_transfer(datamodule: Any, module: Any) -> list | None:
    """The three hooks, each from whoever has written it, the data module first; None if nobody has written any."""
    owners = [
        next((o for o in (datamodule, module) if overridden(name, o, DataHooks)), None)
        for name in HOOKS
    ]
    if not any(owners):
        return None
    return [getattr(owner or module, name) for name, owner in zip(HOOKS, owners, strict=True)]


def transfer(trainer: Any, batch: Any, loader: int = 0) -> Any:
    """The batch on this rank's device, in the run's numbers."""
    if not trainer.precision_plugin.plain:
        batch = trainer.precision_plugin.convert_batch(batch)
    device = trainer.strategy.device
    if trainer.own_transfer is None:
        return (
            batch if device.type == "cpu" else to_device(batch, device)
        )  # a dataloader's batches are on the CPU
    before, move, after = trainer.own_transfer
    return after(move(before(batch, loader), device, loader), loader)
