"""LightningDataModule: the dataloaders of all stages, in a class separate from the model."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from multigpu.trainer.checkpointing.from_checkpoint import make_from_hyperparameters
from multigpu.trainer.checkpointing.hyperparameters import HyperparametersMixin
from multigpu.trainer.checkpointing.reading import read_checkpoint
from multigpu.trainer.hooks import DataHooks

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class LightningDataModule(DataHooks, HyperparametersMixin):
    """Override `setup` and the methods that return dataloaders."""

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state of this data module that a checkpoint stores."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> LightningDataModule:
        """Make a data module from data sets. Only the training data is shuffled.

        Each `…_dataset` is one data set, or a list or dict of data sets.

        `kwargs` are arguments of the class's __init__, which also gets batch_size and
        num_workers if it has parameters of these names.
        """
        datasets = {
            "train": train_dataset,
            "val": val_dataset,
            "test": test_dataset,
            "predict": predict_dataset,
        }
        accepted = inspect.signature(cls.__init__).parameters
        numbers = {"batch_size": batch_size, "num_workers": num_workers}
        takes_all = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
        passed_on = {
            name: number for name, number in numbers.items() if takes_all or name in accepted
        }
        datamodule = cls(**{**passed_on, **kwargs})
        for stage, dataset in datasets.items():
            if dataset is not None:
                shuffle = stage == "train"
                loader = partial(_loaders, dataset, shuffle, batch_size, num_workers)
                setattr(datamodule, f"{stage}_dataloader", loader)
        return datamodule

    @classmethod
    def from_argparse_args(cls, args: Namespace, **keywords: Any) -> LightningDataModule:
        """Make a data module of the parsed arguments that __init__ has, as in Lightning 1.x.

        `keywords` have precedence.
        """
        accepted = inspect.signature(cls.__init__).parameters
        values = {name: value for name, value in vars(args).items() if name in accepted}
        return cls(**{**values, **keywords})

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> LightningDataModule:
        """Make a data module with the hyperparameters and the state in the checkpoint.

        `kwargs` take precedence over the hyperparameters.
        """
        content = read_checkpoint(checkpoint_path, map_location or "cpu", weights_only)
        datamodule = make_from_hyperparameters(cls, content, checkpoint_path, kwargs)
        if cls.__qualname__ in content:
            datamodule.load_state_dict(content[cls.__qualname__])
        return datamodule

    def __str__(self) -> str:
        """The number of rows behind each dataloader, as in Lightning; None before `setup`."""
        names = {
            "Train": "train", "Validation": "val", "Test": "test", "Predict": "predict"
        }  # fmt: skip
        lines = (
            f"{{{label} dataloader: {_sizes(getattr(self, f'{name}_dataloader'))}}}"
            for label, name in names.items()
        )
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process has its own Trainer.
        return {**self.__dict__, "trainer": None}


def _sizes(make: Callable[[], Any]) -> str:
    """The rows of the data sets of the dataloaders that `make` returns, as text."""
    try:
        loaders = make()
    except Exception:  # the user's method needs what `setup` makes
        return "None"
    if isinstance(loaders, DataLoader):
        return f"size={_size(loaders)}"
    listed = loaders.values() if isinstance(loaders, Mapping) else loaders
    return " ; ".join(f"{n}. size={_size(loader)}" for n, loader in enumerate(listed, 1))


def _size(loader: DataLoader) -> int | str:
    return len(loader.dataset) if isinstance(loader.dataset, Sized) else "NA"


def _loaders(datasets: Any, shuffle: bool, batch_size: int, num_workers: int) -> Any:
    if isinstance(datasets, Mapping):
        return {
            name: _loaders(dataset, shuffle, batch_size, num_workers)
            for name, dataset in datasets.items()
        }
    if isinstance(datasets, (list, tuple)):
        return [_loaders(dataset, shuffle, batch_size, num_workers) for dataset in datasets]
    shuffle = shuffle and not isinstance(datasets, IterableDataset)
    return DataLoader(datasets, batch_size, shuffle, num_workers=num_workers)
