"""Write checkpoints while training goes on: a copy now, the file from a thread."""

import atexit
from concurrent.futures import Future, ThreadPoolExecutor

from multigpu.elastic.folder import CheckpointFolder
from multigpu.errors import UserError, warn
from multigpu.nested import map_tensors


class Writer:
    """Writes the checkpoints of one run into its folder, one at a time.

    saved    the step of the newest checkpoint in the folder; -1 if there is none
    """

    def __init__(self, folder: CheckpointFolder):
        self.folder = folder
        self.saved = folder.newest_step()
        self.thread = ThreadPoolExecutor(1, "checkpoints")
        self.pending: Future[None] | None = None
        # An error that ends this process must not cut a checkpoint short.
        atexit.register(self.wait)

    def save(self, step: int, content: dict) -> None:
        """Copy the tensors of `content` into main memory; a thread writes the copy.

        If the file before it is still being written, wait for it first, as `wait` does. If a
        file cannot be written, for instance because the disk is full, print a warning: the
        earlier checkpoints are kept, and training can go on.
        """
        self.wait()
        copy = map_tensors(content, lambda tensor: tensor.detach().to("cpu", copy=True))
        self.pending = self.thread.submit(self._write, step, copy)

    def wait(self) -> None:
        """Wait until the last checkpoint is written, or could not be written.

        An error in the thread that is not the disk's, such as content that cannot be pickled,
        is raised here, once: each later checkpoint would fail, too.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, content: dict) -> None:
        try:
            self.folder.write(step, content)
            self.saved = step
        except UserError as error:
            last = "there is no earlier one"
            if self.saved >= 0:
                last = f"step {self.saved} stays the newest"
            warn(f"no checkpoint at step {step}, {last}: {error}")
