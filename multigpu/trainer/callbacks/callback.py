"""Where can code of one's own stand in a run? In a callback: a method for every moment of the run.

The moments have Lightning's names and arguments, so that a callback written for Lightning runs here.
"""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class Callback:
    """A base class whose methods do nothing; write those that you need.

    The Trainer calls them on every rank. `trainer` is the Trainer, `pl_module` the LightningModule.
    `stage` is "fit", "validate", "test" or "predict".
    """

    @property
    def state_key(self) -> str:
        """The name under which a checkpoint keeps this callback's state. Two callbacks of one class need two names."""
        return type(self).__qualname__

    def _generate_state_key(self, **which: Any) -> str:
        return f"{type(self).__qualname__}{which!r}"

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None: ...
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None: ...

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_train_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None: ...

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """`outputs` is what training_step returned."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    def on_test_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_test_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_test_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_predict_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_predict_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_predict_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None: ...
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None: ...
    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Optimizer
    ) -> None: ...
    def on_before_zero_grad(
        self, trainer: Any, pl_module: Any, optimizer: Optimizer
    ) -> None: ...

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Called before an exception leaves the Trainer. KeyboardInterrupt is one."""

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Called before `checkpoint` is written: add to it what you want to keep."""

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Called with the whole checkpoint that was read."""
