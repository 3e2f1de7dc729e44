"""Where do the batches of all stages come from? A class that can be handed on without the model."""

from typing import Any

from multigpu.trainer.hooks import DataHooks
from multigpu.trainer.hyperparameters import HyperparametersMixin


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

    def __getstate__(self) -> dict:
        return {**self.__dict__, "trainer": None}
