"""Where `self.log` is allowed, as in Lightning: in a batch and at an epoch's start or end."""

from multigpu.errors import UserError

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
