"""Why a parallel run differs from the reference: the first cause that the records show.

A cause is looked for at the first step that differs, in the order in which a step happens:
weights, rows, gradients, the optimizer's options, the update, buffers.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from multigpu.errors import pluralize
from multigpu.prove.causes.apart import (
    changed_by_hooks,
    clipped_otherwise,
    missing_gradient,
    ranks_apart,
)
from multigpu.prove.causes.factor import clipped_factor, wrong_factor
from multigpu.prove.causes.loss import (
    batch_norm,
    compressed,
    gathered_constants,
    own_mean,
    random_numbers,
    unknown_gradients,
)
from multigpu.prove.causes.rows import (
    epoch_in_same_order,
    group_rows,
    optimizer_left_out,
    peers_read_the_same,
    wrong_rows,
)
from multigpu.prove.causes.scene import Cause, Scene
from multigpu.prove.causes.update import (
    wrong_buffer,
    wrong_frozen,
    wrong_options,
    wrong_update,
    wrong_weights,
)
from multigpu.prove.compare import Comparison, match_rows, rows_of
from multigpu.prove.record import RankRecord

# If a difference is a larger fraction of its limit, the rows of the step are compared.
SUSPECT = 0.3
# A limit that is a larger share of the gradients can hide a wrong row.
HIDES_ROWS = 0.02


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
        or peers_read_the_same(comparison)
        or epoch_in_same_order(comparison)
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
            "a proof ends there: take fewer --steps, or a smaller learning rate"
            if scene.number > 1
            else "look at how the model begins: layers and buffers that reset_parameters() "
            "does not reach after to_empty() are what was in memory",
            unknown=True,
        )
    skips = _skips(scene)
    if skips:
        return skips
    if weights.fails().any() or (weights.are_apart().any() and scene.number == 1):
        return wrong_weights(scene)
    if step.missing:
        return missing_gradient(scene)
    if gradients.fails().any() or gradients.are_apart().any():
        return next(filter(None, _gradient_causes(scene)))
    difference, limit = gradients.relative()
    if difference > SUSPECT * limit or (limit > HIDES_ROWS and _rows_are_exact(scene)):
        # Rounding could explain that, and rows are exact.
        rows = group_rows(scene) or wrong_rows(scene)
        if rows:
            return rows
    factor = clipped_factor(scene)
    if factor:
        return factor
    options = wrong_options(scene)
    if options:
        return options
    if after.fails().any() or after.are_apart().any():
        return wrong_update(scene)
    return wrong_buffer(scene)


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
        expected, rows = rows_of(scene.reference), rows_of(other)
        if match_rows(expected, rows)[0] < min(len(expected), len(rows)):
            return scene.cause(
                "random_reference",
                "two runs of the reference read different rows in their first step",
                remedy,
                unknown=True,
            )
        scale = np.linalg.norm(scene.reference.weights)
        if np.linalg.norm(scene.reference.weights - other.weights) > 1e-3 * scale:
            return scene.cause(
                "random_reference",
                "two runs of the reference begin with different weights",
                remedy,
                unknown=True,
            )
        if scene.reference.random:
            continue
        if step.kinds["gradients"].relative()[1] > 0.5:
            return scene.cause(
                "random_reference",
                "two runs of the reference differ by more than rounding in their first step",
                remedy,
                unknown=True,
            )
    return None


def _rows_are_exact(scene: Scene) -> bool:
    """Whether the rows of a step must be equal although its gradients are not: they were so
    in the optimizer's first step, and rounding does not change them.
    """
    steps = scene.comparison.steps
    first = Scene(scene.comparison, next(s for s in steps if s.key[0] == scene.step.key[0]))
    expected = rows_of(scene.reference)
    return not (group_rows(first) or wrong_rows(first)) and all(
        match_rows(expected, rows_of(band)) == (len(expected), 0, 0)
        for band in scene.step.band
    )


def _gradient_causes(scene: Scene) -> Iterator[Cause | None]:
    """The results of all checks of a step's gradients, in the order of the checks."""
    yield optimizer_left_out(scene)
    yield group_rows(scene)
    yield wrong_rows(scene)
    yield ranks_apart(scene)
    yield wrong_frozen(scene)
    # Before random_numbers: random numbers do not change gradients by a factor alone.
    yield wrong_factor(scene)
    yield random_numbers(scene)
    yield clipped_otherwise(scene)
    yield changed_by_hooks(scene)
    yield batch_norm(scene)
    yield gathered_constants(scene)
    yield compressed(scene)
    yield own_mean(scene)
    yield unknown_gradients(scene)


def _skips(scene: Scene) -> Cause | None:
    expected = scene.reference.skipped
    for step, rank in zip(scene.step.parallel, scene.step.ranks, strict=True):
        if step.skipped != expected:
            return scene.cause(
                "skipped_steps",
                f"before step {scene.number} the gradient scaler has skipped "
                f"{pluralize(step.skipped, 'step')} on rank {rank}, and {expected} on one GPU",
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
    scene = Scene(comparison, comparison.steps[0])
    if not any(step.present.any() for step in scene.step.reference):
        return scene.cause(
            "no_gradients",
            "no parameter of the reference's optimizer has a gradient",
            "make the optimizer from the parameters with which the loss is computed: after "
            "FSDP has wrapped the model, or after the model is moved or copied",
            unknown=True,
        )
    return scene.cause(
        "zero_gradients",
        "all gradients of the reference are zero, so there is nothing to compare",
        "prove a program whose loss depends on its parameters (the cross entropy over one "
        "class is zero for each input)",
        unknown=True,
    )


def _steps_differ(comparison: Comparison) -> Cause | None:
    counts = {record.rank: _counts(record) for record in comparison.parallel}
    expected = _counts(comparison.reference[0])
    for rank, steps in counts.items():
        if steps == expected:
            continue
        alone = len({number[0] for number in counts.values()}) > 1
        who = f"rank {rank}" if alone else f"{len(counts)} ranks"
        return Cause(
            "different_steps",
            f"{who} ended after {steps[0]} steps, and one GPU after {expected[0]}; the "
            "steps that both made agree",
            "let each rank make as many steps as one GPU makes: look at drop_last, at the "
            "length of a rank's part, and at what ends the loop",
            min(steps[0], expected[0]) + 1,
            rank=rank if alone else None,
        )
    return None


def _counts(record: RankRecord) -> Counter[int]:
    """How many steps each optimizer has made, up to the last one of the first optimizer.

    A run ends after that step, but its other optimizers may have made one step more.
    """
    first = [place for place, step in enumerate(record.steps) if step.optimizer == 0]
    return Counter(step.optimizer for step in record.steps[: first[-1] + 1] if first)
