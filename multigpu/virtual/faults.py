"""Faults on purpose: a rank that dies in the middle of training, and a rank that is slow."""

import os
import re
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from multigpu.errors import UserError

# The machine imports torch, which the command does not need.
if TYPE_CHECKING:
    from multigpu.virtual.sim.machine import Machine

# The figures of a Gpu that are divided if it is slow.
RATES = ("bandwidth", "fp64", "fp32", "tf32", "fp16")


@dataclass(frozen=True)
class Kill:
    """Rank `rank` is killed when it calls its `collective`-th collective, counted from 1."""

    rank: int
    collective: int

    @classmethod
    def parse(cls, text: str) -> "Kill":
        """The fault that RANK@NUMBER means, such as 1@20. Raises UserError."""
        match = re.fullmatch(r"(\d+)@(\d+)", text.strip())
        if not match or not int(match[2]):
            raise UserError(
                f"--kill-rank is {text!r}: give RANK@NUMBER, such as 1@20, to kill rank 1 at "
                f"its 20th collective."
            )
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Slow:
    """Rank `rank` takes `factor` times as long for its kernels and on its host."""

    rank: int
    factor: float

    @classmethod
    def parse(cls, text: str) -> "Slow":
        """The fault that RANK:FACTOR means, such as 2:1.5. Raises UserError."""
        match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)", text.strip())
        if not match or not float(match[2]):
            raise UserError(
                f"--slow-rank is {text!r}: give RANK:FACTOR, such as 2:1.5, to let rank 2 "
                f"take 1.5 times as long."
            )
        return cls(int(match[1]), float(match[2]))


class Faults:
    """The faults of this process, whose rank is known from the first group on."""

    def __init__(self, kill: Kill | None, slow: Slow | None):
        self.kill = kill
        self.slow = slow
        self.collectives = 0

    def begin(self, rank: int, machine: "Machine") -> None:
        """Slow the GPUs and the host of the slow rank down."""
        if self.slow is None or self.slow.rank != rank:
            return
        factor = self.slow.factor
        for costs in machine.costs.values():
            costs.gpu = replace(
                costs.gpu, **{name: getattr(costs.gpu, name) / factor for name in RATES}
            )
            costs.host_factor *= factor
            costs.forget()
        self.slow = None

    def collective(self, rank: int) -> None:
        """Kill this process if it is its rank's turn."""
        self.collectives += 1
        if self.kill == Kill(rank, self.collectives):
            os.kill(os.getpid(), signal.SIGKILL)
