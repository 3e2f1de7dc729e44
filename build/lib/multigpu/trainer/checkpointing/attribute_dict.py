"""AttributeDict: a dict whose items are also attributes, printed as a table."""

from typing import Any

from multigpu.errors import did_you_mean


class AttributeDict(dict):
    """A dict whose items are also attributes: hparams.lr is hparams["lr"]."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            pass
        # copy and pickle look for such methods and expect a plain AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(map(str, self)) or "none"
        hint = did_you_mean(name, self) or f"there are {known}"
        raise AttributeError(f"there is no hyperparameter {name!r}; {hint}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __repr__(self) -> str:
        width = max((len(str(name)) for name in self), default=0) + 3
        labels = {name: f'"{name}":' for name in sorted(self, key=str)}
        return "\n".join(f"{label:<{width}} {self[name]}" for name, label in labels.items())
