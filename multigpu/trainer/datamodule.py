"""LightningDataModule: the dataloaders of all stages, in a class separate from the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multigpu.trainer.hooks import DataHooks
from multigpu.trainer.hyperparameters import HyperparametersMixin
from multigpu.trainer.refused import refused_method

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class LightningDataModule(DataHooks, HyperparametersMixin):
    """Override `setup` and the methods that return dataloaders."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state of this data module that a checkpoint stores."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    from_datasets = staticmethod(refused_method("from_datasets"))
    from_argparse_args = staticmethod(refused_method("from_argparse_args"))

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process has its own Trainer.
        return {**self.__dict__, "trainer": None}
