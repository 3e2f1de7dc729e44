"""Gradients that are equal on all ranks, and not those of the reference."""

import numpy as np

from multigpu.prove.causes.factor import gathered_cause
from multigpu.prove.causes.rows import data_parallel_rows
from multigpu.prove.causes.scene import Cause, Scene, ratio_text, size_of, worst
from multigpu.prove.compare import FACTOR, rows_of
from multigpu.prove.record import IN_FUNCTION, Step

# The most that a rank's own tokens can count in a mean over all, if 1 is an equal share.
MOST_WEIGHT = 1.8


def random_numbers(scene: Scene) -> Cause | None:
    drawn = scene.reference.random
    if not drawn:
        return None
    where = "its forward" if drawn[0] == "forward" else drawn[0] or "the model"
    return scene.cause(
        "random_numbers",
        f"the model draws random numbers in {where}, and each rank draws others than one GPU",
        "prove with --no-dropout, or switch other noise off for the proof",
        unknown=True,
    )


def batch_norm(scene: Scene) -> Cause | None:
    """Whether what the model returns for a row depends on the other rows of the batch."""
    norms = scene.heads[0].norms
    replicas = max(scene.ranks, scene.heads[0].gpus)
    # A stage of a pipeline, and rows of another length, return other numbers.
    unlike = scene.staged or scene.padded
    if replicas < 2 or (not norms and (unlike or not _outputs_differ(scene))):
        return None
    if not norms and _layers_are_shared(scene):
        return scene.cause(
            "shared_layer",
            f"in step {scene.number} the ranks read the same rows as one GPU, and have parts "
            "of the same layers, and what the model returns for a row is not what it returns "
            "on one GPU: the parts do not make the whole layer",
            "add the outputs up over the ranks once after each layer that has a part of the "
            "inputs, and its bias once, after the sum",
        )
    which = (
        f"{norms[0]} normalizes over the rows of each {scene.replica} alone"
        if norms
        else "what the model returns for a row is not what it returns on one GPU: a layer "
        "computes with the other rows of its batch, as BatchNorm does"
    )
    return scene.cause(
        "batch_norm",
        f"in step {scene.number} the {scene.replica}s read the same rows as one GPU, and "
        f"{which}",
        "use GroupNorm or LayerNorm, or DDP with SyncBatchNorm.convert_sync_batchnorm(model); "
        "or accept it: then this run does not compute what one GPU computes",
        parameter=norms[0].partition(" ")[2] if norms else None,
    )


def _layers_are_shared(scene: Scene) -> bool:
    """Whether the ranks have parts of layers and read the same rows: tensor parallelism."""
    every = [np.sort(rows_of(step)) for step in scene.step.parallel]
    return any(part.shard is not None for head in scene.heads for part in head.parts) and all(
        len(rows) == len(every[0]) and np.allclose(rows, every[0]) for rows in every
    )


def _outputs_differ(scene: Scene) -> bool:
    """Whether a row has an output on a rank that it never has on one GPU.

    It can have several in a step: a closure is called again, with other weights.
    """
    expected = _pairs(scene.reference)
    if not len(expected):
        return False
    largest_row, spread = np.maximum(np.abs(expected).max(axis=0), 1e-30)
    for step in scene.step.parallel:
        for row, output in _pairs(step):
            outputs = expected[np.abs(expected[:, 0] - row) <= 1e-6 * largest_row, 1]
            if len(outputs) and not (np.abs(outputs - output) <= 1e-2 * spread).any():
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


def gathered_constants(scene: Scene) -> Cause | None:
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
    return gathered_cause(
        scene, f"in step {scene.number} the gradients are not those of one GPU"
    )


def compressed(scene: Scene) -> Cause | None:
    hooks = [hook for hook in scene.heads[0].hooks if "allreduce" not in hook]
    if not hooks:
        return None
    return scene.cause(
        "compressed",
        f"in step {scene.number} the gradients are "
        f"{ratio_text(scene.step.kinds['gradients'])} from those of one GPU: DDP's "
        f"communication hook `{hooks[0]}` changes them",
        "prove without the hook; with it, this run does not compute what one GPU computes",
    )


def own_mean(scene: Scene) -> Cause | None:
    """Whether the mean of the ranks' losses is not the reference's loss."""
    losses = [sum(step.losses) for step in scene.step.parallel if step.losses]
    reference_loss = scene.loss
    if len(losses) < 2 or not reference_loss:
        return None
    every = data_parallel_rows(scene)
    counts = [len(rows) for rows in every]
    if len(set(counts)) > 1:
        return scene.cause(
            "own_mean",
            f"in step {scene.number} the ranks have {', '.join(map(str, counts))} rows, each "
            "takes the mean over its own, and the mean over ranks weighs them alike",
            "give all ranks as many rows, or weigh each rank's loss by its number of rows",
        )
    slack = _slack(scene, reference_loss)
    if (
        abs(sum(losses) / len(losses) - reference_loss) <= slack
        and not scene.reference.losses[1:]
    ):
        return None
    if not scene.reference.losses[1:] and not _is_weighted_mean(reference_loss, losses, slack):
        return _other_loss(scene, losses, reference_loss)
    return scene.cause(
        "own_mean",
        f"in step {scene.number} the ranks read the rows of one GPU, and the mean of their "
        f"losses ({sum(losses) / len(losses):.7g}) is not its loss ({reference_loss:.7g}): "
        "each rank takes the mean over its own tokens, or another value of its own rows "
        "alone, and the mean over ranks weighs them alike",
        "divide each rank's sum by the number of tokens of all ranks (all_reduce the "
        "number), and multiply by the number of ranks, because DDP takes the mean; compute "
        "what is no mean (a balance loss, a variance) from the rows of all ranks",
    )


def _slack(scene: Scene, reference_loss: float) -> float:
    """How far rounding can move the reference's loss."""
    total = sum(scene.reference.losses)
    moved = [abs(sum(step.losses) - total) for step in scene.step.band if step.losses]
    unit = max(1e-5, 4 * scene.reference.loss_eps) * abs(reference_loss)
    return max([unit, *(FACTOR * distance for distance in moved)])


def _is_weighted_mean(reference_loss: float, losses: list[float], slack: float) -> bool:
    """Whether a loss is a mean of the ranks' losses, up to `slack`.

    None of them has a weight above MOST_WEIGHT / ranks.
    """
    most = min(1.0, MOST_WEIGHT / len(losses))
    bounds = []
    for ordered in (sorted(losses), sorted(losses, reverse=True)):
        left, total = 1.0, 0.0
        for loss in ordered:
            weight = min(most, left)
            left, total = left - weight, total + weight * loss
        bounds.append(total)
    return bounds[0] - slack <= reference_loss <= bounds[1] + slack


def _other_loss(scene: Scene, losses: list[float], reference_loss: float) -> Cause:
    """No mean of the ranks' losses, weighed by their tokens, is the reference's loss."""
    place = int(np.argmax([abs(loss - reference_loss) for loss in losses]))
    rank = scene.step.ranks[place]
    return scene.cause(
        "other_loss",
        f"in step {scene.number} the ranks read the rows of one GPU, and the loss of rank "
        f"{rank} is {losses[place]:.5g}, that of one GPU {reference_loss:.5g}: no numbers of "
        "tokens or rows make that a mean of the ranks' losses",
        "look at what the loss is computed from on a rank: labels or positions that do not "
        "belong to its rows, rows that it compares with its own rows alone",
        rank=rank,
    )


def unknown_gradients(scene: Scene) -> Cause:
    place, rank, _ = worst(scene, "gradients")
    distances = scene.step.kinds["gradients"]
    size = size_of(distances.off[place], distances, place)
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
