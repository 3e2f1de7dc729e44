"""Whether the ranks together read the rows that the reference reads, in its order."""

from collections import Counter

import numpy as np

from multigpu.errors import pluralize
from multigpu.prove.causes.scene import Cause, Scene
from multigpu.prove.compare import Comparison, Key, match_rows, rows_of, step_key
from multigpu.prove.record import RankRecord


def wrong_rows(scene: Scene) -> Cause | None:
    """Whether the ranks together read the rows that the reference reads."""
    expected = scene.rows
    every = data_parallel_rows(scene)
    if not len(expected) or not every or any(not len(rows) for rows in every):
        return None
    together = np.concatenate(every)
    both, missing, more = match_rows(expected, together)
    loader = next((step.loader for step in scene.step.parallel if step.loader), None)
    ranks = len(every)
    if ranks > 1 and _alike(every) and both < len(together):
        if loader is None and not scene.heads[0].seeded:
            return _random_rows(
                scene,
                "each rank draws its rows at random, without a seed, so one GPU reads others",
            )
        return _same_rows(scene, every)
    # A pipeline's first step reads a micro-batch twice, to learn the shapes between stages.
    twice = scene.staged and _distinct(together) == _distinct(expected)
    if not missing and (not more or twice):
        return None
    left_out = _step_left_out(scene)
    if left_out:
        return left_out
    if (
        len(together) == ranks * len(expected)
        and ranks > 1
        and (both == len(expected) or both == 0)
    ):
        return _fewer_rows(scene, expected, together)
    reference_loader = scene.reference.loader
    if (
        loader
        and reference_loader
        and loader.sampler == "DistributedSampler"
        and _less(loader.rows, reference_loader.rows)
    ):
        return scene.cause(
            "rows_missing",
            f"in step {scene.number} each rank's data set has {loader.rows} rows, one GPU's "
            f"{reference_loader.rows}, and DistributedSampler divides it again: rows are "
            "never read",
            "divide the data set once: by DistributedSampler, or by a slice of each rank",
        )
    # A batch that is padded or cut to a length of its own changes some of its rows.
    if scene.padded and len(together) == len(expected) and 2 * both >= len(expected):
        return None
    repeated = len(together) - _distinct(together)
    if loader and loader.sampler == "DistributedSampler" and more and both and not missing:
        return scene.cause(
            "padding",
            f"in step {scene.number} the ranks read {len(together)} rows, and one GPU "
            f"{len(expected)}: DistributedSampler repeats {pluralize(more, 'row')} at the end "
            "of the epoch, to give each rank as many as the others",
            "use drop_last=True, or a data set that the number of ranks divides: a repeated "
            "row counts twice; if its weight is 0, divide the losses by the rows of all ranks",
        )
    if loader and loader.sampler == "DistributedSampler" and not more and 0 < missing < ranks:
        return scene.cause(
            "rows_dropped",
            f"in step {scene.number} the ranks read {len(together)} rows, and one GPU "
            f"{len(expected)}: DistributedSampler(drop_last=True) leaves out "
            f"{pluralize(missing, 'row')} at the end of the epoch, to give each rank as many "
            "as the others",
            "use a data set that the number of ranks divides, or accept it",
        )
    if not both and _order_of_last_epoch(scene):
        return _same_order(scene)
    epoch = scene.step.parallel[0].epoch
    if (
        loader
        and reference_loader
        and loader.sampler == "DistributedSampler"
        and _less(loader.batches, reference_loader.batches)
        and 0 < scene.reference.epoch < epoch
    ):
        return scene.cause(
            "rows_dropped",
            f"in step {scene.number} the ranks are in epoch {epoch}, and one GPU reads "
            f"{pluralize(len(expected), 'row')} of epoch {scene.reference.epoch}: the ranks "
            "leave out rows at the end of an epoch (drop_last=True of DistributedSampler or "
            "of the DataLoader)",
            "use a data set that the number of ranks divides, or accept it",
        )
    foreign = more - repeated
    if foreign > 0.25 * len(together):
        return _other_rows(scene, every, loader)
    if missing and not repeated:
        return scene.cause(
            "rows_missing",
            f"in step {scene.number} no rank reads {missing} of the {len(expected)} rows that "
            "one GPU reads",
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


def _step_left_out(scene: Scene) -> Cause | None:
    """Whether a rank has called backward more often than another since the last step."""
    calls = [len(step.losses) for step in scene.step.parallel]
    if scene.staged or 0 in calls or len(set(calls)) == 1:
        return None
    place = int(np.argmax(calls))
    rank = scene.step.ranks[place]
    return scene.cause(
        "step_left_out",
        f"before step {scene.number} rank {rank} has called backward {calls[place]} times, "
        f"and another rank {pluralize(min(calls), 'time')}: rank {rank} has left out a step, "
        "or has other micro-batches",
        "call optimizer.step() after as many micro-batches on each rank, whatever a rank's "
        "own loss or rows are",
        rank=rank,
    )


def optimizer_left_out(scene: Scene) -> Cause | None:
    """Whether a rank has made fewer steps of another optimizer than one GPU, up to here."""
    if scene.staged:
        return None
    reference = scene.comparison.reference[0]
    expected = _steps_before(reference, scene.step.key)
    for record in scene.comparison.parallel:
        steps = _steps_before(record, scene.step.key)
        for place, count in expected.items():
            if steps[place] < count:
                return scene.cause(
                    "step_left_out",
                    f"before step {scene.number} rank {record.rank} has made "
                    f"{pluralize(steps[place], 'step')} of the optimizer "
                    f"{reference.heads[place].kind} (number {place + 1}), and one GPU {count}",
                    "call step() of each optimizer on all ranks",
                    rank=record.rank,
                )
    return None


def _steps_before(record: RankRecord, key: Key) -> Counter[int]:
    """How many steps each optimizer has made before one of them makes its step `key`."""
    before: Counter[int] = Counter()
    for step in record.steps:
        if step_key(step) == key:
            break
        before[step.optimizer] += 1
    return before


def _less(number: int | None, other: int | None) -> bool:
    return number is not None and other is not None and number < other


def data_parallel_rows(scene: Scene) -> list[np.ndarray]:
    """The rows of each rank that takes a part of the batch, without ranks that read none."""
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
        part.shard is not None and part.in_module for head in heads for part in head.parts
    ):
        return ()
    first_head = next(head for head in heads if head.rank == first[0])
    same = [
        [part.shard for part in first_head.parts] == [part.shard for part in head.parts]
        for head in heads
    ]
    mine = {head.rank for head, equal in zip(heads, same, strict=True) if equal}
    return tuple(sorted(mine.union(first_head.peers or ()).intersection(first)))


def group_rows(scene: Scene) -> Cause | None:
    """Whether a rank reads other rows than the rank with which it shares layers."""
    mine = _data_parallel_ranks(scene)
    every = data_parallel_rows(scene)
    if not mine or not every:
        return None
    together = np.concatenate(every)
    all_rows = np.concatenate(list(map(rows_of, scene.step.parallel)))
    expected = scene.rows
    divided = match_rows(expected, all_rows) == (len(expected), 0, 0)
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


def _fewer_rows(scene: Scene, expected: np.ndarray, together: np.ndarray) -> Cause:
    return scene.cause(
        "fewer_rows",
        f"the reference reads {len(expected)} rows a step, and {scene.ranks} ranks together "
        f"read {len(together)}: each rank takes a whole batch",
        f"compare with a reference that reads {len(together)} rows a step: give its command "
        "with --reference",
        unknown=True,
    )


def _random_rows(scene: Scene, sentence: str) -> Cause:
    return scene.cause(
        "random_rows",
        f"in step {scene.number} {sentence}",
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
        return _random_rows(
            scene,
            "the ranks read other rows than one GPU does: each draws its own by its own seed, "
            "or takes another part of the data",
        )
    overlap = _overlap_of_epoch(scene) if loader.sampler == "DistributedSampler" else 0
    if overlap:
        return scene.cause(
            "own_data_sets",
            f"in step {scene.number} the ranks read other rows than one GPU does, and in the "
            f"epoch several ranks read the same {pluralize(overlap, 'row')}: each rank has "
            "split or shuffled the data set in its own way, and DistributedSampler divides "
            "what each has",
            "split and shuffle the data set alike on all ranks: random_split(dataset, "
            "lengths, torch.Generator().manual_seed(0)), or seed all ranks alike before it",
        )
    return scene.cause(
        "other_rows",
        f"in step {scene.number} the model gets other rows on the ranks than on one GPU: the "
        "data come in another order, or each rank changes them by its own random numbers "
        "(noise, mixup)",
        "let the reference read in the same order (DistributedSampler also with one rank, "
        "equal seeds), switch noise and augmentations off, or run `multigpu prove --self`, "
        "which needs no reference",
        unknown=True,
    )


def _overlap_of_epoch(scene: Scene) -> int:
    """How many rows of the first epoch several ranks read, beyond those that pad it.

    0 if the data set itself has equal rows: then it cannot be said.
    """
    steps = [step for step in scene.comparison.steps if step.key[0] == scene.step.key[0]]
    first = [Scene(scene.comparison, step) for step in steps if step.parallel[0].epoch == 1]
    by_step = [data_parallel_rows(first_scene) for first_scene in first]
    ranks = min(map(len, by_step), default=0)
    if ranks < 2:
        return 0
    by_rank = [np.concatenate([rows[rank] for rows in by_step]) for rank in range(ranks)]
    every = [np.concatenate([first_scene.rows for first_scene in first]), *by_rank]
    if any(_distinct(rows) < len(rows) for rows in every):
        return 0
    together = np.concatenate(by_rank)
    common = len(together) - _distinct(together)
    return common if common >= ranks else 0


def peers_read_the_same(comparison: Comparison) -> Cause | None:
    """Whether ranks that could divide a batch read the same rows in all steps."""
    scenes = [Scene(comparison, step) for step in comparison.steps]
    read = [data_parallel_rows(scene) for scene in scenes]
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
        len(rows_of(before)) == len(rows_of(other))
        and match_rows(rows_of(before), rows_of(other))[0] == len(rows_of(before)) > 0
        for before, other in zip(earlier[0].parallel, scene.step.parallel, strict=True)
    )


def epoch_in_same_order(comparison: Comparison) -> Cause | None:
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
