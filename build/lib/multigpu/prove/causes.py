"""Why a parallel run differs from the reference: the first cause that the records show.

A cause is looked for at the first step that differs, in the order in which a step happens:
weights, rows, gradients, the optimizer's options, the update, buffers.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from multigpu.errors import pluralize
from multigpu.prove.compare import Comparison, StepDistances, match_rows, rows_of
from multigpu.prove.record import IN_FUNCTION, Head, RankRecord, Step

# A gradient with this cosine to the reference's, and another length, has a wrong factor.
SAME_DIRECTION = 0.9999
# Of the limit: a larger difference makes the rows of a step be compared.
SUSPECT = 0.3
# The most that a rank's own tokens can count in a mean over all, if 1 is an equal share.
MOST_WEIGHT = 1.8
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
        """What works on a part of the batch."""
        return "rank" if self.ranks > 1 else "GPU"

    @property
    def number(self) -> int:
        return self.step.number

    @property
    def one(self) -> Step:
        """The reference's step."""
        return self.step.reference[0]

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

    def cause(self, kind: str, sentence: str, remedy: str, **more: object) -> Cause:
        return Cause(kind, sentence, remedy, self.number, **more)


def find(comparison: Comparison) -> Cause | None:
    """The cause of the first difference; None if the runs agree in all steps."""
    random = _reference_is_random(comparison)
    if random:
        return random
    for step in comparison.steps:
        cause = _of_step(Scene(comparison, step))
        if cause:
            return cause
    return (
        _all_gradients_are_zero(comparison)
        or _peers_read_the_same(comparison)
        or _epoch_in_same_order(comparison)
        or _steps_differ(comparison)
    )


def _of_step(scene: Scene) -> Cause | None:
    step = scene.step
    weights, gradients, after = (
        step.kinds[kind] for kind in ("weights", "gradients", "after")
    )
    if not all(np.isfinite(distances.scale).all() for distances in step.kinds.values()):
        return scene.cause(
            "not_finite",
            f"in step {scene.number} of the reference there are numbers that are NaN or inf",
            "a proof ends there: take fewer --steps, or a smaller learning rate",
            unknown=True,
        )
    skips = _skips(scene)
    if skips:
        return skips
    if weights.fails().any() or (weights.are_apart().any() and scene.number == 1):
        return _weights(scene)
    if step.missing:
        return _missing(scene)
    if gradients.fails().any() or gradients.are_apart().any():
        return next(filter(None, _gradient_causes(scene)))
    difference, limit = gradients.relative()
    if difference > SUSPECT * limit:
        # Rounding could explain that, and rows are exact.
        rows = _group_rows(scene) or _rows(scene)
        if rows:
            return rows
    factor = _clipped_factor(scene)
    if factor:
        return factor
    options = _options(scene)
    if options:
        return options
    if after.fails().any() or after.are_apart().any():
        return _update(scene)
    return _buffer(scene)


# ---- before anything is compared -----------------------------------------------------------


def _reference_is_random(comparison: Comparison) -> Cause | None:
    """Whether two runs of the reference differ by more than rounding, in their first step."""
    if not comparison.steps or not comparison.steps[0].band:
        return None
    step = comparison.steps[0]
    for other in step.band:
        scene = Scene(comparison, step)
        remedy = (
            "seed each generator that the program uses (numpy.random.default_rng(0), "
            "random.Random(0), torch.Generator().manual_seed(0), not the time), and prove "
            "again"
        )
        own, rows = rows_of(scene.one), rows_of(other)
        if match_rows(own, rows)[0] < min(len(own), len(rows)):
            return scene.cause(
                "random_reference",
                "two runs of the reference read different rows in their first step",
                remedy,
                unknown=True,
            )
        scale = np.linalg.norm(scene.one.weights)
        if np.linalg.norm(scene.one.weights - other.weights) > 1e-3 * scale:
            return scene.cause(
                "random_reference",
                "two runs of the reference begin with different weights",
                remedy,
                unknown=True,
            )
        if scene.one.random:
            continue
        if step.kinds["gradients"].relative()[1] > 0.5:
            return scene.cause(
                "random_reference",
                "two runs of the reference differ by more than rounding in their first step",
                remedy,
                unknown=True,
            )
    return None


# ---- weights before a step -----------------------------------------------------------------


def _weights(scene: Scene) -> Cause:
    step = scene.step
    distances = step.kinds["weights"]
    place, rank, between = _worst(scene, "weights")
    name = step.names[place]
    if scene.number > 1:
        where = f"rank {rank}'s" if between else "the parallel run's"
        return scene.cause(
            "update",
            f"{where} {name} differs before step {scene.number}, and did not after the step "
            "before it: something other than the optimizer's step has changed it",
            "look between optimizer.step() and the next forward: what writes weights there "
            "(an average, a clamp, a checkpoint) must do so on all ranks",
            rank=rank,
            parameter=name,
        )
    size = _size(distances.apart[place] if between else distances.off[place], distances, place)
    if between:
        return scene.cause(
            "initial_weights",
            f"rank {rank} begins with other weights than rank {scene.step.ranks[0]}: {name} "
            f"is {size} apart before step 1",
            "seed all ranks alike before the model is made, broadcast the weights from rank "
            "0, or wrap the model in DDP after its weights are loaded",
            rank=rank,
            parameter=name,
        )
    sharded = any(part.shard is not None for head in scene.heads for part in head.parts)
    return scene.cause(
        "initial_weights",
        f"the parallel run begins with other weights than the reference: {name} is {size} "
        "apart before step 1" + (" (each rank has drawn its own shard)" if sharded else ""),
        "let both runs begin alike: load a checkpoint, or make the whole model from a seed "
        "before it is sharded, not from the meta device"
        if sharded
        else "seed the model before it is made, with a seed that does not depend on the rank "
        "or the number of ranks",
        parameter=name,
        unknown=sharded,
    )


# ---- gradients -----------------------------------------------------------------------------


def _missing(scene: Scene) -> Cause:
    place, rank = scene.step.missing[0]
    name = scene.step.names[place]
    present = scene.one.present[place] if place < len(scene.one.present) else True
    have = "the reference has one" if present else "the reference has none"
    return scene.cause(
        "missing_gradient",
        f"in step {scene.number}, {name} has {'no gradient' if present else 'a gradient'} on "
        f"rank {rank}, and {have}",
        "each rank must use the same parameters in each step: with DDP, "
        "find_unused_parameters=True averages what only some ranks use; by hand, reduce "
        "zeros where grad is None",
        rank=rank,
        parameter=name,
    )


def _gradient_causes(scene: Scene) -> Iterator[Cause | None]:
    """What can be wrong with gradients, in the order in which it is asked."""
    yield _group_rows(scene)
    yield _rows(scene)
    yield _apart(scene)
    # A factor alone is not what random numbers do.
    yield _factor(scene)
    yield _drawn(scene)
    yield _clipping(scene)
    yield _hooked(scene)
    yield _batch_norm(scene)
    yield _gathered(scene)
    yield _compressed(scene)
    yield _own_mean(scene)
    yield _unknown_gradients(scene)


def _rows(scene: Scene) -> Cause | None:
    """Whether the ranks together read the rows that the reference reads."""
    one = rows_of(scene.one)
    every = _data_parallel_rows(scene)
    if not len(one) or not every or any(not len(rows) for rows in every):
        return None
    together = np.concatenate(every)
    both, missing, more = match_rows(one, together)
    loader = next((step.loader for step in scene.step.parallel if step.loader), None)
    ranks = len(every)
    if ranks > 1 and _alike(every) and both < len(together):
        if loader is None and not scene.heads[0].seeded:
            return _random_rows(scene, "each rank draws its rows at random, without a seed")
        return _same_rows(scene, every)
    # A pipeline's first step reads a micro-batch twice, to learn the shapes between stages.
    if not missing and (not more or scene.staged):
        return None
    if len(together) == ranks * len(one) and ranks > 1 and (both == len(one) or both == 0):
        return _fewer_rows(scene, one, together)
    own = scene.one.loader
    if (
        loader
        and own
        and loader.sampler == "DistributedSampler"
        and _less(loader.rows, own.rows)
    ):
        return scene.cause(
            "rows_missing",
            f"in step {scene.number} each rank's data set has {loader.rows} rows, one GPU's "
            f"{own.rows}, and DistributedSampler divides it again: rows are never read",
            "divide the data set once: by DistributedSampler, or by a slice of each rank",
        )
    repeated = len(together) - _distinct(together)
    if loader and loader.sampler == "DistributedSampler" and more and both and not missing:
        return scene.cause(
            "padding",
            f"in step {scene.number} the ranks read {len(together)} rows, and one GPU "
            f"{len(one)}: DistributedSampler repeats {pluralize(more, 'row')} at the end of "
            "the epoch, to give each rank as many as the others",
            "use drop_last=True, or a data set that the number of ranks divides; a repeated "
            "row counts twice",
        )
    if loader and loader.sampler == "DistributedSampler" and not more and 0 < missing < ranks:
        return scene.cause(
            "rows_dropped",
            f"in step {scene.number} the ranks read {len(together)} rows, and one GPU "
            f"{len(one)}: DistributedSampler(drop_last=True) leaves out "
            f"{pluralize(missing, 'row')} at the end of the epoch, to give each rank as many "
            "as the others",
            "use a data set that the number of ranks divides, or accept it",
        )
    if not both and _order_of_last_epoch(scene):
        return _same_order(scene)
    foreign = more - repeated
    if foreign > 0.25 * len(together):
        return _other_rows(scene, every, loader)
    if missing and not repeated:
        return scene.cause(
            "rows_missing",
            f"in step {scene.number} no rank reads {missing} of the {len(one)} rows that one "
            "GPU reads",
            "look at how rows are divided: the ranks' parts must cover the whole batch "
            "(integer division drops the rest, and a loader written by hand may drop more at "
            "the end of its data with more ranks)",
        )
    rank = _rank_that_repeats(every)
    return scene.cause(
        "rows_repeated",
        f"in step {scene.number} the ranks read {pluralize(repeated or more, 'row')} more "
        "than "
        f"once" + (f", and no rank reads {missing} of one GPU's" if missing else ""),
        "look at how rows are divided: the ranks' parts must not overlap",
        rank=scene.step.ranks[rank] if rank is not None else None,
    )


def _less(number: int | None, other: int | None) -> bool:
    return number is not None and other is not None and number < other


def _data_parallel_rows(scene: Scene) -> list[np.ndarray]:
    """The rows of each rank that shares the data-parallel work; of others that have any."""
    rows = [rows_of(step) for step in scene.step.parallel]
    mine = _data_parallel_ranks(scene)
    if mine:
        rows = [row for row, rank in zip(rows, scene.step.ranks, strict=True) if rank in mine]
    return [row for row in rows if len(row)]


def _data_parallel_ranks(scene: Scene) -> tuple[int, ...]:
    """Of ranks that share layers or a pipeline: one of each group, the first stage's.

    The others read the same rows, rightly, or what the stage before them has computed. Empty
    if each rank has the whole model.
    """
    heads = scene.heads
    first = scene.step.holders[0]
    if not scene.staged and not any(
        part.shard is not None for head in heads for part in head.parts
    ):
        return ()
    own = next(head for head in heads if head.rank == first[0])
    same = [
        [part.shard for part in own.parts] == [part.shard for part in head.parts]
        for head in heads
    ]
    mine = {head.rank for head, equal in zip(heads, same, strict=True) if equal}
    return tuple(sorted(mine.union(own.peers or ()).intersection(first)))


def _group_rows(scene: Scene) -> Cause | None:
    """Whether a rank reads other rows than the rank with which it shares layers."""
    mine = _data_parallel_ranks(scene)
    every = _data_parallel_rows(scene)
    if not mine or not every:
        return None
    together = np.concatenate(every)
    all_rows = np.concatenate(list(map(rows_of, scene.step.parallel)))
    one = rows_of(scene.one)
    divided = match_rows(one, all_rows) == (len(one), 0, 0)
    for step, rank in zip(scene.step.parallel, scene.step.ranks, strict=True):
        rows = rows_of(step)
        if rank not in scene.step.holders[0] or match_rows(rows, together)[0] == len(rows):
            continue
        return scene.cause(
            "group_rows",
            f"in step {scene.number} rank {rank} reads other rows than rank {mine[0]}, and "
            "both have parts of the same layers",
            "give the ranks that share layers (a tensor-parallel group) the same rows: "
            "DistributedSampler(dataset, number of groups, number of this rank's group); if "
            "the layers divide the rows themselves (input_layouts=Shard(0)), give a "
            "reference that reads the rows of all ranks with --reference",
            rank=rank,
            unknown=not (divided or step.loader),
        )
    return None


def _distinct(rows: np.ndarray) -> int:
    if not len(rows):
        return 0
    ordered = np.sort(rows)
    tolerance = 1e-6 * max(np.abs(ordered).max(), 1e-30)
    return 1 + int((np.diff(ordered) > tolerance).sum())


def _rank_that_repeats(every: list[np.ndarray]) -> int | None:
    for place in range(1, len(every)):
        before = np.concatenate(every[:place])
        if match_rows(every[place], before)[0]:
            return place
    return None


def _fewer_rows(scene: Scene, one: np.ndarray, together: np.ndarray) -> Cause:
    return scene.cause(
        "fewer_rows",
        f"the reference reads {len(one)} rows a step, and {scene.ranks} ranks together read "
        f"{len(together)}: each rank takes a whole batch",
        f"compare with a reference that reads {len(together)} rows a step: give its command "
        "with --reference",
        unknown=True,
    )


def _random_rows(scene: Scene, what: str) -> Cause:
    return scene.cause(
        "random_rows",
        f"in step {scene.number} {what}, so one GPU reads other rows",
        "draw the rows of a global batch with one seed on all ranks and take a slice by "
        "rank, or run `multigpu prove --self`, which needs no reference",
        unknown=True,
    )


def _other_rows(scene: Scene, every: list[np.ndarray], loader: object) -> Cause:
    own_order = loader is not None and loader.sampler == "RandomSampler" and len(every) > 1
    if own_order:
        return scene.cause(
            "not_divided",
            f"in step {scene.number} each rank reads rows from the whole data set in an "
            "order of its own (its DataLoader has a RandomSampler)",
            "give each rank its own part: DataLoader(…, sampler=DistributedSampler(dataset))",
        )
    if loader is None:
        return _random_rows(scene, "each rank draws its own rows by its own seed")
    return scene.cause(
        "other_rows",
        f"in step {scene.number} the ranks read other rows than one GPU does, in another "
        "order",
        "let the reference read in the same order (DistributedSampler also with one rank, "
        "equal seeds), switch random augmentations off, or run `multigpu prove --self`, which "
        "needs no reference",
        unknown=True,
    )


def _apart(scene: Scene) -> Cause | None:
    """Whether ranks that should have averaged their gradients have different ones."""
    step = scene.step
    distances = step.kinds["gradients"]
    apart = distances.are_apart()
    if not apart.any():
        return None
    norms = [parallel.norms for parallel in step.parallel]
    if any(norms) and not all(norms):
        return _some_clip(scene, norms)
    same_direction = step.between > SAME_DIRECTION
    if all(norms) and same_direction and _differ([pair[-1][0] for pair in norms]):
        return _clipped_own(scene, norms)
    heads = scene.heads
    rank = _rank_off(distances, int(np.argmax(apart)))
    names = [name for name, is_apart in zip(step.names, apart, strict=True) if is_apart]
    parts = {part.name: part for part in heads[0].parts}
    size = _ratio_text(distances)
    micro = max(len(parallel.losses) for parallel in step.parallel)
    if len(names) < int((distances.scale > 0).sum()):
        return _some_apart(scene, names, parts, rank)
    if not heads[0].uses_ddp:
        return scene.cause(
            "not_averaged",
            f"in step {scene.number} the ranks step with their own gradients, {size} apart: "
            "nothing averages them",
            "wrap the model in DistributedDataParallel, or all-reduce each gradient and "
            "divide by the number of ranks before optimizer.step()",
            rank=rank,
            parameter=names[0],
        )
    forward = [flag for parallel in step.parallel for flag in parallel.forward_sync]
    backward = [flag for parallel in step.parallel for flag in parallel.backward_sync]
    if not all(forward) or not all(backward):
        return scene.cause(
            "wrong_micro_batch",
            f"in step {scene.number} the ranks step with their own gradients, {size} apart: "
            f"DDP did not synchronize the last of {micro} micro-batches"
            if micro > 1
            else f"in step {scene.number} the ranks step with their own gradients, {size} "
            f"apart: the program has switched off DDP's synchronization",
            "DDP decides in forward: call forward and backward of all micro-batches but the "
            "last inside model.no_sync(), and set require_backward_grad_sync before forward",
            rank=rank,
            parameter=names[0],
        )
    return scene.cause(
        "not_averaged",
        f"in step {scene.number} the ranks step with their own gradients, {size} apart, "
        "although a module is wrapped in DDP"
        + ("" if forward else ": its forward is not called"),
        "call the DDP module itself and not model.module, leave its hooks in place, and "
        "reduce each gradient before optimizer.step()",
        rank=rank,
        parameter=names[0],
    )


def _some_apart(scene: Scene, names: list[str], parts: dict, rank: int) -> Cause:
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    uses_ddp = scene.heads[0].uses_ddp
    outside = uses_ddp and not any(name in parts and parts[name].in_ddp for name in names)
    if outside and any(part.in_ddp for part in parts.values()):
        return scene.cause(
            "outside_ddp",
            f"in step {scene.number} the ranks' gradients of {listed} differ, and the others "
            f"are averaged: DDP does not hold {'it' if len(names) == 1 else 'them'}",
            "put all parameters into the module that DDP wraps, and do not exclude them "
            "(_ddp_params_and_buffers_to_ignore), or average them by hand",
            rank=rank,
            parameter=names[0],
        )
    return scene.cause(
        "parameter_not_averaged",
        f"in step {scene.number} the ranks' gradients of {listed} differ, and the others are "
        "averaged",
        "reduce the gradients of all parameters; with tensor or sequence parallelism also "
        "those of parameters that each rank holds whole",
        rank=rank,
        parameter=names[0],
    )


def _drawn(scene: Scene) -> Cause | None:
    drawn = scene.one.random
    if not drawn:
        return None
    where = "its forward" if drawn[0] == "forward" else drawn[0] or "the model"
    return scene.cause(
        "random_numbers",
        f"the model draws random numbers in {where}, and each rank draws others than one GPU",
        "switch that off for the proof (p=0 in Dropout, no noise), and prove again",
        unknown=True,
    )


def _factor(scene: Scene) -> Cause | None:
    """Whether gradients have the reference's direction and another length."""
    step = scene.step
    fails = step.kinds["gradients"].fails()
    _dot, square, other = step.products
    if not square * other:
        return None
    wrong = [
        place
        for place in np.flatnonzero(fails)
        if step.kinds["gradients"].scale[place] > 1e-5 * math.sqrt(square)
    ]
    if not wrong or any(step.cosine[place] < SAME_DIRECTION for place in wrong):
        return None
    ratios = step.ratio[wrong]
    ratio = float(np.median(ratios))
    if np.abs(ratios - ratio).max() > NEAR * abs(ratio):
        return None
    # Clipping has changed the factor.
    ratio = _ratio_of_norms(scene) or ratio
    if abs(ratio - 1) < NEAR:
        return None
    names = [step.names[place] for place in wrong]
    whole = len(wrong) >= int((step.kinds["gradients"].scale > 1e-5 * math.sqrt(square)).sum())
    what = "the gradients are" if whole else f"the gradient of {names[0]} is"
    whose = "those of one GPU" if whole else "that of one GPU"
    said = f"in step {scene.number} {what} {_times(ratio)} {whose}"
    clipped = _clipping(scene)
    if clipped:
        return clipped
    return _named_factor(scene, ratio, said, None if whole else names[0])


def _ratio_of_norms(scene: Scene) -> float | None:
    """The factor between the gradients' norms before clipping, if all ranks have the same."""
    norms = [step.norms[-1] for step in scene.step.parallel if step.norms]
    if len(norms) != scene.ranks or not scene.one.norms or not scene.one.norms[-1][0]:
        return None
    if _differ([norm for norm, _ in norms]) or _differ([norms[0][1], scene.one.norms[-1][1]]):
        return None
    return norms[0][0] / scene.one.norms[-1][0]


def _clipped_factor(scene: Scene) -> Cause | None:
    """Whether clipping alone makes gradients equal that have a wrong factor."""
    ratio = _ratio_of_norms(scene)
    limit = max(NEAR, scene.step.kinds["gradients"].relative()[1])
    if ratio is None or not abs(ratio - 1) > limit:
        return None
    said = (
        f"in step {scene.number} clipping hides that, before it, the gradients are "
        f"{_times(ratio)} those of one GPU"
    )
    return _named_factor(scene, ratio, said, None)


def _named_factor(scene: Scene, ratio: float, said: str, name: str | None) -> Cause:
    one = sum(scene.one.losses)
    ranks = scene.ranks
    losses = [sum(step.losses) for step in scene.step.parallel]
    equal = len(losses) > 1 and not _differ(losses)
    micro = max(len(step.losses) for step in scene.step.parallel)
    fewer = len(scene.one.losses) / max(micro, 1)
    more: dict = {"parameter": name}

    def near(value: float, wanted: float) -> bool:
        return abs(value - wanted) <= NEAR * abs(wanted)

    if micro > 1 and fewer > 1 and near(ratio, 1 / fewer) and not _is_divided(scene):
        return _micro_batches(scene, said, micro, more)
    if near(ratio, 1 / ranks):
        if scene.step.parallel[0].gathered.get("all_gather", 0) + scene.step.parallel[
            0
        ].gathered.get("all_gather_into_tensor", 0):
            return _gathered_cause(scene, said)
        if equal and scene.step.parallel[0].gathered.get("all_reduce"):
            return scene.cause(
                "loss_reduced",
                f"{said}: all ranks go backward from the same all-reduced loss, of which "
                "each can change only its own part",
                "go backward from the rank's own loss, and reduce a detached copy for "
                "printing",
                **more,
            )
        if _is_sum(scene.step.parallel[0].made):
            return scene.cause(
                "sum_loss",
                f"{said}: the loss is a sum over a rank's rows, and DDP takes the mean of "
                "the ranks' gradients",
                "use the mean over rows as the loss, or multiply the sum by the number of "
                "ranks",
                **more,
            )
        return scene.cause(
            "divided_by_ranks",
            f"{said}: something divides by the number of ranks twice",
            "DDP and FSDP divide by the number of ranks already: do not divide the loss or "
            "the gradients again",
            **more,
        )
    if near(ratio, ranks) and not (near(ratio, micro) and _added(losses, one)):
        return scene.cause(
            "multiplied_by_ranks",
            f"{said}: the gradients of {ranks} ranks are added, and not divided",
            "divide by the number of ranks after all_reduce(SUM), or use ReduceOp.AVG",
            **more,
        )
    for times in sorted({micro, fewer}):
        if times > 1 and near(ratio, times):
            return _micro_batches(scene, said, micro, more)
    return scene.cause(
        "factor",
        said,
        "look at what divides or multiplies the loss or the gradients: numbers of ranks, "
        "micro-batches, rows or tokens",
        **more,
    )


def _micro_batches(scene: Scene, said: str, micro: int, more: dict) -> Cause:
    return scene.cause(
        "micro_batches_added",
        f"{said}: the gradients of {micro} micro-batches are added, and not averaged",
        "divide each micro-batch's loss by the number of micro-batches",
        **more,
    )


def _is_divided(scene: Scene) -> bool:
    """Whether the last operation of the loss divides it."""
    return any(name.startswith(("Div", "Mul")) for name in scene.step.parallel[0].made[:1])


def _is_sum(made: list[str]) -> bool:
    """Whether a loss is a sum that nothing divides, by the operations that made it."""
    for name in made:
        if name.startswith(("Div", "Mean")) or name.endswith(" mean"):
            return False
        if name.startswith("Sum") or name.endswith(" sum"):
            return True
    return False


def _added(losses: list[float], one: float) -> bool:
    """Whether the losses of a rank's micro-batches add up to more than one GPU's loss."""
    mean = sum(losses) / max(len(losses), 1)
    return abs(mean) > 1.5 * abs(one)


def _clipping(scene: Scene) -> Cause | None:
    norms = [step.norms for step in scene.step.parallel]
    if not all(norms) or not scene.one.norms:
        return None
    if _differ([pairs[-1][0] for pairs in norms]):
        return _clipped_own(scene, norms)
    limits = [pairs[-1][1] for pairs in norms]
    if _differ([*limits, scene.one.norms[-1][1]]):
        return scene.cause(
            "clipping",
            f"in step {scene.number} gradients are clipped to a norm of {limits[0]:.3g}, and "
            f"on one GPU to {scene.one.norms[-1][1]:.3g}",
            "clip to the same norm, whatever the number of ranks",
        )
    return None


def _some_clip(scene: Scene, norms: list) -> Cause:
    rank = next(
        rank
        for rank, pairs in zip(scene.step.ranks, norms, strict=True)
        if bool(pairs) != bool(scene.one.norms)
    )
    clips = "clips" if not scene.one.norms else "does not clip"
    return scene.cause(
        "clipping",
        f"in step {scene.number} rank {rank} {clips} its gradients, and one GPU "
        f"{'does not' if not scene.one.norms else 'does'}",
        "call clip_grad_norm_ on all ranks",
        rank=rank,
    )


def _clipped_own(scene: Scene, norms: list) -> Cause:
    rank = int(np.argmax([abs(pairs[-1][0] - norms[0][-1][0]) for pairs in norms]))
    return scene.cause(
        "clipped_before_average",
        f"in step {scene.number} each rank clips by the norm of its own gradients "
        f"({norms[0][-1][0]:.3g} on rank {scene.step.ranks[0]}, {norms[rank][-1][0]:.3g} on "
        f"rank {scene.step.ranks[rank]})",
        "clip after the gradients are averaged; with FSDP1 by model.clip_grad_norm_, which "
        "adds the norms of all shards",
        rank=scene.step.ranks[rank],
    )


def _hooked(scene: Scene) -> Cause | None:
    fails = scene.step.kinds["gradients"].fails()
    hooked = {part.name for part in scene.heads[0].parts if part.hooked}
    names = [name for name, wrong in zip(scene.step.names, fails, strict=True) if wrong]
    if scene.ranks < 2 or not hooked.intersection(names):
        return None
    name = next(name for name in names if name in hooked)
    return scene.cause(
        "clipped_before_average",
        f"in step {scene.number} the gradient of {name} is not that of one GPU, and a hook "
        "that the program registered changes it on each rank before the ranks average",
        "change gradients after they are averaged: between backward and optimizer.step()",
        parameter=name,
    )


def _batch_norm(scene: Scene) -> Cause | None:
    """Whether what the model returns for a row depends on the other rows of the batch."""
    norms = scene.heads[0].norms
    replicas = max(scene.ranks, scene.heads[0].gpus)
    # A stage of a pipeline returns other numbers than the whole model.
    if replicas < 2 or (not norms and (scene.staged or not _outputs_differ(scene))):
        return None
    which = (
        f"{norms[0]} normalizes over the rows of each {scene.replica} alone"
        if norms
        else "what the model returns for a row is not what it returns on one GPU: a layer "
        "computes with the other rows of its batch, as BatchNorm does"
    )
    return scene.cause(
        "batch_norm",
        f"in step {scene.number} the ranks read the same rows as one GPU, and {which}",
        "use GroupNorm or LayerNorm, or DDP with SyncBatchNorm.convert_sync_batchnorm(model); "
        "or accept it: then this run does not compute what one GPU computes",
        parameter=norms[0].partition(" ")[2] if norms else None,
    )


def _outputs_differ(scene: Scene) -> bool:
    """Whether a row has another output on a rank than on one GPU, with the same weights."""
    one = _pairs(scene.one)
    if not len(one):
        return False
    spread = max(float(np.abs(one[:, 1]).max()), 1e-30)
    for step in scene.step.parallel:
        for row, output in _pairs(step):
            place = int(np.argmin(np.abs(one[:, 0] - row)))
            same = abs(one[place, 0] - row) <= 1e-6 * max(
                float(np.abs(one[:, 0]).max()), 1e-30
            )
            if same and not abs(one[place, 1] - output) <= 1e-2 * spread:
                return True
    return False


def _pairs(step: Step) -> np.ndarray:
    """(row's number, output's number) of all rows whose outputs are known, (n, 2)."""
    pairs = [
        np.stack([rows, outputs], axis=1)
        for rows, outputs in zip(step.rows, step.outputs, strict=True)
        if len(outputs) == len(rows)
    ]
    return np.concatenate(pairs) if pairs else np.zeros((0, 2))


def _gathered(scene: Scene) -> Cause | None:
    gathered = scene.step.parallel[0].gathered
    if gathered.get(IN_FUNCTION):
        return scene.cause(
            "gathered_constants",
            f"in step {scene.number} the gradients are not those of one GPU: the program "
            "gathers tensors in an autograd.Function of its own, and its backward does not "
            "bring the gradients of all ranks' losses back",
            "in its backward, all-reduce the gradients of all parts, then take the rank's own "
            "part, as torch.distributed.nn.functional.all_gather does; mind that DDP divides "
            "by the number of ranks",
        )
    if not gathered.get("all_gather") and not gathered.get("all_gather_into_tensor"):
        return None
    return _gathered_cause(
        scene, f"in step {scene.number} the gradients are not those of one GPU"
    )


def _gathered_cause(scene: Scene, said: str) -> Cause:
    return scene.cause(
        "gathered_constants",
        f"{said}: the program gathers tensors by dist.all_gather, whose result is a constant "
        "for autograd, so no gradient goes back to the ranks that sent them",
        "use torch.distributed.nn.functional.all_gather, and mind that DDP divides by the "
        "number of ranks",
    )


def _compressed(scene: Scene) -> Cause | None:
    hooks = [hook for hook in scene.heads[0].hooks if "allreduce" not in hook]
    if not hooks:
        return None
    return scene.cause(
        "compressed",
        f"in step {scene.number} the gradients are "
        f"{_ratio_text(scene.step.kinds['gradients'])} from those of one GPU: DDP's "
        f"communication hook {hooks[0]} changes them",
        "prove without the hook; with it, this run does not compute what one GPU computes",
    )


def _own_mean(scene: Scene) -> Cause | None:
    """Whether the mean of the ranks' losses is not the reference's loss."""
    losses = [sum(step.losses) for step in scene.step.parallel if step.losses]
    one = sum(scene.one.losses)
    if len(losses) < 2 or not one:
        return None
    every = _data_parallel_rows(scene)
    counts = [len(rows) for rows in every]
    if len(set(counts)) > 1:
        return scene.cause(
            "own_mean",
            f"in step {scene.number} the ranks have {', '.join(map(str, counts))} rows, each "
            "takes the mean over its own, and the mean over ranks weighs them alike",
            "give all ranks as many rows, or weigh each rank's loss by its number of rows",
        )
    if abs(sum(losses) / len(losses) - one) <= 1e-5 * abs(one) and not scene.one.losses[1:]:
        return None
    if not scene.one.losses[1:] and not _is_weighted_mean(one, losses):
        return _other_loss(scene, losses, one)
    return scene.cause(
        "own_mean",
        f"in step {scene.number} the ranks read the rows of one GPU, and the mean of their "
        f"losses ({sum(losses) / len(losses):.5g}) is not its loss ({one:.5g}): each rank "
        "takes the mean over its own tokens or rows, and the mean over ranks weighs them "
        "alike",
        "divide each rank's sum by the number of tokens of all ranks (all_reduce the "
        "number), and multiply by the number of ranks, because DDP takes the mean",
    )


def _is_weighted_mean(one: float, losses: list[float]) -> bool:
    """Whether a loss is a mean of the ranks' losses, none of which has a weight above
    MOST_WEIGHT / ranks.
    """
    most = min(1.0, MOST_WEIGHT / len(losses))
    slack = 1e-5 * abs(one)
    bounds = []
    for ordered in (sorted(losses), sorted(losses, reverse=True)):
        left, total = 1.0, 0.0
        for loss in ordered:
            weight = min(most, left)
            left, total = left - weight, total + weight * loss
        bounds.append(total)
    return bounds[0] - slack <= one <= bounds[1] + slack


def _other_loss(scene: Scene, losses: list[float], one: float) -> Cause:
    """No mean of the ranks' losses, weighed by their tokens, is the reference's loss."""
    place = int(np.argmax([abs(loss - one) for loss in losses]))
    rank = scene.step.ranks[place]
    return scene.cause(
        "other_loss",
        f"in step {scene.number} the ranks read the rows of one GPU, and the loss of rank "
        f"{rank} is {losses[place]:.5g}, that of one GPU {one:.5g}: no numbers of tokens or "
        "rows make that a mean of the ranks' losses",
        "look at what the loss is computed from on a rank: labels or positions that do not "
        "belong to its rows, rows that it compares with its own rows alone",
        rank=rank,
    )


def _unknown_gradients(scene: Scene) -> Cause:
    place, rank, _ = _worst(scene, "gradients")
    distances = scene.step.kinds["gradients"]
    size = _size(distances.off[place], distances, place)
    return scene.cause(
        "gradients",
        f"in step {scene.number} the gradient of {scene.step.names[place]} on rank {rank} is "
        f"{size} from that of one GPU (cosine {scene.step.cosine[place]:.4f}), with the same "
        "weights and rows",
        "look at what the ranks compute otherwise: the loss's normalization, masks, a layer "
        "that sees the whole batch, a reduction that is missing in backward",
        rank=rank,
        parameter=scene.step.names[place],
    )


# ---- the update ----------------------------------------------------------------------------


def _options(scene: Scene) -> Cause | None:
    """Whether the optimizer's options are the reference's, on all ranks."""
    for step, rank in zip(scene.step.parallel, scene.step.ranks, strict=True):
        for place, (own, other) in enumerate(
            zip(scene.one.options, step.options, strict=False)
        ):
            for name in own:
                if name not in other or not _differ([own[name], other[name]]):
                    continue
                kind = "learning_rate" if name == "lr" else "optimizer_options"
                alone = not all(
                    _differ([own[name], others.options[place].get(name, own[name])])
                    for others in scene.step.parallel
                    if len(others.options) > place
                )
                who = f"on rank {rank}" if alone else f"with {scene.ranks} ranks"
                said = (
                    f"in step {scene.number} {name} is {_short(other[name])} {who}, and "
                    f"{_short(own[name])} on one GPU"
                )
                if kind == "learning_rate" and scene.number > 1:
                    return _scheduler(scene, said, rank if alone else None)
                return scene.cause(
                    kind,
                    f"the gradients are right, and the update is not: {said}",
                    "take the same options, whatever the number of ranks (a rate that grows "
                    "with the ranks belongs to a batch that grows with them)",
                    rank=rank if alone else None,
                )
    return None


def _scheduler(scene: Scene, said: str, rank: int | None) -> Cause:
    rates = {
        step.kinds and step.number: step.reference[0].options[0]["lr"]
        for step in scene.comparison.steps
        if step.key[0] == scene.step.key[0]
    }
    mine = scene.step.parallel[0].options[0]["lr"]
    later = [
        number
        for number, rate in rates.items()
        if number > scene.number and not _differ([rate, mine])
    ]
    ahead = (
        f" (which one GPU has in step {later[0]})"
        if later and later[0] - 1 == scene.ranks * (scene.number - 1)
        else ""
    )
    return scene.cause(
        "scheduler",
        f"the gradients are right, and the update is not: {said}{ahead}; the rates were "
        "equal before",
        "step the scheduler once for each optimizer step, on all ranks (Accelerate's steps "
        "it once for each rank, unless split_batches or step_scheduler_with_optimizer=False)",
        rank=rank,
    )


def _update(scene: Scene) -> Cause:
    place, rank, between = _worst(scene, "after")
    name = scene.step.names[place]
    where = f"on rank {rank}" if between else "in the parallel run"
    return scene.cause(
        "optimizer_state",
        f"the gradients are right, and the update is not: in step {scene.number} the "
        f"optimizer changes {name} otherwise {where}, with equal weights, gradients and "
        "options",
        "compare the optimizer's state (momentum, second moments, step counts): all ranks "
        "must load it, and none may reset it",
        rank=rank if between else None,
        parameter=name,
    )


def _buffer(scene: Scene) -> Cause | None:
    for name, off, limit, rank in scene.step.buffers:
        if not off <= limit:
            return scene.cause(
                "buffers",
                f"weights and gradients agree, and the buffer {name} does not: on rank "
                f"{rank} it is {_percent(off)} from that of one GPU in step {scene.number}",
                "compute the buffer from the rows of all ranks (all_reduce what it is made "
                "of)",
                rank=rank,
                parameter=name,
            )
    return None


# ---- the steps themselves ------------------------------------------------------------------


def _skips(scene: Scene) -> Cause | None:
    own = scene.one.skipped
    for step, rank in zip(scene.step.parallel, scene.step.ranks, strict=True):
        if step.skipped != own:
            return scene.cause(
                "skipped_steps",
                f"before step {scene.number} the gradient scaler has skipped "
                f"{pluralize(step.skipped, 'step')} on rank {rank}, and {own} on one GPU",
                "begin with a smaller loss scale (GradScaler(init_scale=1024)), so that no "
                "step is skipped, and prove again",
                rank=rank,
                unknown=True,
            )
    return None


def _all_gradients_are_zero(comparison: Comparison) -> Cause | None:
    if not comparison.steps or any(
        step.kinds["gradients"].scale.any() for step in comparison.steps
    ):
        return None
    return Scene(comparison, comparison.steps[0]).cause(
        "zero_gradients",
        "all gradients of the reference are zero, so there is nothing to compare",
        "prove a program whose loss depends on its parameters (the cross entropy over one "
        "class is zero for each input)",
        unknown=True,
    )


def _peers_read_the_same(comparison: Comparison) -> Cause | None:
    """Whether ranks that hold the same parameters read the same rows in all steps, in vain."""
    scenes = [Scene(comparison, step) for step in comparison.steps]
    read = [_data_parallel_rows(scene) for scene in scenes]
    if read and all(len(every) > 1 and len(every[0]) and _alike(every) for every in read):
        return _same_rows(scenes[0], read[0])
    return None


def _alike(every: list[np.ndarray]) -> bool:
    """Whether all ranks read the same rows."""
    return all(
        len(rows) == len(every[0]) and match_rows(rows, every[0])[0] == len(rows)
        for rows in every[1:]
    )


def _same_rows(scene: Scene, every: list[np.ndarray]) -> Cause:
    return scene.cause(
        "same_rows",
        f"in step {scene.number} all {len(every)} ranks read the same {len(every[0])} rows",
        "give each rank its own: DataLoader(…, sampler=DistributedSampler(dataset)), or a "
        "slice by rank",
    )


def _order_of_last_epoch(scene: Scene) -> bool:
    """Whether the ranks read in this step what they read as many steps into the last epoch."""
    steps = [step for step in scene.comparison.steps if step.key[0] == scene.step.key[0]]
    now = scene.step.parallel[0]
    begins = {}
    for step in steps:
        begins.setdefault(step.parallel[0].epoch, step.key[1])
    if now.epoch < 2 or now.epoch - 1 not in begins:
        return False
    offset = now.number - begins[now.epoch]
    earlier = [step for step in steps if step.key[1] == begins[now.epoch - 1] + offset]
    return bool(earlier) and all(
        len(rows_of(one)) == len(rows_of(other))
        and match_rows(rows_of(one), rows_of(other))[0] == len(rows_of(one)) > 0
        for one, other in zip(earlier[0].parallel, scene.step.parallel, strict=True)
    )


def _epoch_in_same_order(comparison: Comparison) -> Cause | None:
    """A shuffling DistributedSampler whose second epoch has the order of the first."""
    for step in comparison.steps:
        scene = Scene(comparison, step)
        loader = step.parallel[0].loader
        shuffles = loader is not None and loader.shuffle
        if shuffles and loader.sampler == "DistributedSampler" and _order_of_last_epoch(scene):
            return _same_order(scene)
    return None


def _same_order(scene: Scene) -> Cause:
    return scene.cause(
        "epoch_order",
        f"in step {scene.number}, of epoch {scene.step.parallel[0].epoch}, the ranks read "
        "the rows in the order of the epoch before",
        "call sampler.set_epoch(epoch) at the beginning of each epoch: without it "
        "DistributedSampler shuffles each epoch alike",
    )


def _steps_differ(comparison: Comparison) -> Cause | None:
    counts = {record.rank: _counts(record) for record in comparison.parallel}
    one = _counts(comparison.reference[0])
    for rank, steps in counts.items():
        if steps == one:
            continue
        alone = len({number[0] for number in counts.values()}) > 1
        who = f"rank {rank}" if alone else f"{len(counts)} ranks"
        return Cause(
            "different_steps",
            f"{who} ended after {steps[0]} steps, and one GPU after {one[0]}; the steps that "
            "both made agree",
            "let each rank make as many steps as one GPU makes: look at drop_last, at the "
            "length of a rank's part, and at what ends the loop",
            min(steps[0], one[0]) + 1,
            rank=rank if alone else None,
        )
    return None


def _counts(record: RankRecord) -> Counter[int]:
    """How many steps each optimizer has made, up to the last one of the first optimizer.

    A run ends after that one: the reference's others may have made one step more.
    """
    first = [place for place, step in enumerate(record.steps) if step.optimizer == 0]
    return Counter(step.optimizer for step in record.steps[: first[-1] + 1] if first)


# ---- words ---------------------------------------------------------------------------------


def _worst(scene: Scene, kind: str) -> tuple[int, int, bool]:
    """(parameter, rank, whether ranks differ from each other) of the largest difference."""
    distances = scene.step.kinds[kind]
    apart = distances.are_apart()
    if apart.any():
        place = _argmax(np.where(apart, distances.apart / (distances.scale + 1e-30), -1))
        return place, _rank_off(distances, place), True
    place = _argmax(distances.off / np.maximum(distances.limit, 1e-30))
    return place, int(distances.off_rank[place]), False


def _rank_off(distances: object, place: int) -> int:
    """The rank that is farthest from the reference, or else from the first rank."""
    off = distances.off[place] > distances.limit[place]
    return int((distances.off_rank if off else distances.apart_rank)[place])


def _argmax(values: np.ndarray) -> int:
    return int(np.argmax(np.where(np.isnan(values), np.inf, values)))


def _differ(values: list) -> bool:
    """Whether numbers differ by more than 1e-6 of the largest, or other values at all."""
    if not all(isinstance(value, int | float) for value in values):
        return len(set(map(str, values))) > 1
    most = max(abs(value) for value in values)
    return not max(values) - min(values) <= 1e-6 * most


def _size(distance: float, distances: object, place: int) -> str:
    return _percent(distance / max(float(distances.scale[place]), 1e-30))


def _ratio_text(distances: object) -> str:
    apart = float(np.linalg.norm(np.maximum(distances.apart, distances.off)))
    return _percent(apart / max(float(np.linalg.norm(distances.scale)), 1e-30))


def _percent(share: float) -> str:
    if math.isnan(share):
        return "NaN"
    if share >= 0.01:
        return f"{share:.0%}"
    return f"{share:.3%}" if share >= 1e-5 else f"{share:.1e} of the norm"


def _times(ratio: float) -> str:
    return f"{ratio:.3f} times"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
