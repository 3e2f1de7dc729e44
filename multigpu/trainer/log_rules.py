"""Where `self.log` is allowed, as in Lightning: in a batch and at an epoch's start or end."""

import warnings

from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero

LOOPS = ("train", "validation", "test")
WITHIN_BATCH = frozenset(
    ["training_step", "validation_step", "test_step"]
    + [
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
    ]
    + [f"on_{loop}_batch_{end}" for loop in LOOPS for end in ("start", "end")]
)
OUTSIDE_BATCH = frozenset(
    [f"on_{loop}_{when}" for loop in LOOPS for when in ("start", "epoch_start", "epoch_end")]
    + [f"{loop}_epoch_end" for loop in ("training", "validation", "test")]
)
# The hooks that every rank calls equally often, with any number of batches.
ONCE_PER_EPOCH = OUTSIDE_BATCH | frozenset(
    [f"on_predict_{when}" for when in ("start", "epoch_start", "epoch_end")]
    + [f"on_{loop}_end" for loop in (*LOOPS, "predict")]
)


def check_hook_logs(hook: str, name: str) -> None:
    """Raises UserError if values that are logged in `hook` would be lost.

    hook   the hook that runs; "" outside of a loop's hooks
    """
    if hook not in WITHIN_BATCH and hook not in OUTSIDE_BATCH:
        where = f"in {hook}" if hook else "outside of the steps and their hooks"
        raise UserError(
            f"self.log({name!r}) {where}: values are not collected there. Log in a step or at "
            f"an epoch's end, or give the number to self.logger.log_metrics."
        )


def warn_of_names_on_some_ranks(of_ranks: list[dict]) -> None:
    """Warn of a name that only some ranks have logged in this step: it can be a mistake.

    of_ranks   what each rank logged with sync_dist
    """
    names = [{key[1] for key in logged} for logged in of_ranks]
    on_some = sorted(set.union(*names) - set.intersection(*names))
    if on_some and is_rank_zero():
        warnings.warn(
            f"self.log({on_some[0]!r}, sync_dist=True) was called on some ranks only, so "
            f"the value is that of these ranks. In Lightning these ranks would wait until the "
            f"others end, or until the timeout.",
            stacklevel=2,
        )
