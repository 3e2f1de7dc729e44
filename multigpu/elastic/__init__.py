"""What an elastic run needs beside its training loop (lesson 12).

`join` connects the ranks of a start, and `Checkpoints` restores and saves the run. `add_up`
says on all ranks whether one has received a signal; then all raise `Stop`, and `leave`.
`verdict` compares the run with one without a stop.
"""

from multigpu.elastic.checkpoints import Checkpoints
from multigpu.elastic.folder import CheckpointFolder, checkpoint_name
from multigpu.elastic.guard import Guard, report_lost_ranks
from multigpu.elastic.signals import Stop, add_up, leave
from multigpu.elastic.start import join, restarts, verdict
from multigpu.elastic.writer import Writer

__all__ = [
    "CheckpointFolder",
    "Checkpoints",
    "Guard",
    "Stop",
    "Writer",
    "add_up",
    "checkpoint_name",
    "join",
    "leave",
    "report_lost_ranks",
    "restarts",
    "verdict",
]
