"""How are hyperparameters written so that yaml.safe_load reads them, and no YAML library is needed to write them?"""

import math
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any

# Words that YAML 1.1 takes for something else than text.
_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def yaml_text(values: Mapping[str, Any]) -> str:
    """The mapping as YAML, a line an item, in the order of the names.

    Numbers, texts, None, lists and dicts stay what they are; tuples and sets become lists, a tensor with one element
    a number, an Enum its name, Namespaces and dataclasses dicts, and anything else its text.
    """
    lines = [
        f"{_text(str(name))}: {_value(values[name])}\n" for name in sorted(values, key=str)
    ]
    return "".join(lines) or "{}\n"


def _value(value: Any) -> str:
    if isinstance(value, Enum):
        return _text(value.name)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Namespace):
        value = vars(value)
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{_text(str(name))}: {_value(item)}" for name, item in value.items())
            + "}"
        )
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(map(_value, value)) + "]"
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # of torch or numpy
        return _value(value.item())
    return _text(str(value))


def _float(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    # YAML 1.1 takes 1e-05 for text: it wants a point, and a sign after the e.
    text = repr(float(value))
    return re.sub(r"^(-?\d+)e", r"\1.0e", text)


def _text(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_][\w/.-]*", text, re.ASCII) and text.lower() not in _NOT_TEXT:
        return text
    escaped = (c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(escaped)}"'
