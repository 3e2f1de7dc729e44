"""With which arguments was a model made? save_hyperparameters() keeps them, for checkpoints and logs."""

import copy
import inspect
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

from torch import nn

from multigpu.errors import UserError, did_you_mean
from multigpu.trainer.checkpointing.attribute_dict import AttributeDict


class HyperparametersMixin:
    """Gives a class save_hyperparameters(), hparams and hparams_initial."""

    _log_hyperparams = False
    _hparams_name: str | None = None

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of __init__, from which this is called, in `hparams`.

        `args`: the names of those to keep (default: all), or one dict or Namespace to keep instead. `ignore`: names to
        leave out. With inheritance the arguments of all __init__ that run are kept. `logger`: whether loggers get them.
        Raises UserError for a name that is no argument, and for what is not a dict or Namespace.
        """
        self._log_hyperparams = logger
        if len(args) == 1 and not isinstance(args[0], str) and not args[0]:
            return
        given = _init_arguments(self, frame or inspect.currentframe().f_back)
        left_out = {ignore} if isinstance(ignore, str) else set(ignore or ())
        given = {name: value for name, value in given.items() if name not in left_out}
        containers = [arg for arg in args if not isinstance(arg, str)]
        if len(containers) > 1:
            raise UserError(
                "save_hyperparameters takes names, or one dict or Namespace, not several."
            )
        if containers:
            kept = (
                vars(containers[0]) if isinstance(containers[0], Namespace) else containers[0]
            )
            same = (
                name
                for name, value in given.items()
                if type(value) is type(containers[0]) and value == containers[0]
            )
            self._hparams_name = next(same, None)
        else:
            for name in set(args) - set(given):
                hint = did_you_mean(name, given) or f"there are {', '.join(given) or 'none'}."
                raise UserError(
                    f"save_hyperparameters({name!r}): __init__ has no such argument: {hint}"
                )
            kept = {name: given[name] for name in args} if args else given
            self._hparams_name = "kwargs" if kept else None
        if not isinstance(kept, Mapping):
            raise UserError(
                f"save_hyperparameters takes names, a dict or a Namespace, not {type(kept).__name__}."
            )
        self.hparams.update(kept)
        for name in left_out:
            self.hparams.pop(name, None)  # also what a base class has kept
        self._hparams_initial = AttributeDict(
            {name: _copied(name, value) for name, value in self.hparams.items()}
        )

    @property
    def hparams(self) -> AttributeDict:
        """The hyperparameters; may be changed."""
        if "_hparams" not in vars(self):
            self._hparams = AttributeDict()
        return self._hparams

    @property
    def hparams_initial(self) -> AttributeDict:
        """The hyperparameters as they were saved: a copy each time."""
        return copy.deepcopy(vars(self).get("_hparams_initial", AttributeDict()))


def _init_arguments(obj: Any, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of the __init__ of `obj` that run in this frame and the frames right around it."""
    if is_dataclass(obj):
        return {field.name: getattr(obj, field.name) for field in fields(obj) if field.init}
    found: dict[str, Any] = {}
    inside = False
    while frame is not None:
        names, _, keywords, values = inspect.getargvalues(frame)
        if frame.f_code.co_name == "__init__" and names and values.get(names[0]) is obj:
            inside = True
            found |= {name: values[name] for name in names[1:] if name in values}
            found |= values.get(keywords, {}) if keywords else {}
        elif inside:
            break
        frame = frame.f_back
    return found


def _copied(name: str, value: Any) -> Any:
    if isinstance(value, nn.Module):
        warnings.warn(
            f"the hyperparameter {name!r} is a module, whose weights a checkpoint holds already: "
            f"leave it out with save_hyperparameters(ignore=[{name!r}]).",
            stacklevel=4,
        )
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise UserError(
            f"the hyperparameter {name!r} cannot be copied ({error}): leave it out, save_hyperparameters(ignore=[{name!r}])."
        ) from None
