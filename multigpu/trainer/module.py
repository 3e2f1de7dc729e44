"""What does the user write? The model, the steps, the optimizer: no device, no rank, no loop."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.trainer.checkpointing.hyperparameters import HyperparametersMixin
from multigpu.trainer.hooks import ModuleHooks


class LightningModule(ModuleHooks, HyperparametersMixin, nn.Module):
    """Override `training_step` and `configure_optimizers`, and what else is needed.

    automatic_optimization   False: `training_step` calls `self.manual_backward` and the optimizers itself
    """

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"

    def __init__(self) -> None:
        super().__init__()
        self._automatic_optimization = True
        self.strict_loading = True
        self.example_input_array: Any = None
        self.__dict__["_trainer"] = None  # not a submodule, and cheap to read

    @property
    def automatic_optimization(
        self,
    ) -> bool:  # a property, so that a class may say `automatic_optimization = False`
        return self._automatic_optimization

    @automatic_optimization.setter
    def automatic_optimization(self, automatic: bool) -> None:
        self._automatic_optimization = automatic

    # ---- what the user writes -----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """(batch, batch_idx) → the loss, a dict with "loss", or None to skip the batch."""
        raise NotImplementedError

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """(batch, batch_idx) → what `Trainer.predict` gives back for the batch; by default `self(batch)`."""
        return self(args[0] if args else kwargs["batch"])

    def configure_optimizers(self) -> Any:
        """An optimizer; a list of them; (optimizers, schedulers); {"optimizer": …, "lr_scheduler": …, "monitor": …}; a
        list of such dicts; or None."""
        raise NotImplementedError

    def configure_callbacks(self) -> Any:
        return []

    # ---- what the user calls ------------------------------------------------------------------------------------

    def log(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None,
        on_epoch: bool | None = None, reduce_fx: Any = "mean", enable_graph: bool = False, sync_dist: bool = False,
        sync_dist_group: Any = None, add_dataloader_idx: bool = True, batch_size: int | None = None,
        metric_attribute: str | None = None, rank_zero_only: bool = False,
    ) -> None:  # fmt: skip
        """Keep a number for the loggers, the callbacks and the progress bar; see trainer/results.py.

        Within `training_step` the default is each step's value, elsewhere the epoch's, the mean weighted by batch size. The
        epoch's value is over all ranks, always; a step's is this rank's, or with sync_dist all ranks'.
        """
        if self._trainer is not None:
            self._trainer.results.log(
                name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, batch_size,
                rank_zero_only,
            )  # fmt: skip

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **keywords: Any) -> None:
        """`log` for each name and value; what follows is as there."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **keywords)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """On rank 0 alone."""
        (print if self._trainer is None else self._trainer.print)(*args, **kwargs)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them; their `step` counts, scales and calls hooks as the Trainer's own does."""
        steppers = self.trainer.steppers if use_pl_optimizer else self.trainer.optimizers
        return steppers[0] if len(steppers) == 1 else list(steppers)

    def lr_schedulers(self) -> Any:
        """The scheduler, the list of them, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """In the place of loss.backward() in manual optimization: a 16-bit loss must be scaled."""
        if self.automatic_optimization:
            raise UserError(
                "manual_backward is for manual optimization: set self.automatic_optimization = False."
            )
        self.trainer.run_backward(loss, *args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Tensors of all ranks, stacked: (ranks, …), in tuples, lists and dicts as they come. One rank: unchanged.

        group        only these ranks' (a torch.distributed group)
        sync_grads   gradients flow back to the rank whose tensor it is, summed over the ranks' losses
        """
        strategy = self.trainer.strategy
        if strategy.world.size == 1:
            return data
        if isinstance(data, Mapping):
            return {
                key: self.all_gather(value, group, sync_grads) for key, value in data.items()
            }
        if isinstance(data, (list, tuple)):
            parts = [self.all_gather(value, group, sync_grads) for value in data]
            return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
        tensor = torch.as_tensor(data, device=self.device)
        if self.trainer.evaluating is not None:
            self.trainer.evaluating.refuse_uneven(tensor)
        return strategy.all_gather(tensor, group, sync_grads)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Only this optimizer's parameters ask for gradients, until `untoggle_optimizer`."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.__dict__["_toggled"] = {p: p.requires_grad for p in self.parameters()}
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in mine)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        for parameter, before in self.__dict__.pop("_toggled", {}).items():
            parameter.requires_grad_(before)

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def freeze(self) -> None:
        """No gradients, and evaluation mode."""
        self.requires_grad_(False).eval()

    def unfreeze(self) -> None:
        self.requires_grad_(True).train()

    # ---- what the Trainer does unless it is overridden -----------------------------------------------------------

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """`optimizer_closure` computes loss and gradients: an override must hand it on."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad()

    def on_validation_model_zero_grad(self) -> None:
        """Before each validation within training: memory is freed. Only between two steps."""
        self.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step() if metric is None else scheduler.step(metric)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """To a norm over all of the optimizer's gradients, or each number to ± the value."""
        if not gradient_clip_val:
            return
        if not self.automatic_optimization and self._trainer is not None:
            # averaged first, then clipped
            self._trainer.strategy.synchronize(getattr(optimizer, "optimizer", optimizer))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if (gradient_clip_algorithm or "norm") == "norm":
            nn.utils.clip_grad_norm_(parameters, gradient_clip_val)
        else:
            nn.utils.clip_grad_value_(parameters, gradient_clip_val)

    # ---- where it is --------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Any:
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a `Trainer`.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.__dict__["_trainer"] = trainer

    @property
    def device(self) -> torch.device:
        """Where the first of its parameters or buffers is."""
        return next(
            (tensor.device for tensor in (*self.parameters(), *self.buffers())),
            torch.device("cpu"),
        )

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), torch.get_default_dtype())

    current_epoch = property(lambda self: self._trainer.current_epoch if self._trainer else 0)
    global_step = property(lambda self: self._trainer.global_step if self._trainer else 0)
    global_rank = property(lambda self: self._trainer.global_rank if self._trainer else 0)
    local_rank = property(lambda self: self._trainer.local_rank if self._trainer else 0)
    logger = property(lambda self: self._trainer.logger if self._trainer else None)
    loggers = property(lambda self: self._trainer.loggers if self._trainer else [])

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, map_location: Any = None, hparams_file: Any = None,
        strict: bool | None = None, weights_only: bool | None = None, **kwargs: Any,
    ) -> "LightningModule":  # fmt: skip
        """A module made with the hyperparameters in the checkpoint, overridden by `kwargs`, with its weights.

        Ours, and those of the real Lightning. weights_only=False reads any object, and so runs whatever code the file
        holds: for files that you trust. Raises UserError if the checkpoint does not fit this class.
        """
        from multigpu.trainer.checkpointing.checkpoint_io import construct, read

        checkpoint = read(checkpoint_path, map_location or "cpu", weights_only)
        return construct(cls, checkpoint, checkpoint_path, strict, kwargs)

    def __getstate__(self) -> dict:
        return {
            **self.__dict__,
            "_trainer": None,
        }  # a copy in another process has a Trainer of its own
