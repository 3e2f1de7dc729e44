"""PyTorchProfiler: torch's own profiler, around the Trainer's actions."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from multigpu.trainer.profiler import PassThroughProfiler


class PyTorchProfiler(PassThroughProfiler):
    """Record the operations of a run; print the longest, and write a trace for Perfetto.

    sort_by_key        the column of torch's table by which it is sorted
    row_limit          the number of rows in the table
    export_to_chrome   write the trace to `dirpath` (default: the logger's folder)
    profiler_kwargs    arguments of torch.profiler.profile, for example record_shapes=True
    """

    def __init__(
        self,
        dirpath: str | os.PathLike | None = None,
        filename: str | None = None,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str = "cpu_time_total",
        **profiler_kwargs: Any,
    ):
        super().__init__(dirpath, filename)
        self.export_to_chrome = export_to_chrome
        self.row_limit = row_limit
        self.sort_by_key = sort_by_key
        self._arguments = profiler_kwargs
        self._profile: torch.profiler.profile | None = None

    def setup(
        self, stage: str, local_rank: int | None = None, log_dir: str | None = None
    ) -> None:
        super().setup(stage, local_rank, log_dir)
        self._profile = torch.profiler.profile(**self._arguments)
        self._profile.start()

    def profile(self, action_name: str) -> AbstractContextManager:
        """Give the block its name in the table and in the trace."""
        return torch.profiler.record_function(action_name)

    def summary(self) -> str:
        """Torch's table of the last run; "" before the first."""
        if self._profile is None:
            return ""
        self._profile.stop()
        if self.export_to_chrome and self.dirpath:
            Path(self.dirpath).mkdir(parents=True, exist_ok=True)
            name = f"{self._stage}-{self._local_rank or 0}.pt.trace.json"
            self._profile.export_chrome_trace(os.path.join(self.dirpath, name))
        averages = self._profile.key_averages()
        return averages.table(sort_by=self.sort_by_key, row_limit=self.row_limit) + "\n"

    def __getstate__(self) -> dict[str, Any]:
        # The recorded events cannot be pickled.
        return {**self.__dict__, "_profile": None}
