"""save_hyperparameters(): keep the arguments of __init__, for checkpoints and loggers."""

import inspect
import pickle
import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero

if TYPE_CHECKING:
    from multigpu.trainer.module import LightningModule
    from multigpu.trainer.run import Run


class AttributeDict(dict):
    """A dict whose items are also attributes: hparams.lr is hparams["lr"]."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        known = ", ".join(map(str, self)) or "none"
        raise AttributeError(f"there is no hyperparameter {name!r}; there are {known}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class HyperparametersMixin:
    """Gives a class save_hyperparameters() and hparams."""

    # Whether loggers get the hyperparameters, and the name of the argument that contained
    # them. These attributes have Lightning's names.
    _log_hyperparams: bool = False
    _hparams_name: str | None = None

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of __init__ in `hparams`. Call it in __init__.

        args     the names of the arguments to keep (default: all), or one dict or Namespace
        ignore   the names of arguments to leave out
        logger   whether loggers get the hyperparameters

        If a subclass's __init__ called this class's, the arguments of both are kept. The
        arguments of a module that makes this one in its own __init__ are not kept; Lightning
        keeps them.
        Raises UserError for a name that is not an argument, and if `args` is neither names nor
        one dict or Namespace.
        """
        self._log_hyperparams = logger
        arguments = _init_arguments(self)
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        for name in ignored:
            arguments.pop(name, None)
        if len(args) == 1 and not isinstance(args[0], str):
            kept = vars(args[0]) if isinstance(args[0], Namespace) else args[0]
            same = (name for name, value in arguments.items() if value is args[0])
            self._hparams_name = next(same, None)
        elif all(isinstance(name, str) for name in args):
            kept = _select(arguments, args)
            self._hparams_name = "kwargs" if kept else None
        else:
            kept = None
        if not isinstance(kept, Mapping):
            raise UserError(
                "save_hyperparameters accepts names, or one dict or Namespace, not "
                f"{', '.join(type(argument).__name__ for argument in args)}."
            )
        self.hparams.update(kept)
        # A base class may have kept an argument that this class ignores.
        for name in ignored:
            self.hparams.pop(name, None)

    @property
    def hparams(self) -> AttributeDict:
        """The hyperparameters; they can be changed."""
        if "_hparams" not in vars(self):
            self._hparams = AttributeDict()
        return self._hparams


def _select(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments with these names; all arguments if `names` is empty."""
    for name in names:
        if name not in arguments:
            known = ", ".join(arguments) or "none"
            raise UserError(
                f"save_hyperparameters({name!r}): __init__ has no such argument: give one of "
                f"{known}."
            )
    return {name: arguments[name] for name in names} if names else arguments


def _init_arguments(obj: object) -> dict[str, Any]:
    """The arguments of each __init__ of `obj` that is running."""
    arguments: dict[str, Any] = {}
    inside = False
    frame = inspect.currentframe()
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


def log_hyperparameters(run: "Run") -> None:
    """Give the loggers the hyperparameters of the module and the data module."""
    hparams: dict[str, Any] = {}
    for part in (run.datamodule, run.module):
        if part is not None and part._log_hyperparams:
            hparams |= part.hparams
    for logger in run.trainer.loggers:
        if hparams:
            logger.log_hyperparams(hparams)
        logger.save()


def make_from_hyperparameters(
    cls: "type[LightningModule]", content: dict, path: str | Path, keywords: dict[str, Any]
) -> "LightningModule":
    """Create a module with the saved hyperparameters that its __init__ accepts.

    `keywords` take precedence. Raises UserError if an argument of __init__ is missing.
    """
    saved = dict(content.get("hyper_parameters", {}))
    parameters = inspect.signature(cls.__init__).parameters
    # save_hyperparameters(config) keeps the items of one argument: put them back into it.
    name = content.get("hparams_name")
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
