"""Ranks that should have averaged their gradients, and step with different ones."""

import numpy as np

from multigpu.prove.causes.scene import (
    SAME_DIRECTION,
    Cause,
    Scene,
    differ,
    ratio_text,
)


def missing_gradient(scene: Scene) -> Cause:
    place, rank = scene.step.missing[0]
    name = scene.step.names[place]
    present = scene.reference.present[place] if place < len(scene.reference.present) else True
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


def ranks_apart(scene: Scene) -> Cause | None:
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
    if all(norms) and same_direction and differ([pair[-1][0] for pair in norms]):
        return _clipped_own(scene, norms)
    heads = scene.heads
    rank = int(distances.off_rank[np.argmax(apart)])
    names = [name for name, is_apart in zip(step.names, apart, strict=True) if is_apart]
    parts = {part.name: part for part in heads[0].parts}
    size = ratio_text(distances)
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


def clipped_otherwise(scene: Scene) -> Cause | None:
    norms = [step.norms for step in scene.step.parallel]
    if not all(norms) or not scene.reference.norms:
        return None
    if differ([pairs[-1][0] for pairs in norms]):
        return _clipped_own(scene, norms)
    limits = [pairs[-1][1] for pairs in norms]
    if differ([*limits, scene.reference.norms[-1][1]]):
        return scene.cause(
            "clipping",
            f"in step {scene.number} gradients are clipped to a norm of {limits[0]:.3g}, and "
            f"on one GPU to {scene.reference.norms[-1][1]:.3g}",
            "clip to the same norm, whatever the number of ranks",
        )
    return None


def _some_clip(scene: Scene, norms: list) -> Cause:
    rank = next(
        rank
        for rank, pairs in zip(scene.step.ranks, norms, strict=True)
        if bool(pairs) != bool(scene.reference.norms)
    )
    clips = "clips" if not scene.reference.norms else "does not clip"
    return scene.cause(
        "clipping",
        f"in step {scene.number} rank {rank} {clips} its gradients, and one GPU "
        f"{'does not' if not scene.reference.norms else 'does'}",
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


def changed_by_hooks(scene: Scene) -> Cause | None:
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
