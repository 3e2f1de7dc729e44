"""How does a batch come to its device? Through the user's hooks, if there are any."""

from typing import Any

from multigpu.trainer.hooks import DataHooks, to_device

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def own_transfer(*things: Any) -> Any:
    """The first of `things` whose class has such hooks of its own; None if no one has."""
    for thing in things:
        if thing is not None and any(getattr(type(thing), name) is not getattr(DataHooks, name) for name in HOOKS):
            return thing
    return None


def transfer(trainer: Any, batch: Any, loader: int = 0) -> Any:
    """The batch on this rank's device, in the run's numbers."""
    if not trainer.precision_plugin.plain:
        batch = trainer.precision_plugin.convert_batch(batch)
    source = trainer.own_transfer
    if source is None:
        device = trainer.strategy.device
        return batch if device.type == "cpu" else to_device(batch, device)  # a dataloader's batches are on the CPU
    batch = source.on_before_batch_transfer(batch, loader)
    batch = source.transfer_batch_to_device(batch, trainer.strategy.device, loader)
    return source.on_after_batch_transfer(batch, loader)
