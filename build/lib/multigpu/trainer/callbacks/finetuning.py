"""Freeze parts of a model at first, and train them from some epoch on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from multigpu.errors import UserError, pluralize
from multigpu.trainer.callbacks.callback import Callback

if TYPE_CHECKING:
    from multigpu.trainer.module import LightningModule
    from multigpu.trainer.trainer import Trainer

Modules = nn.Module | Iterable


class BaseFinetuning(Callback):
    """Override `freeze_before_training` and `finetune_function`.

    configure_optimizers must give the optimizer only the parameters that require gradients:
    `unfreeze_and_add_param_group` adds the others as a new group. The learning rate of a
    group that is added later does not follow a scheduler's earlier steps.
    """

    def __init__(self) -> None:
        # Optimizer's index → its groups, with names in place of parameters.
        self._groups: dict[int, list[dict[str, Any]]] = {}
        self._resumes = False

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """Called before configure_optimizers: call `self.freeze(pl_module.part)` here."""
        raise NotImplementedError

    def finetune_function(
        self, pl_module: LightningModule, epoch: int, optimizer: Optimizer
    ) -> None:
        """Called at the start of each epoch: call `unfreeze_and_add_param_group` here."""
        raise NotImplementedError

    # ---- what an override calls -------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """The modules that hold parameters themselves, and those without parts."""
        if isinstance(modules, nn.ModuleDict):
            modules = modules.values()
        if isinstance(modules, Iterable):
            parts = [
                part for module in modules for part in BaseFinetuning.flatten_modules(module)
            ]
        else:
            parts = list(modules.modules())
        return [
            part
            for part in parts
            if not list(part.children()) or list(part.parameters(recurse=False))
        ]

    @staticmethod
    def filter_params(
        modules: Modules, train_bn: bool = True, requires_grad: bool = True
    ) -> Iterator[nn.Parameter]:
        """The parameters with this `requires_grad`; train_bn=False leaves BatchNorm's out."""
        for part in BaseFinetuning.flatten_modules(modules):
            if isinstance(part, _BatchNorm) and not train_bn:
                continue
            for parameter in part.parameters(recurse=False):
                if parameter.requires_grad == requires_grad:
                    yield parameter

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze the parameters; BatchNorm collects statistics again."""
        for part in BaseFinetuning.flatten_modules(modules):
            BaseFinetuning._set_trainable(part, True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters that the module itself holds, and BatchNorm's statistics."""
        BaseFinetuning._set_trainable(module, False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze the parameters; with train_bn those of BatchNorm stay trainable."""
        for part in BaseFinetuning.flatten_modules(modules):
            BaseFinetuning._set_trainable(part, isinstance(part, _BatchNorm) and train_bn)

    @staticmethod
    def _set_trainable(part: nn.Module, trainable: bool) -> None:
        if isinstance(part, _BatchNorm):
            part.track_running_stats = trainable
        for parameter in part.parameters(recurse=False):
            parameter.requires_grad = trainable

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable) -> list:
        """The parameters that the optimizer does not hold yet; warns if it holds some."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        params = list(params)
        new = [parameter for parameter in params if id(parameter) not in held]
        if len(new) < len(params):
            warnings.warn(
                f"{pluralize(len(params) - len(new), 'parameter')} already in the optimizer: "
                f"each keeps its group and the group's learning rate.",
                stacklevel=3,
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze the modules, and add their parameters to the optimizer.

        lr                 the learning rate; the default is the first group's, divided by
                           initial_denom_lr
        """
        BaseFinetuning.make_trainable(modules)
        if lr is None:
            lr = optimizer.param_groups[0]["lr"] / initial_denom_lr
        trainable = BaseFinetuning.filter_params(modules, train_bn, requires_grad=True)
        added = BaseFinetuning.filter_on_optimizer(optimizer, trainable)
        if added:
            optimizer.add_param_group({"params": added, "lr": float(lr)})

    # ---- what the Trainer calls -------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            raise UserError(
                f"{type(self).__name__} changes which parameters require gradients during "
                f"training, which DDP does not support: train on one device."
            )
        self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After a checkpoint was read, give the optimizers the groups that they had."""
        if not self._resumes:
            return
        self._resumes = False
        parameters = dict(pl_module.named_parameters())
        for number, optimizer in enumerate(trainer.optimizers):
            if number in self._groups:
                optimizer.param_groups = [
                    {**group, "params": [parameters[name] for name in group["params"]]}
                    for group in self._groups[number]
                ]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        for number, optimizer in enumerate(trainer.optimizers):
            self.finetune_function(pl_module, trainer.current_epoch, optimizer)
            self._groups[number] = [
                {**group, "params": [names[parameter] for parameter in group["params"]]}
                for group in optimizer.param_groups
            ]

    def state_dict(self) -> dict[str, Any]:
        return {"internal_optimizer_metadata": self._groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._groups = state_dict["internal_optimizer_metadata"]
        self._resumes = True


class BackboneFinetuning(BaseFinetuning):
    """Freeze `pl_module.backbone`, and train it from `unfreeze_backbone_at_epoch` on.

    Its learning rate begins at `backbone_initial_lr`, or at the model's times
    `backbone_initial_ratio_lr`, and is multiplied by `lambda_func(epoch)` in each epoch. With
    `should_align` it does not exceed the model's.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = lambda epoch: 2.0,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ):
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
        super().load_state_dict(state_dict)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(getattr(pl_module, "backbone", None), nn.Module):
            raise UserError(
                f"BackboneFinetuning freezes pl_module.backbone, but "
                f"{type(pl_module).__name__} has no module of this name: name it so."
            )
        super().on_fit_start(trainer, pl_module)

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(
        self, pl_module: LightningModule, epoch: int, optimizer: Optimizer
    ) -> None:
        current = optimizer.param_groups[0]["lr"]
        if epoch == self.unfreeze_backbone_at_epoch:
            backbone = self.backbone_initial_lr or current * self.backbone_initial_ratio_lr
            self.unfreeze_and_add_param_group(
                pl_module.backbone,
                optimizer,
                backbone,
                initial_denom_lr=self.initial_denom_lr,
                train_bn=self.train_bn,
            )
        elif epoch > self.unfreeze_backbone_at_epoch:
            backbone = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            if self.should_align and backbone > current:
                backbone = current
            optimizer.param_groups[-1]["lr"] = backbone
        else:
            return
        self.previous_backbone_lr = backbone
        if self.verbose:
            pl_module.print(
                f"learning rate {round(current, self.rounding)}, "
                f"of the backbone {round(backbone, self.rounding)}"
            )
