"""How far a parallel run is from the reference, and how far rounding alone goes.

For each parameter and step, three distances to the reference: of the gradients, and of the
weights before and after the step. The limit of each is FACTOR times what rounding has done in
runs of the reference that round otherwise (the band), to this parameter up to this step; for a
parameter with few elements, whose own band is one random number, what it has done to the
median parameter counts as well.

An optimizer that divides by the gradient's size, as Adam does, turns rounding into whole
steps: an element whose gradient is smaller than its rounding error moves by the learning rate,
in a random direction. If r is the limit of the gradient divided by its norm, a share of about
r of normally distributed elements is that small, and turning their steps around changes the
update by 2 sqrt(r) of its norm. The limit of the weights has that on top, added up over the
steps.
"""

import difflib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from multigpu.errors import UserError
from multigpu.prove.record import COARSE, Part, RankRecord, Step

FACTOR = 10.0
# Sums of sketches are computed in float32, those of float64 in float64.
EPS = 2.0**-23
# If gradients travel between ranks in 16 bit, each rank's is rounded, and their sum.
TRAVEL = 4.0
# Optimizers whose update is proportional to the gradient.
PROPORTIONAL = ("SGD",)
# Gradients of ranks that average them are equal to the bit: in 16 bit, too, their distance is
# no rounding.
APART = 1e-4
# Weights that are this near, relative to their norm, differ by rounding, also in 16 bit.
SAME_WEIGHTS = 0.01
KINDS = ("weights", "gradients", "after")
Key = tuple[int, int]


@dataclass
class Distances:
    """Of one kind, for each parameter (P,): see KINDS.

    scale    the norm of the reference's value
    off      the largest distance of a replica to the reference; NaN if one of them is
    off_rank its rank
    apart    the largest distance of a replica to the first one
    limit    what rounding explains
    """

    scale: np.ndarray
    off: np.ndarray
    off_rank: np.ndarray
    apart: np.ndarray
    limit: np.ndarray

    def fails(self) -> np.ndarray:
        """Which parameters differ by more than rounding explains; (P,) bool."""
        return ~(self.off <= self.limit)

    def are_apart(self) -> np.ndarray:
        """Which parameters differ between the ranks that hold them; (P,) bool."""
        bound = np.minimum(self.limit, APART * self.scale + 1e-6 * np.linalg.norm(self.scale))
        return ~(self.apart <= np.maximum(bound, 4 * EPS * self.scale))

    def relative(self) -> tuple[float, float]:
        """(distance, limit) of all parameters together, divided by the reference's norm."""
        scale = max(float(np.linalg.norm(self.scale)), 1e-30)
        return float(np.linalg.norm(self.off)) / scale, float(
            np.linalg.norm(self.limit)
        ) / scale


@dataclass
class StepDistances:
    """One step: what was compared, and what each run recorded at it.

    ratio, cosine  of the mean gradient of all replicas to the reference's, for each parameter
    between    the smallest cosine of a replica's gradient to the first one's, all parameters
    missing        (parameter, rank) of gradients that one run or rank has and another has not
    buffers, frozen  (name, relative distance, limit, rank) of buffers and frozen parameters
    reordered  the buffers that have the reference's numbers in another order: their distance
               counts as zero
    holders        for each parameter, the ranks that have it or a shard of it
    """

    key: Key
    names: list[str]
    kinds: dict[str, Distances]
    ratio: np.ndarray
    cosine: np.ndarray
    reference: list[Step]
    parallel: list[Step]
    ranks: list[int]
    band: list[Step]
    between: float = 1.0
    missing: list[tuple[int, int]] = field(default_factory=list)
    buffers: list[tuple[str, float, float, int]] = field(default_factory=list)
    frozen: list[tuple[str, float, float, int]] = field(default_factory=list)
    reordered: list[str] = field(default_factory=list)
    holders: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The step's number, from 1."""
        return self.key[1] + 1


@dataclass
class Comparison:
    """Two runs, step by step."""

    reference: list[RankRecord]
    parallel: list[RankRecord]
    bands: list[list[RankRecord]]
    steps: list[StepDistances]


class Unmatched(UserError):
    """A rank's parameters cannot be found in the reference."""


def compare(
    reference: list[RankRecord], parallel: list[RankRecord], bands: list[list[RankRecord]]
) -> Comparison:
    """Compare the steps that all runs have made.

    Raises Unmatched if parameters of a rank are not in the reference.
    """
    canonical = _canonical(reference)
    sides = [_Side(records, canonical) for records in (reference, parallel)]
    band_sides = [_Side(records, canonical) for records in bands]
    every = [*sides, *band_sides]
    steps = []
    seen = {place: _Seen(len(known.parts)) for place, known in canonical.items()}
    for key in (step_key(step) for step in reference[0].steps):
        if not all(side.has(key) for side in every):
            continue
        parts = canonical[key[0]].parts
        steps.append(_step(key, parts, sides[0], sides[1], band_sides, seen[key[0]]))
    return Comparison(reference, parallel, bands, steps)


class _Seen:
    """What rounding has done to an optimizer's parameters, up to a step.

    highest  the largest band of each parameter, by kind
    medians  the largest median of the parameters' relative bands, by kind
    slack    how far weights are apart by steps that rounding has turned around
    """

    def __init__(self, parameters: int):
        self.highest = {kind: np.zeros(parameters) for kind in KINDS}
        self.medians = dict.fromkeys(KINDS, 0.0)
        self.slack = np.zeros(parameters)


def step_key(step: Step) -> Key:
    """Which step of which optimizer."""
    return step.optimizer, step.number


@dataclass
class _Known:
    """The parameters of an optimizer, as the reference has them, and their first weights."""

    parts: list[Part] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)


def _canonical(reference: list[RankRecord]) -> dict[int, _Known]:
    """The parameters of each optimizer: those of the first rank, and what others have more."""
    canonical: dict[int, _Known] = {}
    for record in reference:
        for place, head in record.heads.items():
            known = canonical.setdefault(place, _Known())
            weights = _first_weights(record, place)
            numbers = _known_numbers(head.parts, weights, known, may_add=True)
            for number, part in enumerate(head.parts):
                if number not in numbers:
                    known.parts.append(part)
                    known.weights.append(weights[number])
    return canonical


class _Side:
    """A run's records, with each rank's parts found among the reference's parameters."""

    def __init__(
        self,
        records: list[RankRecord],
        canonical: dict[int, _Known],
    ):
        self.records = records
        self.by_key = [{step_key(step): step for step in record.steps} for record in records]
        # For each optimizer and parameter: replicas, each a list of (record, part).
        self.replicas: dict[int, list[list[list[tuple[int, int]]]]] = {}
        # For each optimizer and parameter: the ranks that have it, though of an empty shard.
        self.holders: dict[int, list[tuple[int, ...]]] = {}
        for optimizer, known in canonical.items():
            parameters = known.parts
            holders: list[dict] = [defaultdict(list) for _ in parameters]
            for place, record in enumerate(records):
                head = record.heads.get(optimizer)
                if head is None:
                    continue
                matched = _match(head.parts, known, record, optimizer)
                for number, parameter in enumerate(matched):
                    holders[parameter][head.parts[number].shard].append((place, number))
            self.holders[optimizer] = [
                tuple(
                    sorted(
                        {
                            records[place].rank
                            for places in holder.values()
                            for place, _ in places
                        }
                    )
                )
                for holder in holders
            ]
            self.replicas[optimizer] = [
                _replicas(holder, parameters[number], records, optimizer)
                for number, holder in enumerate(holders)
            ]

    def has(self, key: Key) -> bool:
        return all(
            key in steps
            for steps, record in zip(self.by_key, self.records, strict=True)
            if key[0] in record.heads
        )

    def steps(self, key: Key) -> list[Step]:
        """The steps of all ranks that have the optimizer."""
        return [steps[key] for steps in self.by_key if key in steps]

    def ranks(self, key: Key) -> list[int]:
        return [
            record.rank
            for steps, record in zip(self.by_key, self.records, strict=True)
            if key in steps
        ]

    def values(
        self, key: Key, parameter: int, kind: str
    ) -> list[tuple[int, np.ndarray | None]]:
        """(rank, sketch) of each replica of a parameter; None for no gradient."""
        result = []
        for replica in self.replicas[key[0]][parameter]:
            rows = []
            for place, number in replica:
                step = self.by_key[place][key]
                if kind != "gradients" or step.present[number]:
                    rows.append(getattr(step, kind)[number])
            total = np.sum(rows, axis=0) if rows else None
            result.append((self.records[replica[0][0]].rank, total))
        place, number = self.replicas[key[0]][parameter][0][0]
        if kind != "gradients":
            return result
        if number in self.by_key[place][key].placed:
            return self._placed(key, parameter)
        every = [row for _, row in result if row is not None]
        if self.by_key[place][key].reduces and len(every) == len(result):
            # The optimizer itself averages what the ranks have.
            return [(result[0][0], np.mean(every, axis=0))]
        return result

    def moved(self, key: Key, parameter: int) -> float:
        """How far the step moves a parameter."""
        before, after = (
            self.values(key, parameter, kind)[0][1] for kind in ("weights", "after")
        )
        return float(np.linalg.norm(after - before))

    def _placed(self, key: Key, parameter: int) -> list[tuple[int, np.ndarray | None]]:
        """(rank, sketch) of a gradient that is not divided as its parameter is."""
        pieces: dict[tuple | None, list[tuple[int, np.ndarray]]] = defaultdict(list)
        for place, number in {
            pair for replica in self.replicas[key[0]][parameter] for pair in replica
        }:
            step, rank = self.by_key[place][key], self.records[place].rank
            if step.present[number]:
                shard = step.placed[number], step.partial.get(number) and rank
                pieces[shard].append((rank, step.gradients[number]))
        whole = pieces.get((None, None), [])
        if whole or not pieces:
            return sorted(whole, key=lambda pair: pair[0])
        first = min(rank for ranks in pieces.values() for rank, _ in ranks)
        return [(first, np.sum([ranks[0][1] for ranks in pieces.values()], axis=0))]


def _replicas(
    holder: dict, parameter: Part, records: list[RankRecord], optimizer: int
) -> list[list[tuple[int, int]]]:
    """The sets of parts that make the whole parameter."""
    if not holder:
        raise Unmatched(f"no rank has the parameter {parameter.name} of the reference")

    def numel(place: tuple[int, int]) -> int:
        return records[place[0]].heads[optimizer].parts[place[1]].numel

    pieces = {
        key: places for key, places in holder.items() if key is not None and numel(places[0])
    }
    whole = [[place] for place in holder.get(None, [])]
    sizes = [numel(places[0]) for places in pieces.values()]
    if pieces and sum(sizes) != math.prod(parameter.shape):
        raise Unmatched(
            f"the ranks' parts of the parameter {parameter.name} have {sum(sizes):,} of its "
            f"{math.prod(parameter.shape):,} elements, so it cannot be compared."
        )
    count = max(map(len, pieces.values()), default=0)
    return whole + [
        [places[min(number, len(places) - 1)] for places in pieces.values()]
        for number in range(count)
    ]


def _match(parts: list[Part], known: _Known, record: RankRecord, optimizer: int) -> list[int]:
    """For each part of a rank, the number of its parameter in the reference.

    Raises Unmatched for a part that the reference has not.
    """
    numbers = _known_numbers(parts, _first_weights(record, optimizer), known)
    for number, part in enumerate(parts):
        if number not in numbers:
            raise Unmatched(
                f"rank {record.rank} has a parameter {part.name} of shape {part.shape}, which "
                f"the reference has not"
            )
    return [numbers[number] for number in range(len(parts))]


def _known_numbers(
    parts: list[Part], weights: np.ndarray, known: _Known, may_add: bool = False
) -> dict[int, int]:
    """For the number of each part that is a known parameter, that parameter's number.

    With `may_add`, parts are found by name and shape. If the weights under these names differ,
    no part is found: the stages of a pipeline can have the same names.

    Without it, the first of these rules that applies decides:
    1. by name and shape, if all parts are found and either are all parameters or have the
       same weights or are shards
    2. by order, if the lists of shapes are equal
    3. by first weights, as the longest runs that are equal in both lists; then by name what
       is left, because a shard has other weights than the whole parameter
    """
    theirs = {(part.name, part.shape): number for number, part in enumerate(known.parts)}
    named = {
        number: theirs[part.name, part.shape]
        for number, part in enumerate(parts)
        if (part.name, part.shape) in theirs
    }
    sharded = any(part.shard is not None for part in parts)
    sketches = np.array([weights[number] for number in named])
    other = np.array([known.weights[place] for place in named.values()])
    are_same = sharded or np.linalg.norm(sketches - other) <= SAME_WEIGHTS * np.linalg.norm(
        other
    )
    if may_add:
        return named if are_same else {}
    have_names = len(set(named.values())) == len(parts)
    if have_names and (are_same or len(parts) == len(known.parts)):
        return named
    if [part.shape for part in parts] == [part.shape for part in known.parts]:
        return {number: number for number in range(len(parts))}
    matcher = difflib.SequenceMatcher(
        None, _tokens(parts, weights), _tokens(known.parts, known.weights), autojunk=False
    )
    numbers = {
        block.a + offset: block.b + offset
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }
    taken = set(numbers.values())
    for number, place in named.items():
        if number not in numbers and place not in taken:
            numbers[number] = place
    return numbers


def _tokens(parts: list[Part], weights: Sequence[np.ndarray]) -> list[tuple]:
    """A value for each parameter that is equal if shape and weights are."""
    return [
        (part.shape, tuple(np.round(row / max(np.linalg.norm(row), 1e-30), 4)))
        for part, row in zip(parts, weights, strict=True)
    ]


def _first_weights(record: RankRecord, optimizer: int) -> np.ndarray:
    return next(step.weights for step in record.steps if step.optimizer == optimizer)


def _step(
    key: Key,
    parameters: list[Part],
    reference: _Side,
    parallel: _Side,
    bands: list[_Side],
    seen: _Seen,
) -> StepDistances:
    kinds = {}
    missing: list[tuple[int, int]] = []
    ratio, cosine = np.ones(len(parameters)), np.ones(len(parameters))
    to_first: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(3))
    for kind in KINDS:
        rows = []
        band = np.zeros(len(parameters))
        for number in range(len(parameters)):
            expected = reference.values(key, number, kind)[0][1]
            others = parallel.values(key, number, kind)
            if kind == "gradients":
                missing += [
                    (number, rank)
                    for rank, value in others
                    # DataParallel gives zeros where one GPU gives none.
                    if (value is None) != (expected is None)
                    and np.any(value if expected is None else expected)
                ]
            expected = np.zeros(64) if expected is None else expected
            present = [(rank, value) for rank, value in others if value is not None]
            rows.append(_distances(expected, present))
            for side in bands:
                value = side.values(key, number, kind)[0][1]
                if value is not None:
                    band[number] = max(band[number], float(np.linalg.norm(value - expected)))
            if kind == "gradients" and present:
                first = present[0][1]
                for rank, value in present[1:]:
                    to_first[rank] += (value @ first, value @ value, first @ first)
                mean = np.mean([value for _, value in present], axis=0)
                dot, square, other = expected @ mean, expected @ expected, mean @ mean
                ratio[number] = dot / square if square else 1.0
                cosine[number] = _cosine((dot, square, other))
        scale, off, off_rank, apart = map(np.array, zip(*rows, strict=True))
        seen.highest[kind] = np.fmax(seen.highest[kind], band)
        some = scale > 0
        if some.any():
            median = float(np.median(band[some] / scale[some]))
            seen.medians[kind] = max(seen.medians[kind], median)
        total = float(np.linalg.norm(scale))
        limit = FACTOR * np.fmax(seen.highest[kind], seen.medians[kind] * scale)
        unit = np.array([min(part.eps, EPS) or EPS for part in parameters])
        floor = 16 * unit * scale + (4 * unit * total if kind == "gradients" else 0.0)
        if kind == "gradients":
            head = next(
                record.heads[key[0]] for record in parallel.records if key[0] in record.heads
            )
            # Parameters in 16 bit have gradients in 16 bit.
            eps = np.array([part.eps if part.eps > COARSE else 0.0 for part in parameters])
            coarse = TRAVEL * np.maximum(head.coarse, eps) * scale
            limit = limit + coarse
            share = limit + floor if head.kind not in PROPORTIONAL else coarse
            share = np.minimum(1.0, share / np.maximum(scale, 1e-30))
            turned = share if head.kind in PROPORTIONAL else 2 * np.sqrt(share)
            moved = [reference.moved(key, number) for number in range(len(parameters))]
            seen.slack = seen.slack + turned * moved
        if kind != "gradients":
            limit = limit + seen.slack
        kinds[kind] = Distances(scale, off, off_rank, apart, limit + floor)
    buffers, reordered = _in_any_order(
        _untrained("buffers", key, reference, parallel, bands), key, reference, parallel
    )
    return StepDistances(
        key,
        [part.name for part in parameters],
        kinds,
        ratio,
        cosine,
        reference.steps(key),
        parallel.steps(key),
        parallel.ranks(key),
        [step for side in bands for step in side.steps(key)[:1]],
        min(map(_cosine, to_first.values()), default=1.0),
        missing,
        buffers,
        _untrained("frozen", key, reference, parallel, bands),
        reordered,
        parallel.holders[key[0]],
    )


def _cosine(products: Sequence[float]) -> float:
    dot, square, other = products
    return dot / math.sqrt(square * other) if square * other else 1.0


def _distances(
    expected: np.ndarray, others: list[tuple[int, np.ndarray]]
) -> tuple[float, float, int, float]:
    """scale, off, off_rank, apart of one parameter."""
    scale = float(np.linalg.norm(expected))
    if not others:
        return scale, 0.0, 0, 0.0
    off = [float(np.linalg.norm(value - expected)) for _, value in others]
    apart = [float(np.linalg.norm(value - others[0][1])) for _, value in others]
    farthest = _largest(off)
    return scale, off[farthest], others[farthest][0], apart[_largest(apart)]


def _largest(values: list[float]) -> int:
    """The place of the largest value; NaN is the largest."""
    return max(
        range(len(values)), key=lambda place: (math.isnan(values[place]), values[place])
    )


def _untrained(
    kind: str, key: Key, reference: _Side, parallel: _Side, bands: list[_Side]
) -> list[tuple[str, float, float, int]]:
    """(name, relative distance, limit, rank) of the "buffers", or of what is "frozen"."""
    first = next(record for record in reference.records if key[0] in record.heads)
    names = getattr(first.heads[key[0]], kind)
    expected = dict(zip(names, getattr(reference.steps(key)[0], kind), strict=False))
    distances = []
    for name, value in expected.items():
        scale = max(float(np.linalg.norm(value)), 1e-30)
        band, off, off_rank = 0.0, 0.0, 0
        for side in (*bands, parallel):
            for record, steps in zip(side.records, side.by_key, strict=True):
                head = record.heads.get(key[0])
                if head is None or name not in getattr(head, kind):
                    continue
                row = getattr(steps[key], kind)[getattr(head, kind).index(name)]
                distance = float(np.linalg.norm(row - value)) / scale
                if side is not parallel:
                    band = max(band, distance)
                elif not distance <= off:
                    off, off_rank = distance, record.rank
        distances.append((name, off, FACTOR * band + 64 * EPS, off_rank))
    return distances


def _in_any_order(
    buffers: list[tuple[str, float, float, int]], key: Key, reference: _Side, parallel: _Side
) -> tuple[list[tuple[str, float, float, int]], list[str]]:
    """The rows of `buffers`, and the names of those that only have another order.

    A queue of what all ranks have gathered, as in MoCo, has the rows in the ranks' order.
    """

    def moments(record: RankRecord, step: Step, name: str) -> np.ndarray | None:
        names = record.heads[key[0]].buffers if key[0] in record.heads else []
        return step.moments[names.index(name)] if name in names else None

    result, reordered = [], []
    first = next(record for record in reference.records if key[0] in record.heads)
    for name, off, limit, rank in buffers:
        if not off <= limit:
            expected = moments(first, reference.steps(key)[0], name)
            others = [
                moments(record, steps[key], name)
                for record, steps in zip(parallel.records, parallel.by_key, strict=True)
                if key in steps
            ]
            # Limits are relative to the norm, whose square is the second sum.
            size = np.array([math.sqrt(expected[1]), expected[1], expected[1] ** 1.5])
            if all(
                other is None or (np.abs(other - expected) <= limit * size).all()
                for other in others
            ):
                off = 0.0
                reordered.append(name)
        result.append((name, off, limit, rank))
    return result, reordered


def match_rows(first: np.ndarray, other: np.ndarray) -> tuple[int, int, int]:
    """How many rows are in both, in `first` alone, and in `other` alone, as multisets.

    Rows are equal if their numbers are, up to 1e-6 of the largest.
    """
    a, b = np.sort(first), np.sort(other)
    tolerance = 1e-6 * max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0), 1e-30)
    both = i = j = 0
    while i < len(a) and j < len(b):
        if abs(a[i] - b[j]) <= tolerance:
            both, i, j = both + 1, i + 1, j + 1
        elif a[i] < b[j]:
            i += 1
        else:
            j += 1
    return both, len(a) - both, len(b) - both


def rows_of(step: Step) -> np.ndarray:
    """All rows that a rank read for a step."""
    return np.concatenate(step.rows) if step.rows else np.zeros(0)
