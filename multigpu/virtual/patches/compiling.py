"""torch.compile is left out while virtual GPUs run: its compiler makes code for real devices.

The program runs operation by operation, with the same numbers.
"""

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

SENTENCE = "torch.compile is left out on virtual GPUs: the operations run one by one."


def leave_out(original: Callable) -> Callable:
    """torch.compile that returns the model or the function itself, and says so once."""
    said = []

    @wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if not said and os.environ.get("RANK", "0") == "0":
            said.append(True)
            print(SENTENCE, file=sys.stderr)
        # Without a model, it is used as a decorator with options.
        return (lambda decorated: decorated) if model is None else model

    return compile


def compiler_is_loaded() -> bool:
    """Whether the program can have compiled a function already: that loads the compiler."""
    return "torch._dynamo.eval_frame" in sys.modules


def run_eagerly(original: Any) -> Any:
    """The compiler's stance in which functions that are compiled already run as they are."""
    return torch._dynamo.eval_frame.DynamoStance("force_eager")
