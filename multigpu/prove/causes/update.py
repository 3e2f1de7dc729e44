"""Weights that differ although the gradients are right: before a step, and after it."""

from multigpu.prove.causes.scene import Cause, Scene, differ, percent, short, size_of, worst


def wrong_weights(scene: Scene) -> Cause:
    step = scene.step
    distances = step.kinds["weights"]
    place, rank, between = worst(scene, "weights")
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
    size = size_of(
        distances.apart[place] if between else distances.off[place], distances, place
    )
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


def wrong_options(scene: Scene) -> Cause | None:
    """Whether the optimizer's options are the reference's, on all ranks."""
    for step, rank in zip(scene.step.parallel, scene.step.ranks, strict=True):
        for place, (expected, other) in enumerate(
            zip(scene.reference.options, step.options, strict=False)
        ):
            for name in expected:
                if name not in other or not differ([expected[name], other[name]]):
                    continue
                kind = "learning_rate" if name == "lr" else "optimizer_options"
                alone = not all(
                    differ([expected[name], others.options[place].get(name, expected[name])])
                    for others in scene.step.parallel
                    if len(others.options) > place
                )
                who = f"on rank {rank}" if alone else f"with {scene.ranks} ranks"
                said = (
                    f"in step {scene.number} {name} is {short(other[name])} {who}, and "
                    f"{short(expected[name])} on one GPU"
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
        if number > scene.number and not differ([rate, mine])
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


def wrong_update(scene: Scene) -> Cause:
    place, rank, between = worst(scene, "after")
    name = scene.step.names[place]
    where = f"on rank {rank}" if between else "in the parallel run"
    more = {"rank": rank if between else None, "parameter": name}
    if scene.step.parallel[0].reduces:
        return scene.cause(
            "wrong_reduction",
            f"the mean of the ranks' gradients is right, and the update is not: in step "
            f"{scene.number} the optimizer, which reduces tensors itself, changes {name} "
            f"otherwise {where}",
            "in its step, reduce each gradient once, divide a sum by the number of ranks, "
            "and give all ranks all new weights",
            **more,
        )
    return scene.cause(
        "optimizer_state",
        f"the gradients are right, and the update is not: in step {scene.number} the "
        f"optimizer changes {name} otherwise {where}, with equal weights, gradients and "
        "options",
        "compare the optimizer's state (momentum, second moments, step counts): all ranks "
        "must load it, and none may reset it",
        **more,
    )


def wrong_frozen(scene: Scene) -> Cause | None:
    """Whether a parameter that no optimizer trains is another one, as a teacher's."""
    for name, off, limit, rank in scene.step.frozen:
        if not off <= limit:
            return scene.cause(
                "frozen_weights",
                f"in step {scene.number} the trained weights agree, and the frozen parameter "
                f"{name} does not: on rank {rank} it is {percent(off)} from that of one GPU",
                "change what no optimizer trains (a moving average, a teacher) on all ranks "
                "alike",
                rank=rank,
                parameter=name,
            )
    return None


def wrong_buffer(scene: Scene) -> Cause | None:
    for name, off, limit, rank in scene.step.buffers:
        if not off <= limit:
            return scene.cause(
                "buffers",
                f"weights and gradients agree, and the buffer {name} does not: on rank "
                f"{rank} it is {percent(off)} from that of one GPU in step {scene.number}",
                "compute the buffer from the rows of all ranks (all_reduce what it is made "
                "of)",
                rank=rank,
                parameter=name,
            )
    return None
