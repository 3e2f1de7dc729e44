"""RichProgressBar: the progress bar, drawn by rich."""

from __future__ import annotations

import warnings
from typing import Any

from multigpu.trainer.callbacks.progress import TQDMProgressBar


class RichProgressBar(TQDMProgressBar):
    """As TQDMProgressBar, in rich's colours."""

    def _new_bar(self, **settings: Any) -> Any:
        from tqdm import TqdmExperimentalWarning
        from tqdm.rich import tqdm

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TqdmExperimentalWarning)
            return tqdm(**settings)
