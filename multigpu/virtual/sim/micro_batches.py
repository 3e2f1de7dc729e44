"""The numbers of micro-batches, for the boxes of a timeline's picture."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from multigpu.virtual.sim.machine import current
from multigpu.virtual.sim.notes import mark


def number_micro_batches(first: nn.Module, last: nn.Module, count: int) -> None:
    """Number the micro-batches of each step from 1 to `count`, in forward and in backward.

    A micro-batch's forward begins with a call of the module `first` and ends with the output
    of the module `last`, which can be the same module. Each step must call both modules
    `count` times. In backward an operation has the number of the micro-batch whose forward
    recorded it in the graph. What several micro-batches share, such as their loss, has no
    number.
    """
    clock = current().clock
    numbers = itertools.cycle(str(number + 1) for number in range(count))
    # The micro-batch in forward: its number, and the sequence number of its first node.
    begun = ("", 0)

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal begun
        begun = (next(numbers), torch.autograd._get_sequence_nr())
        mark(clock, begun[0])

    def end(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        number, first_node = begun
        for node in _nodes(output.grad_fn, first_node):
            node.register_prehook(lambda grads: mark(clock, number))
        mark(clock, "")

    first.register_forward_pre_hook(begin)
    last.register_forward_hook(end)


def _nodes(root: Any, first: int) -> Iterator[Any]:
    """The nodes of a graph from sequence number `first` on, except the weights' own nodes."""
    seen = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node.name().endswith("AccumulateGrad"):
            continue
        seen.add(node)
        if node._sequence_nr() >= first:
            waiting += [parent for parent, _ in node.next_functions]
            yield node
