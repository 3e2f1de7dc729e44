"""`python ranks_end_script.py MODE FOLDER`: start two ranks; one fails or is late.

MODE says which, and how. Both take part in one barrier first.
"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from multigpu.errors import report_user_errors
from multigpu.launch import relaunch
from multigpu.strategies import DDPStrategy
from multigpu.strategies.accelerators import resolve

mode = sys.argv[1]
folder = Path(sys.argv[2])
relaunch.SILENT_WAIT = 0.3
report_user_errors()
strategy = DDPStrategy()
strategy.configure(resolve("cpu", 2))
strategy.launch(lambda: None)
if mode.startswith("slow"):
    # Registered before the process group exists, so called after its connections are closed.
    atexit.register(time.sleep, 2.5)
strategy.connect()
dist.barrier()
if strategy.world.rank == 1:
    (folder / "rank 1").write_text(str(os.getpid()))
    if mode in ("slow raise", "raise"):
        raise ZeroDivisionError("planted in rank 1")
    if mode == "slow exit":
        sys.exit(3)
    if mode == "exit":
        dist.all_reduce(torch.ones(1))
    if mode in ("late", "stopped"):
        time.sleep(3 if mode == "late" else 60)
        (folder / "done").touch()
else:
    if mode == "exit":
        # Rank 1 is in a collective.
        sys.exit(0)
    if mode.startswith("slow"):
        # Rank 1 does not take part.
        dist.all_reduce(torch.ones(1))
    if mode == "stopped":

        def stop_rank_0(self: relaunch.Relaunch) -> bool:
            """In the place of the report that rank 0 waits."""
            os.kill(os.getpid(), signal.SIGTERM)
            return True

        relaunch.Relaunch.report_running = stop_rank_0
