"""`python ranks_end_script.py MODE FOLDER`: two ranks, which this script starts, meet once; then something goes wrong, or is late."""

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

mode, folder = sys.argv[1], Path(sys.argv[2])
relaunch.SILENT = 0.3
report_user_errors()
strategy = DDPStrategy()
strategy.configure(resolve("cpu", 2))
strategy.launch(lambda: None)
if mode.startswith("slow"):
    atexit.register(time.sleep, 2.5)  # once the connection is broken: atexit goes backwards
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
        sys.exit(0)  # while rank 1 is in a collective
    if mode.startswith("slow"):
        dist.all_reduce(torch.ones(1))  # rank 1 does not come
    if mode == "stopped":
        relaunch._running = lambda ranks: os.kill(
            os.getpid(), signal.SIGTERM
        )  # while it waits
