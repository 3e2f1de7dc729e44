"""torch.compile is left out while virtual GPUs run: its compiler makes code for real devices.

The program runs operation by operation, with the same numbers.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from multigpu.virtual.left_out import say_once

SENTENCE = "torch.compile is left out: a virtual GPU runs each operation by itself."


def leave_out(original: Callable) -> Callable:
    """torch.compile that returns the model or the function itself, and says so once."""

    @wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        say_once(SENTENCE)
        # Without a model, it is used as a decorator with options.
        return (lambda decorated: decorated) if model is None else model

    return compile


def compiler_is_loaded() -> bool:
    """Whether the program can have compiled a function already: that loads the compiler."""
    return "torch._dynamo.eval_frame" in sys.modules


def run_eagerly(original: Any) -> Any:
    """The compiler's stance in which functions that are compiled already run as they are."""
    return torch._dynamo.eval_frame.DynamoStance("force_eager")
