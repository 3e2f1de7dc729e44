"""What one parallel run says by itself, without a reference."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from multigpu.prove.causes import Cause
from multigpu.prove.compare import APART, EPS, match_rows, rows_of, step_key
from multigpu.prove.record import Head, Part, RankRecord, Step

# How far the gradient may be from the mean of the local ones, relative to it; in 16 bit each
# rank's gradient is rounded to 8 or 11 bits.
MEAN = 1e-5
MEAN_16 = 3e-2


@dataclass
class Result:
    """Why the ranks differ, or what holds in how many steps.

    steps      the first optimizer's steps that all ranks made; with a cause, of all optimizers
    sentence   what holds; "" with a cause
    """

    steps: int
    cause: Cause | None = None
    sentence: str = ""
    notes: list[str] = field(default_factory=list)


def check(records: list[RankRecord]) -> Result:
    """Whether the ranks hold equal weights, step with the mean of their gradients, and read
    different rows.
    """
    keys = [step_key(step) for step in records[0].steps]
    by_key = [{step_key(step): step for step in record.steps} for record in records]
    common = [key for key in keys if all(key in steps for steps in by_key)]
    seen: dict[str, int] = defaultdict(int)
    for key in common:
        steps = [rank_steps[key] for rank_steps in by_key]
        cause = _step(records, steps, key, seen)
        if cause:
            return Result(len(common), cause)
    count = sum(key[0] == 0 for key in common)
    said = ["equal weights"]
    notes = []
    if seen["mean"]:
        said.append("the gradient is the mean of theirs")
    else:
        notes.append(
            "whether the gradient is the mean of theirs could not be seen: sharded "
            "parameters, no DDP, or an optimizer that reduces"
        )
    if seen["rows"]:
        said.append("no row is read twice in a step")
    if seen["same"]:
        notes.append("the ranks read the same rows, as with tensor parallelism")
    return Result(count, None, ", ".join(said), notes)


def _step(
    records: list[RankRecord], steps: list[Step], key: tuple[int, int], seen: dict[str, int]
) -> Cause | None:
    number = key[1] + 1
    heads = [record.heads[key[0]] for record in records]
    parts = heads[0].parts
    for place, part in enumerate(parts):
        for rank in range(1, len(steps)):
            other = heads[rank].parts
            if len(other) != len(parts) or _place(other[place]) != _place(part):
                continue
            who = f"differs between rank {records[0].rank} and rank {records[rank].rank}"
            more = {"rank": records[rank].rank, "parameter": part.name}
            if _apart(steps[0].weights[place], steps[rank].weights[place]):
                return Cause(
                    "weights_apart",
                    f"before step {number}, {part.name} {who}",
                    "the ranks begin with other weights, or something changes them between "
                    "steps: broadcast the weights, and change them on all ranks alike",
                    number,
                    **more,
                )
            # An optimizer that reduces averages the gradients itself.
            are_local = steps[0].placed or steps[rank].placed or steps[0].reduces
            gradients = steps[0].gradients[place], steps[rank].gradients[place]
            if not are_local and _apart(*gradients):
                return Cause(
                    "not_averaged",
                    f"in step {number} the gradient of {part.name} {who}",
                    "average the gradients of all ranks before optimizer.step(); with DDP, "
                    "synchronize in the last micro-batch",
                    number,
                    **more,
                )
    cause = _mean(records, steps, number, heads[0], seen)
    return cause or _rows(records, steps, number, heads, seen)


def _place(part: Part) -> tuple:
    return part.name, part.shape, part.shard


def _apart(first: np.ndarray, other: np.ndarray) -> bool:
    return not np.linalg.norm(other - first) <= 4 * EPS * np.linalg.norm(first)


def _mean(
    records: list[RankRecord],
    steps: list[Step],
    number: int,
    head: Head,
    seen: dict[str, int],
) -> Cause | None:
    parts, coarse = head.parts, head.coarse
    if any(step.local is None or not np.any(step.local) or step.reduces for step in steps):
        return None
    if any(part.shard is not None for part in parts):
        return None
    mean = np.mean([step.local for step in steps], axis=0)
    total = np.linalg.norm(mean)
    if len(steps[0].norms) > 1:
        return None
    clip = 1.0
    if steps[0].norms:
        norm, most = steps[0].norms[-1]
        clip = min(1.0, most / (norm + 1e-6))
    for place, part in enumerate(parts):
        for step, record in zip(steps, records, strict=True):
            if not step.present[place]:
                continue
            off = np.linalg.norm(step.gradients[place] - clip * mean[place])
            limit = max(MEAN if part.eps < 1e-6 else MEAN_16, 4 * coarse)
            if not off <= limit * np.linalg.norm(mean[place]) + limit * APART * total:
                share = off / max(np.linalg.norm(mean[place]), 1e-30)
                return Cause(
                    "not_the_mean",
                    f"in step {number} the gradient of {part.name} on rank {record.rank} is "
                    f"{share:.0%} from the mean of the ranks' own gradients",
                    "average the gradients of all ranks before optimizer.step(), once",
                    number,
                    record.rank,
                    part.name,
                )
    seen["mean"] += 1
    return None


def _rows(
    records: list[RankRecord],
    steps: list[Step],
    number: int,
    heads: list,
    seen: dict[str, int],
) -> Cause | None:
    rows = [rows_of(step) for step in steps]
    if any(not len(rank_rows) for rank_rows in rows):
        return None
    sharded = any(part.shard is not None for head in heads for part in head.parts)
    for later in range(1, len(rows)):
        for earlier in range(later):
            peers = heads[later].peers
            if peers is not None and heads[earlier].rank not in peers:
                continue
            both = match_rows(rows[later], rows[earlier])[0]
            both = both == min(len(rows[later]), len(rows[earlier])) and both
            if both and peers is None and sharded:
                seen["same"] += 1
                return None
            if both:
                return Cause(
                    "same_rows",
                    f"in step {number} rank {records[later].rank} reads {both} of the rows "
                    f"that rank {records[earlier].rank} reads",
                    "give each rank its own rows: DistributedSampler, or a slice by rank",
                    number,
                    records[later].rank,
                )
    seen["rows"] += 1
    return None
