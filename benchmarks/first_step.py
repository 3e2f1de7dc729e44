"""Run a script and write the time of its first optimizer step into FILE, for lesson05.py.

first_step.py FILE SCRIPT [FLAGS …]
"""

import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

note, script, *flags = sys.argv[1:]


def first(*_):
    if os.environ.get("RANK", "0") == "0" and not Path(note).exists():
        Path(note).write_text(str(time.time()))


register_optimizer_step_post_hook(first)
sys.argv = [script, *flags]
runpy.run_path(script, run_name="__main__")
