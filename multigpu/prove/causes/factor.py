"""Gradients with the reference's direction and another length."""

import numpy as np

from multigpu.prove.causes.apart import clipped_otherwise
from multigpu.prove.causes.rows import data_parallel_rows
from multigpu.prove.causes.scene import NEAR, SAME_DIRECTION, Cause, Scene, differ, times


def wrong_factor(scene: Scene) -> Cause | None:
    """Whether gradients have the reference's direction and another length."""
    step = scene.step
    gradients = step.kinds["gradients"]
    fails = gradients.fails()
    # A parameter with a gradient as small as rounding has any factor.
    counts = gradients.scale > 1e-5 * np.linalg.norm(gradients.scale)
    wrong = np.flatnonzero(fails & counts)
    if not len(wrong) or any(step.cosine[place] < SAME_DIRECTION for place in wrong):
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
    whole = len(wrong) == counts.sum()
    subject = "the gradients are" if whole else f"the gradient of {names[0]} is"
    whose = "those of one GPU" if whole else "that of one GPU"
    said = f"in step {scene.number} {subject} {times(ratio)} {whose}"
    clipped = clipped_otherwise(scene)
    if clipped:
        return clipped
    return _named_factor(scene, ratio, said, None if whole else names[0])


def _ratio_of_norms(scene: Scene) -> float | None:
    """The factor between the gradients' norms before clipping, if all ranks have the same."""
    norms = [step.norms[-1] for step in scene.step.parallel if step.norms]
    if (
        len(norms) != scene.ranks
        or not scene.reference.norms
        or not scene.reference.norms[-1][0]
    ):
        return None
    if differ([norm for norm, _ in norms]) or differ(
        [norms[0][1], scene.reference.norms[-1][1]]
    ):
        return None
    return norms[0][0] / scene.reference.norms[-1][0]


def clipped_factor(scene: Scene) -> Cause | None:
    """Whether clipping alone makes gradients equal that have a wrong factor."""
    ratio = _ratio_of_norms(scene)
    limit = max(NEAR, scene.step.kinds["gradients"].relative()[1])
    if ratio is None or not abs(ratio - 1) > limit:
        return None
    said = (
        f"in step {scene.number} clipping hides that, before it, the gradients are "
        f"{times(ratio)} those of one GPU"
    )
    return _named_factor(scene, ratio, said, None)


def _named_factor(scene: Scene, ratio: float, said: str, name: str | None) -> Cause:
    reference_loss = scene.loss
    ranks = scene.ranks
    losses = [sum(step.losses) for step in scene.step.parallel]
    equal = len(losses) > 1 and not differ(losses)
    micro = max(len(step.losses) for step in scene.step.parallel)
    fewer = len(scene.reference.losses) / max(micro, 1)
    more: dict = {"parameter": name}

    def near(value: float, wanted: float) -> bool:
        return abs(value - wanted) <= NEAR * abs(wanted)

    if micro > 1 and fewer > 1 and near(ratio, 1 / fewer) and not _is_divided(scene):
        return _micro_batches(scene, said, micro, more)
    # Ranks that share layers read the same rows.
    groups = len(data_parallel_rows(scene))
    peers = ranks // groups if groups and not scene.staged else 1
    if peers > 1 and near(ratio, 1 / peers):
        return scene.cause(
            "divided_by_ranks",
            f"{said}: {peers} ranks share layers and read the same rows, and something "
            "divides by their number",
            "count the rows or tokens of one rank of each tensor-parallel group, and do not "
            "divide by the group's size",
            **more,
        )
    if near(ratio, 1 / ranks):
        if scene.step.parallel[0].gathered.get("all_gather", 0) + scene.step.parallel[
            0
        ].gathered.get("all_gather_into_tensor", 0):
            return gathered_cause(scene, said)
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
    if near(ratio, ranks) and not (near(ratio, micro) and _added(losses, reference_loss)):
        return scene.cause(
            "multiplied_by_ranks",
            f"{said}: the gradients of {ranks} ranks are added, and not divided",
            "divide by the number of ranks after all_reduce(SUM), or use ReduceOp.AVG",
            **more,
        )
    gpus = scene.heads[0].gpus
    if ranks == 1 < gpus and near(ratio, gpus) and near(losses[0], gpus * reference_loss):
        return scene.cause(
            "replicas_added",
            f"{said}, and so is the loss: the losses of {gpus} replicas are added",
            "take the mean of what DataParallel gathers, or compute the loss of the gathered "
            "outputs",
            **more,
        )
    for number in sorted({micro, fewer}):
        if number > 1 and near(ratio, number):
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


def _added(losses: list[float], reference_loss: float) -> bool:
    """Whether the losses of a rank's micro-batches add up to more than one GPU's loss."""
    mean = sum(losses) / max(len(losses), 1)
    return abs(mean) > 1.5 * abs(reference_loss)


def gathered_cause(scene: Scene, said: str) -> Cause:
    return scene.cause(
        "gathered_constants",
        f"{said}: the program gathers tensors by dist.all_gather, whose result is a constant "
        "for autograd, so no gradient goes back to the ranks that sent them",
        "use torch.distributed.nn.functional.all_gather, and mind that DDP divides by the "
        "number of ranks",
    )
