"""When training ends."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


def reason_to_stop(trainer: "Trainer") -> str:
    """Why no further epoch begins, in Lightning's words; "" if one begins."""
    progress = trainer.state.progress
    if trainer.max_steps != -1 and progress.global_step >= trainer.max_steps:
        return f"`max_steps={trainer.max_steps}` reached"
    limited = trainer.max_epochs not in (None, -1)
    if limited and progress.current_epoch >= trainer.max_epochs:
        return f"`max_epochs={trainer.max_epochs}` reached"
    return "`trainer.should_stop` was set" if may_stop(trainer) else ""


def may_stop(trainer: "Trainer") -> bool:
    """Whether should_stop is set, and min_epochs and min_steps are reached."""
    progress = trainer.state.progress
    return (
        trainer.state.should_stop
        and progress.current_epoch >= (trainer.min_epochs or 0)
        and progress.global_step >= (trainer.min_steps or 0)
    )
