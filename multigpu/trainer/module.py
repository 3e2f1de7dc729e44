"""LightningModule: the user's model, steps and optimizers, without devices, ranks or loops."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero
from multigpu.nested import map_tensors
from multigpu.trainer import checkpoint_io
from multigpu.trainer.hooks import ModuleHooks
from multigpu.trainer.hyperparameters import HyperparametersMixin, make_from_hyperparameters
from multigpu.trainer.refused import refuse_arguments, refused_method
from multigpu.trainer.results import LogArguments

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer

CLIPPING = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}


class LightningModule(ModuleHooks, HyperparametersMixin, nn.Module):
    """Override `training_step`, `configure_optimizers`, and other methods as needed.

    automatic_optimization   False: `training_step` itself calls `self.manual_backward` and
                             steps the optimizers
    """

    automatic_optimization: bool = True

    def __init__(self) -> None:
        super().__init__()
        # In __dict__, because nn.Module.__setattr__ is slow. `_log_context` says which hook
        # runs.
        self.__dict__["_trainer"] = None
        self.__dict__["_log_context"] = None

    # ---- what the user writes ---------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of (batch, batch_idx).

        Return the loss, a dict with "loss", or None to skip the batch.
        """
        raise NotImplementedError

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """For (batch, batch_idx), return what `Trainer.predict` returns for the batch.

        The default is `self(batch)`.
        """
        return self(args[0] if args else kwargs["batch"])

    def configure_optimizers(self) -> Any:
        """Return one of these: an optimizer; a list of optimizers; (optimizers, schedulers);
        {"optimizer": …, "lr_scheduler": …, "monitor": …}; a list of such dicts; None.
        """
        raise NotImplementedError

    # ---- what the user calls ----------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        **refused: Any,
    ) -> None:
        """Record a number for the loggers, the callbacks and the progress bar; see
        results.py.

        The default in a training batch is to report the value of each step. Elsewhere, the
        default is the epoch's mean, weighted by batch size. An epoch's value is reduced over
        all ranks. A step's value is this rank's; with sync_dist it is reduced over all ranks,
        and all ranks must log it in the same steps.

        Without a Trainer it only warns, so that steps can be called in tests. Raises
        UserError in a module that is a part of the module that is trained. enable_graph has
        no effect.
        """
        if refused:
            refuse_arguments("self.log", refused)
        context = self._log_context
        if context is None:
            self._log_outside(name)
            return
        arguments = LogArguments(
            prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx
        )
        context.results.log(context, name, value, arguments, batch_size)

    def _log_outside(self, name: str) -> None:
        """Warn that the value is lost: nothing trains this module.

        Raises UserError, as Lightning does, if it is a part of the module that is trained.
        """
        call = f"self.log({name!r}) in {type(self).__name__}"
        outer = self._trainer and self._trainer.lightning_module
        if outer is not None:
            raise UserError(
                f"{call}, which is a part of {type(outer).__name__}: return the value to that "
                f"module, and log it there."
            )
        if is_rank_zero():
            warnings.warn(f"{call}: no Trainer runs it, so the value is lost.", stacklevel=3)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **keywords: Any) -> None:
        """Call `log` for each name and value, with the same other arguments."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **keywords)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        print_function = print if self._trainer is None else self._trainer.print
        print_function(*args, **kwargs)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of optimizers.

        Their `step` also counts the step, unscales the gradients and calls hooks, as automatic
        optimization does; with use_pl_optimizer=False it does none of this.
        """
        run = self.trainer.run
        optimizers = run.lightning_optimizers if use_pl_optimizer else run.optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def lr_schedulers(self) -> Any:
        """The scheduler, the list of schedulers, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run loss.backward() in manual optimization: scale the loss for 16-mixed, prepare the
        strategy, and call the hooks.
        """
        if self.automatic_optimization:
            raise UserError(
                "manual_backward is for manual optimization: set self.automatic_optimization "
                "= False."
            )
        self.trainer.run.fit_loop.step.backward(loss, *args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather a tensor of all ranks, stacked to the shape (ranks, …).

        In tuples, lists and dicts, each tensor is gathered. With one rank, `data` is returned
        unchanged.

        group        gather from these ranks only (a torch.distributed group)
        sync_grads   True: in backward, the rank that gave a tensor gets its gradient, the sum
                     of the gradients from all ranks' losses
        """
        strategy = self.trainer.strategy
        if strategy.world.size == 1:
            return data

        def gather(value: Any) -> torch.Tensor:
            tensor = torch.as_tensor(value, device=self.device)
            evaluation = self.trainer.run.evaluation
            if evaluation is not None:
                evaluation.check_all_gather(tensor, self._log_context.hook)
            return strategy.all_gather(tensor, group, sync_grads)

        return map_tensors(data, gather, gather)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Freeze what only other optimizers hold, until `untoggle_optimizer`.

        Parameters that no optimizer holds stay as they are.
        """
        parameters = {p for group in optimizer.param_groups for p in group["params"]}
        held = {
            parameter: parameter.requires_grad
            for other in self.trainer.optimizers
            for group in other.param_groups
            for parameter in group["params"]
        }
        self.__dict__["_toggled"] = held
        for parameter in held.keys() - parameters:
            parameter.requires_grad_(False)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        for parameter, before in self.__dict__.pop("_toggled", {}).items():
            parameter.requires_grad_(before)

    def freeze(self) -> "LightningModule":
        """Turn off all gradients, and set evaluation mode. Returns the module."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> "LightningModule":
        """Turn on all gradients, and set training mode. Returns the module."""
        return self.requires_grad_(True).train()

    # ---- what the Trainer does unless it is overridden --------------------------------------

    def init_ddp_connection(self, global_rank: int, world_size: int) -> None:
        """Start the process group: an override is called instead of the strategy's method."""
        strategy = self.trainer.strategy
        type(strategy).init_dist_connection(strategy)

    def configure_ddp(self, model: nn.Module, device_ids: list[int] | None) -> nn.Module:
        """Return `model` in DDP: an override is called instead of the strategy's method."""
        strategy = self.trainer.strategy
        return type(strategy).configure_ddp(strategy, model, device_ids)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Step the optimizer. An override must pass `optimizer_closure` to `optimizer.step`,
        because the closure computes the loss and the gradients.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step() if metric is None else scheduler.step(metric)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.clip_gradients(
            optimizer,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
        )

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Limit the norm of all gradients together ("norm"), or clamp each number to ± the
        value ("value").

        The defaults are the Trainer's arguments. In manual optimization, the gradients are
        first averaged over the ranks.
        """
        trainer = self._trainer
        if trainer is not None:
            if gradient_clip_val is None:
                gradient_clip_val = trainer.gradient_clip_val
            gradient_clip_algorithm = (
                gradient_clip_algorithm or trainer.gradient_clip_algorithm
            )
        if not gradient_clip_val:
            return
        if not self.automatic_optimization and trainer is not None:
            trainer.strategy.synchronize(getattr(optimizer, "optimizer", optimizer))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        clip = CLIPPING.get(gradient_clip_algorithm or "norm")
        if clip is None:
            raise UserError(
                f"clip_gradients(gradient_clip_algorithm={gradient_clip_algorithm!r}): "
                f"expected 'norm' or 'value'."
            )
        clip(parameters, gradient_clip_val)

    to_torchscript = refused_method("to_torchscript")
    to_onnx = refused_method("to_onnx")

    # ---- where it runs ----------------------------------------------------------------------

    @property
    def trainer(self) -> "Trainer":
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a `Trainer`.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: "Trainer | None") -> None:
        # A LightningModule that is a part of this one has the same Trainer.
        for part in self.modules():
            if isinstance(part, LightningModule):
                part.__dict__["_trainer"] = trainer
                part.__dict__["_log_context"] = None

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; the CPU if there is none."""
        return next(
            (tensor.device for tensor in (*self.parameters(), *self.buffers())),
            torch.device("cpu"),
        )

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), torch.get_default_dtype())

    def _of_trainer(self, name: str, otherwise: Any) -> Any:
        return otherwise if self._trainer is None else getattr(self._trainer, name)

    current_epoch = property(lambda self: self._of_trainer("current_epoch", 0))
    global_step = property(lambda self: self._of_trainer("global_step", 0))
    global_rank = property(lambda self: self._of_trainer("global_rank", 0))
    local_rank = property(lambda self: self._of_trainer("local_rank", 0))
    logger = property(lambda self: self._of_trainer("logger", None))
    loggers = property(lambda self: self._of_trainer("loggers", []))

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> "LightningModule":
        """Make a module with the checkpoint's hyperparameters, and load the weights.

        `kwargs` take precedence over the hyperparameters. The checkpoint can be this
        Trainer's or Lightning's. weights_only=False reads any object, which can run code from
        the file: use it only for files that you trust. Raises UserError if the checkpoint does
        not fit this class.
        """
        refuse_arguments("load_from_checkpoint", {"hparams_file": hparams_file})
        content = checkpoint_io.read(checkpoint_path, map_location or "cpu", weights_only)
        module = make_from_hyperparameters(cls, content, checkpoint_path, kwargs)
        module.on_load_checkpoint(content)
        checkpoint_io.load_weights(module, content, checkpoint_path, strict)
        return module

    def __getstate__(self) -> dict[str, Any]:
        """The state without the Trainer: a copy in another process has its own Trainer."""
        return {**self.__dict__, "_trainer": None, "_log_context": None}
