"""Handles of operations that run while the program goes on: Horovod's *_async functions."""

from collections.abc import Callable

import torch
import torch.distributed as dist


class Handle:
    """A running operation; `synchronize` returns its result.

    work      torch.distributed's work; None if there is one rank
    finish    makes the result, after the work has ended
    """

    def __init__(self, work: dist.Work | None, finish: Callable[[], torch.Tensor]):
        self.work = work
        self.finish = finish
        self.result: torch.Tensor | None = None


def poll(handle: Handle) -> bool:
    """True if the operation has ended, so that `synchronize` does not wait."""
    return handle.work is None or handle.work.is_completed()


def synchronize(handle: Handle) -> torch.Tensor:
    """Wait for the operation, and return its result."""
    if handle.result is None:
        if handle.work is not None:
            handle.work.wait()
        handle.result = handle.finish()
    return handle.result
