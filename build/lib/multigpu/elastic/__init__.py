"""What an elastic run needs beside its training loop (lesson 12).

`CheckpointFolder` keeps the checkpoints of one run, `Writer` writes them while training goes
on, and `Guard` ends this process if its launcher has died.
"""

from multigpu.elastic.folder import CheckpointFolder, checkpoint_name
from multigpu.elastic.guard import Guard, report_lost_ranks
from multigpu.elastic.writer import Writer

__all__ = ["CheckpointFolder", "Guard", "Writer", "checkpoint_name", "report_lost_ranks"]
