"""load_from_checkpoint: build a module or data module with its saved hyperparameters."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from multigpu.errors import UserError
from multigpu.trainer.checkpointing.weights import load_weights

if TYPE_CHECKING:
    from multigpu.trainer.datamodule import LightningDataModule
    from multigpu.trainer.module import LightningModule

    Module = TypeVar("Module", bound=LightningModule)
    Instance = TypeVar("Instance", bound=LightningModule | LightningDataModule)

# The keys of the hyperparameters in checkpoints of Lightning before 1.0.
OLD_KEYS = ("hparams", "module_arguments")


def module_from_checkpoint(
    cls: type[Module],
    content: dict[str, Any],
    path: str | Path,
    strict: bool | None,
    keywords: dict[str, Any],
) -> Module:
    """Create a module of the class `cls` with the checkpoint's weights.

    Raises UserError if `strict` is given and the module's strict_loading says the opposite.
    """
    module = make_from_hyperparameters(cls, content, path, keywords)
    if strict not in (None, module.strict_loading) and module._strict_loading is not None:
        raise UserError(
            f"load_from_checkpoint(strict={strict}) is in conflict with {cls.__name__}'s "
            f"strict_loading={module.strict_loading}: give one of them only."
        )
    module.on_load_checkpoint(content)
    load_weights(module, content, path, module.strict_loading if strict is None else strict)
    return module


def make_from_hyperparameters(
    cls: type[Instance], content: dict[str, Any], path: str | Path, keywords: dict[str, Any]
) -> Instance:
    """Create a module or data module with the saved hyperparameters that __init__ accepts.

    `keywords` take precedence. Raises UserError if an argument of __init__ is missing.
    """
    keys = (cls.CHECKPOINT_HYPER_PARAMS_KEY, *OLD_KEYS)
    saved = dict(next((content[key] for key in keys if key in content), {}))
    parameters = inspect.signature(cls.__init__).parameters
    # save_hyperparameters(config) keeps the items of one argument: put them back into it.
    name = content.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)
    if name and name != "kwargs" and name in parameters:
        saved = {name: {**saved, **keywords.pop(name, {})}}
    arguments = {**saved, **keywords}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {key: value for key, value in arguments.items() if key in parameters}
    # Only missing arguments are reported here: an error inside __init__ keeps its traceback.
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"{cls.__name__} cannot be made from {path} ({error}): give the missing arguments "
            "to load_from_checkpoint, or call self.save_hyperparameters() in __init__."
        ) from None
    return cls(**arguments)
