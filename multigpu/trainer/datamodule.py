"""Where do the batches of all stages come from? A class that can be handed on without the model."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from multigpu.trainer.checkpointing.hyperparameters import HyperparametersMixin
from multigpu.trainer.hooks import DataHooks


class LightningDataModule(DataHooks, HyperparametersMixin):
    """Override `setup` and the dataloaders."""

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Any = None

    def state_dict(self) -> dict[str, Any]:
        """What the checkpoint shall keep of it."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    @classmethod
    def from_datasets(
        cls, train_dataset: Any = None, val_dataset: Any = None, test_dataset: Any = None, predict_dataset: Any = None,
        batch_size: int = 1, num_workers: int = 0, **kwargs: Any,
    ) -> "LightningDataModule":  # fmt: skip
        """One whose dataloaders are made of these data sets, each one or a list; only the training's is shuffled."""
        given = {
            "train": train_dataset,
            "val": val_dataset,
            "test": test_dataset,
            "predict": predict_dataset,
        }
        datamodule = cls(**kwargs)
        for stage, datasets in given.items():
            if datasets is not None:
                loaders = partial(
                    _loaders, datasets, stage == "train", batch_size, num_workers
                )
                setattr(datamodule, f"{stage}_dataloader", loaders)
        return datamodule

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> "LightningDataModule":
        """One made with the hyperparameters in the checkpoint, overridden by `kwargs`, in the state that it kept."""
        from multigpu.trainer.checkpointing.checkpoint_io import made, read

        content = read(checkpoint_path, map_location or "cpu", weights_only)
        datamodule = made(cls, content, checkpoint_path, kwargs)
        if cls.__qualname__ in content:
            datamodule.load_state_dict(content[cls.__qualname__])
        return datamodule

    def __getstate__(self) -> dict:
        return {**self.__dict__, "trainer": None}


def _loaders(datasets: Any, shuffle: bool, batch_size: int, workers: int) -> Any:
    if isinstance(datasets, Mapping):
        return {
            name: _loaders(dataset, shuffle, batch_size, workers)
            for name, dataset in datasets.items()
        }
    if isinstance(datasets, (list, tuple)):
        return [_loaders(dataset, shuffle, batch_size, workers) for dataset in datasets]
    shuffle = shuffle and not isinstance(datasets, IterableDataset)
    return DataLoader(datasets, batch_size, shuffle, num_workers=workers)
