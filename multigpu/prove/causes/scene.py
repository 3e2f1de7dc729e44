"""The first step that differs, and the words for what it shows."""

import math
from dataclasses import dataclass

import numpy as np

from multigpu.prove.compare import Comparison, StepDistances, match_rows, rows_of
from multigpu.prove.record import Head, Step

# A gradient with this cosine to the reference's, and another length, has a wrong factor.
SAME_DIRECTION = 0.9999
# How far a factor may be from 1 / ranks and the like.
NEAR = 0.02


@dataclass(frozen=True)
class Cause:
    """Why two runs differ, or why nothing can be said.

    kind       a word for programs: "same_rows", "divided_by_ranks", …
    sentence   what was seen: parameter, step and rank are in it
    remedy     what to do
    step       the first step that shows it, from 1
    rank, parameter   None if it concerns all
    unknown    True if the difference says nothing about the program
    """

    kind: str
    sentence: str
    remedy: str
    step: int
    rank: int | None = None
    parameter: str | None = None
    unknown: bool = False


@dataclass
class Scene:
    """The first step that differs, and what the runs recorded there."""

    comparison: Comparison
    step: StepDistances

    @property
    def ranks(self) -> int:
        return len(self.step.parallel)

    @property
    def replica(self) -> str:
        """The word for what computes a part of the batch: "rank" or "GPU"."""
        return "rank" if self.ranks > 1 else "GPU"

    @property
    def number(self) -> int:
        return self.step.number

    @property
    def reference(self) -> Step:
        """The reference's step."""
        return self.step.reference[0]

    @property
    def rows(self) -> np.ndarray:
        """What the reference reads, also where several ranks share it (--against)."""
        return reference_rows(self.step.reference)

    @property
    def loss(self) -> float:
        """The reference's loss: the mean of its ranks' losses."""
        losses = [sum(step.losses) for step in self.step.reference if step.losses]
        return sum(losses) / len(losses) if losses else 0.0

    @property
    def heads(self) -> list[Head]:
        """The heads of the parallel run's ranks."""
        return [
            record.heads[self.step.key[0]]
            for record in self.comparison.parallel
            if self.step.key[0] in record.heads
        ]

    @property
    def staged(self) -> bool:
        """Whether ranks have other layers than others, as in a pipeline."""
        holders = self.step.holders
        return any(ranks != holders[0] for ranks in holders)

    @property
    def padded(self) -> bool:
        """Whether the batches of this step have rows of different lengths."""
        return (
            len(set().union(*(step.widths for step in (self.reference, *self.step.parallel))))
            > 1
        )

    def cause(self, kind: str, sentence: str, remedy: str, **more: object) -> Cause:
        return Cause(kind, sentence, remedy, self.number, **more)


def reference_rows(steps: list[Step]) -> np.ndarray:
    """The rows of a reference's first rank, and of each rank that reads none of the same.

    Ranks that share layers read the same rows; ranks that divide a batch read others.
    """
    together = rows_of(steps[0])
    for step in steps[1:]:
        rows = rows_of(step)
        if len(rows) and match_rows(rows, together)[0] == 0:
            together = np.concatenate([together, rows])
    return together


def worst(scene: Scene, kind: str) -> tuple[int, int, bool]:
    """(parameter, rank, whether ranks differ from each other) of the largest difference."""
    distances = scene.step.kinds[kind]
    apart = distances.are_apart()
    if apart.any():
        place = _argmax(np.where(apart, distances.apart / (distances.scale + 1e-30), -1))
        return place, int(distances.off_rank[place]), True
    place = _argmax(distances.off / np.maximum(distances.limit, 1e-30))
    return place, int(distances.off_rank[place]), False


def _argmax(values: np.ndarray) -> int:
    return int(np.argmax(np.where(np.isnan(values), np.inf, values)))


def differ(values: list) -> bool:
    """Whether numbers differ by more than 1e-6 of the largest, or other values at all."""
    if not all(isinstance(value, int | float) for value in values):
        return len(set(map(str, values))) > 1
    most = max(abs(value) for value in values)
    return not max(values) - min(values) <= 1e-6 * most


def size_of(distance: float, distances: object, place: int) -> str:
    return percent(distance / max(float(distances.scale[place]), 1e-30))


def ratio_text(distances: object) -> str:
    apart = float(np.linalg.norm(np.maximum(distances.apart, distances.off)))
    return percent(apart / max(float(np.linalg.norm(distances.scale)), 1e-30))


def percent(share: float) -> str:
    if math.isnan(share):
        return "NaN"
    if share >= 0.01:
        return f"{share:.0%}"
    return f"{share:.3%}" if share >= 1e-5 else f"{share:.1e} of the norm"


def times(ratio: float) -> str:
    return f"{ratio:.3f} times"


def short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
