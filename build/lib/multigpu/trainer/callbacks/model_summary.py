"""ModelSummary: how deep the table of the model's parts goes."""

from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback


class ModelSummary(Callback):
    """ModelSummary(max_depth=2) also lists the parts of parts; -1 lists all, 0 prints nothing.

    The Trainer prints the table before training, with max_depth=1 if there is no ModelSummary.
    """

    def __init__(self, max_depth: int = 1):
        if type(max_depth) is not int or max_depth < -1:
            raise UserError(
                f"ModelSummary(max_depth={max_depth!r}): expected a whole number from "
                f"0 up, or -1 for all parts."
            )
        self.max_depth = max_depth
