"""RichProgressBar: the progress bar, drawn by rich."""

from __future__ import annotations

import warnings
from typing import Any

from multigpu.errors import UserError
from multigpu.trainer.callbacks.progress import TQDMProgressBar


class RichProgressBar(TQDMProgressBar):
    """As TQDMProgressBar, in rich's colours. Raises UserError for Lightning's `theme` and
    `console_kwargs`.
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: Any = None,
        console_kwargs: dict[str, Any] | None = None,
    ):
        super().__init__(refresh_rate, leave=leave)
        for name, value in (("theme", theme), ("console_kwargs", console_kwargs)):
            if value is not None:
                raise UserError(
                    f"RichProgressBar({name}=…) is not supported: it has rich's own colours; "
                    f"leave {name} out."
                )

    def _new_bar(self, **settings: Any) -> Any:
        from tqdm import TqdmExperimentalWarning
        from tqdm.rich import tqdm

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TqdmExperimentalWarning)
            return tqdm(**settings)
