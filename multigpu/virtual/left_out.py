"""What virtual GPUs leave out and a program has asked for."""

import os
import sys

# What was left out so far, one sentence each.
notes: list[str] = []


def say_once(sentence: str) -> None:
    """Note that something is left out; rank 0 prints it to stderr the first time."""
    if sentence in notes:
        return
    notes.append(sentence)
    if os.environ.get("RANK", "0") == "0":
        print(f"multigpu: {sentence}", file=sys.stderr)
