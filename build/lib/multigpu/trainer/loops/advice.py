"""Warnings about settings that work, but probably not as the user wants."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from multigpu import devices
from multigpu.trainer.defaults import LOG_EVERY_N_STEPS
from multigpu.trainer.loops.results import Results

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer

# Data sets whose rows are in memory already.
IN_MEMORY = (TensorDataset, list, tuple, range)


def on_workers(trainer: "Trainer", name: str, loaders: Iterable[Any]) -> None:
    """Warn if one process reads the data while other cores are free.

    name   "train", "val", "test" or "predict"

    Unlike Lightning, it does not warn about rows that are in memory, which a worker would only
    copy, nor on virtual GPUs, whose computations need the cores.
    """
    cores = devices.available_cores() // trainer.strategy.world.local_size
    if cores <= 2 or trainer.strategy.device.type == "vgpu":
        return
    for loader in loaders:
        if isinstance(loader, DataLoader) and loader.num_workers < 2 and _reads(loader):
            trainer.state.warn_once(
                f"The '{name}_dataloader' does not have many workers, so reading the data can "
                f"take longer than the steps: try DataLoader(num_workers={cores - 1})."
            )


def _reads(loader: DataLoader) -> bool:
    """Whether the loader's rows may come from a disk.

    False for a stream, because each worker would repeat its data.
    """
    dataset = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return not isinstance(dataset, (IterableDataset, *IN_MEMORY))


def on_log_interval(trainer: "Trainer", batches: float) -> None:
    """Warn if log_every_n_steps, given by the user, is above the batches of an epoch."""
    every = trainer.log_every_n_steps
    chosen = every != LOG_EVERY_N_STEPS and not trainer.fast_dev_run
    if trainer.loggers and chosen and 0 < batches < every:
        trainer.state.warn_once(
            f"The number of training batches ({batches}) is smaller than the logging interval "
            f"Trainer(log_every_n_steps={every}): no step of the first epoch is logged."
        )


def on_missing_logger(trainer: "Trainer", results: Results) -> None:
    """Warn if self.log(…, logger=True) was called and the Trainer has no logger."""
    if trainer.loggers:
        return
    for entry in results.entries.values():
        if entry.wants_logger:
            trainer.state.warn_once(
                f"You called `self.log({entry.name!r}, ..., logger=True)` but have no logger: "
                f"leave out logger=True, or the Trainer's logger=False."
            )
