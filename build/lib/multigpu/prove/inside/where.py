"""Where a process waits, when the command asks: a thread answers, so the program need not."""

import json
import linecache
import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType

import torch

from multigpu.prove.inside import ending, recorder
from multigpu.prove.record import ASK_WHERE, WHERE_SUFFIX
from multigpu.prove.settings import Settings

INTERVAL = 0.25  # seconds between two looks
LIBRARIES = (
    os.path.dirname(os.path.dirname(torch.__file__)),
    sysconfig.get_paths()["stdlib"],
    str(Path(__file__).parents[2]),
    "<frozen",
)


def start(settings: Settings) -> None:
    """Answer from now on, in forks too."""
    folder = Path(settings.folder)

    def watch() -> None:
        while not (folder / ASK_WHERE).exists():
            time.sleep(INTERVAL)
        frame = sys._current_frames().get(threading.main_thread().ident)
        answer = {"rank": ending.rank(), "trains": _trains(), **_place(frame)}
        (folder / f"{os.getpid()}{WHERE_SUFFIX}").write_text(json.dumps(answer))

    def start_thread() -> None:
        threading.Thread(target=watch, daemon=True, name="where").start()

    start_thread()
    os.register_at_fork(after_in_child=start_thread)


def _trains() -> bool:
    """Whether this process is a rank, and not a launcher or a DataLoader's worker."""
    if torch.utils.data.get_worker_info() is not None:
        return False
    dist = torch.distributed
    return recorder.has_trained() or (dist.is_available() and dist.is_initialized())


def _place(frame: FrameType | None) -> dict:
    """The innermost line of the program itself: not torch's, nor the standard library's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES):
            line = linecache.getline(file, frame.f_lineno).strip()
            return {"file": file, "number": frame.f_lineno, "line": line}
        frame = frame.f_back
    return {"file": "", "number": 0, "line": ""}
