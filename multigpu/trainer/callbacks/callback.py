"""The base class of callbacks: one method per event of a run.

The methods have the names and arguments of Lightning's. A callback that was written for
Lightning therefore works with this Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from multigpu.errors import UserError

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class Callback:
    """A base class whose methods do nothing; override those that you need.

    The Trainer calls them on every rank. `trainer` is the Trainer, `pl_module` the
    LightningModule, `stage` "fit", "validate", "test" or "predict". `outputs` is what the step
    returned; after a training batch it is a dict with the key "loss".
    """

    # True for callbacks that decide by metrics: their on_train_epoch_end is called after the
    # module's, when what it logged is reduced over all ranks.
    monitors = False
    # True for callbacks that write checkpoints: they are called last, because they save what
    # the others have changed.
    saves = False
    # The Trainer of the last run. `self.log` needs it.
    _trainer: Trainer | None = None

    def log(self, name: str, value: Any, *args: Any, **keywords: Any) -> None:
        """Record a number, as LightningModule.log does with the same arguments.

        It works in the hooks in which the module can log. Raises UserError outside of a run.
        """
        if self._trainer is None:
            raise UserError(
                f"{type(self).__name__}: self.log({name!r}) works only in a hook, while the "
                f"Trainer runs: call it there."
            )
        self._trainer.lightning_module.log(name, value, *args, **keywords)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **keywords: Any) -> None:
        """Call `log` for each name and value, with the same other arguments."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **keywords)

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint; each callback needs its own."""
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:
        """A key made of the class's name and these arguments, in Lightning's format."""
        return f"{type(self).__qualname__}{kwargs!r}"

    def state_dict(self) -> dict[str, Any]:
        """This callback's state, which checkpoints contain."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def setup(self, trainer, pl_module, stage): ...
    def teardown(self, trainer, pl_module, stage): ...

    def on_fit_start(self, trainer, pl_module): ...
    def on_fit_end(self, trainer, pl_module): ...
    def on_sanity_check_start(self, trainer, pl_module): ...
    def on_sanity_check_end(self, trainer, pl_module): ...

    def on_train_start(self, trainer, pl_module): ...
    def on_train_end(self, trainer, pl_module): ...
    def on_train_epoch_start(self, trainer, pl_module): ...
    def on_train_epoch_end(self, trainer, pl_module): ...
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx): ...
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx): ...

    def on_validation_start(self, trainer, pl_module): ...
    def on_validation_end(self, trainer, pl_module): ...
    def on_validation_epoch_start(self, trainer, pl_module): ...
    def on_validation_epoch_end(self, trainer, pl_module): ...
    def on_validation_batch_start(
        self, trainer, pl_module, batch, batch_idx, dataloader_idx=0
    ): ...
    def on_validation_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ): ...

    def on_test_start(self, trainer, pl_module): ...
    def on_test_end(self, trainer, pl_module): ...
    def on_test_epoch_start(self, trainer, pl_module): ...
    def on_test_epoch_end(self, trainer, pl_module): ...
    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0): ...
    def on_test_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ): ...

    def on_predict_start(self, trainer, pl_module): ...
    def on_predict_end(self, trainer, pl_module): ...
    def on_predict_epoch_start(self, trainer, pl_module): ...
    def on_predict_epoch_end(self, trainer, pl_module): ...
    def on_predict_batch_start(
        self, trainer, pl_module, batch, batch_idx, dataloader_idx=0
    ): ...
    def on_predict_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ): ...

    def on_before_backward(self, trainer, pl_module, loss): ...
    def on_after_backward(self, trainer, pl_module): ...
    def on_before_optimizer_step(self, trainer, pl_module, optimizer): ...
    def on_before_zero_grad(self, trainer, pl_module, optimizer): ...

    def on_exception(self, trainer, pl_module, exception):
        """Called before the Trainer raises `exception`, also if it is a KeyboardInterrupt."""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        """Called before `checkpoint` is written. Add items that it should also contain."""

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        """Called after a checkpoint was read, with all of its contents."""
