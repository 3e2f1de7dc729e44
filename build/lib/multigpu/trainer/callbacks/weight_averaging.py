"""Weight averaging: validate and end with the average of the training's weights."""

from __future__ import annotations

import itertools
import warnings
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from multigpu.trainer.callbacks.callback import Callback

if TYPE_CHECKING:
    from multigpu.trainer.module import LightningModule
    from multigpu.trainer.trainer import Trainer

# What AveragedModel puts before the names of the module's tensors.
PREFIX = "module."


class WeightAveraging(Callback):
    """Keep an average of the weights, by torch's AveragedModel.

    Each validation uses the average, and after training the module has it. `should_update`
    decides after which steps and epochs the average is updated.

    device        where the average is; None: where the module is when the run is set up
    use_buffers   whether buffers are averaged, too
    kwargs        more arguments of AveragedModel, such as avg_fn

    A checkpoint has the average in "state_dict", and the training's own weights in
    "current_model_state", as in Lightning.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        **kwargs: Any,
    ):
        self._device = torch.device(device) if isinstance(device, str) else device
        self._use_buffers = use_buffers
        self._keywords = kwargs
        self._average: AveragedModel | None = None
        # The number of steps, and the epoch, at the last update.
        self._latest_update_step = 0
        self._latest_update_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update the average after this step or this epoch, counted from 0.

        Only one of the two is given. The default is to update after each optimizer step.
        """
        return step_idx is not None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # The average needs the layers that these hooks make.
        pl_module.configure_sharded_model()
        pl_module.configure_model()
        self._average = AveragedModel(
            pl_module,
            device=pl_module.device if self._device is None else self._device,
            use_buffers=self._use_buffers,
            **self._keywords,
        )

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._average.update_parameters(pl_module)
            self._latest_update_step = step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._average.update_parameters(pl_module)
            self._latest_update_epoch = epoch

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._swap(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._swap(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for average, current in self._pairs(pl_module):
            current.data.copy_(average.data)

    def state_dict(self) -> dict[str, Any]:
        return {"latest_update_step": self._latest_update_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._latest_update_step = state_dict["latest_update_step"]

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        state = self._average.state_dict()
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            name.removeprefix(PREFIX): value
            for name, value in state.items()
            if name.startswith(PREFIX)
        }
        checkpoint["averaging_state"] = {
            name: value for name, value in state.items() if not name.startswith(PREFIX)
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        average = checkpoint["state_dict"]
        if "current_model_state" in checkpoint:
            state = {PREFIX + name: value for name, value in average.items()}
            self._average.load_state_dict(state | checkpoint["averaging_state"])
            pl_module.load_state_dict(checkpoint["current_model_state"])
            return
        warnings.warn(
            f"the checkpoint was written without {type(self).__name__}: the average begins "
            f"with its weights.",
            stacklevel=2,
        )
        self._average.module.load_state_dict(deepcopy(average), strict=False)

    def _pairs(self, pl_module: LightningModule) -> zip[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor of the average, with that of the module."""
        average = self._average.module
        return zip(
            itertools.chain(average.parameters(), average.buffers()),
            itertools.chain(pl_module.parameters(), pl_module.buffers()),
            strict=True,
        )

    def _swap(self, pl_module: LightningModule) -> None:
        for average, current in self._pairs(pl_module):
            before = average.data.clone()
            average.data.copy_(current.data)
            current.data.copy_(before)


class EMAWeightAveraging(WeightAveraging):
    """Keep an exponential moving average: decay · average + (1 − decay) · weights.

    decay                      the weight of the old average
    update_every_n_steps       update after every n-th optimizer step; 0: after no step
    update_starting_at_step    the first step, from 0, after which to update
    update_starting_at_epoch   also update after each epoch from this one on; None: after none
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(device, use_buffers, avg_fn=get_ema_avg_fn(decay), **kwargs)
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            every = self.update_every_n_steps
            due = every > 0 and step_idx % every == 0
            return due and step_idx >= (self.update_starting_at_step or 0)
        first = self.update_starting_at_epoch
        return first is not None and epoch_idx is not None and epoch_idx >= first
