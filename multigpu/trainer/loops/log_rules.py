"""Where may `self.log` be called? Where something collects: within a batch, and at both ends of an epoch, as in Lightning."""

import warnings

from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero

LOOPS = ("train", "validation", "test")
WITHIN = frozenset(
    ["training_step", "validation_step", "test_step"]
    + [
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
    ]
    + [f"on_{loop}_batch_{end}" for loop in LOOPS for end in ("start", "end")]
)
BETWEEN = frozenset(
    f"on_{loop}_{when}" for loop in LOOPS for when in ("start", "epoch_start", "epoch_end")
)


def refuse_where_nothing_collects(hook: str, name: str) -> None:
    """Raises UserError where the value would be dropped. `hook` is the one that runs; "" if it is none of a loop's."""
    if hook not in WITHIN and hook not in BETWEEN:
        where = f"in {hook}" if hook else "outside of the steps and their hooks"
        raise UserError(
            f"self.log({name!r}) {where}: nothing collects there. Log in a step or at an epoch's end, or give the number to "
            f"self.logger.log_metrics."
        )


def warn_of_lonely_names(told: list[dict]) -> None:
    """`told`: what each rank has logged in this step with sync_dist. A name that some have not may be a mistake."""
    names = [{key[1] for key in theirs} for theirs in told]
    if is_rank_zero() and (lonely := sorted(set.union(*names) - set.intersection(*names))):
        warnings.warn(
            f"self.log({lonely[0]!r}, sync_dist=True) was called on some ranks only, and the mean is theirs. Lightning would "
            f"wait for the others for ever.",
            stacklevel=2,
        )
