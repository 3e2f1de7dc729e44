"""save_hyperparameters(): keep the arguments of __init__, for checkpoints and loggers."""

import copy
import inspect
import pickle
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

from torch import nn

from multigpu.errors import UserError, did_you_mean
from multigpu.launch.world import is_rank_zero
from multigpu.trainer.checkpointing.attribute_dict import AttributeDict


class HyperparametersMixin:
    """Gives a class save_hyperparameters(), hparams and hparams_initial."""

    # Whether loggers get the hyperparameters, and the name of the argument that contained
    # them. These attributes have Lightning's names.
    _log_hyperparams: bool = False
    _hparams_name: str | None = None

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of __init__ in `hparams`. Call it in __init__.

        args     the names of the arguments to keep (default: all), or one dict or Namespace
        ignore   the names of arguments to leave out
        frame    the frame of __init__, if __init__ calls this method through another function
        logger   whether loggers get the hyperparameters

        If a subclass's __init__ called this class's, the arguments of both are kept. The
        arguments of a module that makes this one in its own __init__ are not kept; Lightning
        keeps them.
        Raises UserError for a name that is not an argument, and if `args` is neither names nor
        one dict or Namespace.
        """
        self._log_hyperparams = logger
        if len(args) == 1 and not isinstance(args[0], str) and not args[0]:
            return
        arguments = _init_arguments(self, frame or inspect.currentframe().f_back)
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        for name in ignored:
            arguments.pop(name, None)
        containers = [arg for arg in args if not isinstance(arg, str)]
        if containers:
            kept = _items_of(containers)
            self._hparams_name = _name_of(containers[0], arguments)
        else:
            kept = _select(arguments, args)
            self._hparams_name = "kwargs" if kept else None
        self.hparams.update(kept)
        # A base class may have kept an argument that this class ignores.
        for name in ignored:
            self.hparams.pop(name, None)
        self._hparams_initial = AttributeDict(
            {name: _copy(name, value) for name, value in self.hparams.items()}
        )

    @property
    def hparams(self) -> AttributeDict:
        """The hyperparameters; they can be changed."""
        if "_hparams" not in vars(self):
            self._hparams = AttributeDict()
        return self._hparams

    @hparams.setter
    def hparams(self, hparams: Any) -> None:
        raise UserError(
            f"{type(self).__name__} sets self.hparams, as before Lightning 1.0: call "
            f"self.save_hyperparameters(hparams) instead."
        )

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the hyperparameters as they were saved."""
        return copy.deepcopy(vars(self).get("_hparams_initial", AttributeDict()))


def drop_unpicklable(part: HyperparametersMixin) -> None:
    """Remove the hyperparameters that a checkpoint cannot contain, with a warning."""
    for name, value in list(part.hparams.items()):
        try:
            pickle.dumps(value)
        except Exception as error:  # the user's __reduce__ can raise any
            del part.hparams[name]
            if is_rank_zero():
                warnings.warn(
                    f"Attribute {name!r} removed from hparams because it cannot be pickled "
                    f"({error}): leave it out with save_hyperparameters(ignore=[{name!r}]).",
                    stacklevel=2,
                )


def _items_of(containers: list[Any]) -> Mapping[str, Any]:
    """The items of the one dict or Namespace in `containers`."""
    if len(containers) > 1:
        raise UserError(
            "save_hyperparameters accepts names, or one dict or Namespace, but not several."
        )
    container = containers[0]
    items = vars(container) if isinstance(container, Namespace) else container
    if not isinstance(items, Mapping):
        raise UserError(
            "save_hyperparameters accepts names, a dict or a Namespace, "
            f"not {type(items).__name__}."
        )
    return items


def _name_of(container: Any, arguments: Mapping[str, Any]) -> str | None:
    """The name of the argument that is this container; None if there is none."""
    for name, value in arguments.items():
        if type(value) is type(container) and value == container:
            return name
    return None


def _select(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments with these names; all arguments if `names` is empty."""
    for name in names:
        if name not in arguments:
            known = ", ".join(arguments) or "none"
            hint = did_you_mean(name, arguments) or f"there are {known}."
            raise UserError(
                f"save_hyperparameters({name!r}): __init__ has no such argument: {hint}"
            )
    return {name: arguments[name] for name in names} if names else arguments


def _init_arguments(obj: object, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of each __init__ of `obj` in this frame and its callers."""
    if is_dataclass(obj):
        return {field.name: getattr(obj, field.name) for field in fields(obj) if field.init}
    arguments: dict[str, Any] = {}
    inside = False
    while frame is not None:
        names, _, keywords, values = inspect.getargvalues(frame)
        is_init = frame.f_code.co_name == "__init__"
        if is_init and names and values.get(names[0]) is obj:
            inside = True
            arguments |= {name: values[name] for name in names[1:] if name in values}
            if keywords:
                arguments |= values.get(keywords, {})
        elif inside:
            break
        frame = frame.f_back
    return arguments


def _copy(name: str, value: Any) -> Any:
    """A deep copy of the hyperparameter. Raises UserError if it cannot be copied."""
    if isinstance(value, nn.Module):
        warnings.warn(
            f"the hyperparameter {name!r} is a module, and checkpoints contain its weights: "
            f"leave it out with save_hyperparameters(ignore=[{name!r}]).",
            stacklevel=4,
        )
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise UserError(
            f"the hyperparameter {name!r} cannot be copied ({error}): "
            f"leave it out with save_hyperparameters(ignore=[{name!r}])."
        ) from None
