"""What learners run, where Python is as on macOS: no /proc, and processes start by spawn.

tests/support/macos says what that shows, and what it does not.
"""

import os
import subprocess
import sys

import pytest
from commands import ROOT

MACOS = {
    "PYTHONPATH": str(ROOT / "tests" / "support" / "macos"),
    "OMP_NUM_THREADS": "1",
    "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
}
DDP = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 05-ddp-cluster/ddp.py"
COMMANDS = (
    ("virtual --gpus 2 virtual/two_gpus.py", "fits"),
    (f"virtual --gpus 2 {DDP} FOLDER/weights.pt", "rank 1, cuda:1"),
    (f"prove {DDP} FOLDER/weights.pt", "holds"),
    ("exercise check 02-data-parallel/solution.ipynb", "right"),
    ("doctor", "gloo"),
)


def run(*command: object, folder=ROOT / "lessons") -> str:
    environment = {**os.environ, **MACOS}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_linux_is_hidden():
    program = "import sys, os, multiprocessing; print(sys.platform, os.path.exists('/proc'), "
    program += "multiprocessing.get_start_method(), hasattr(os, 'sched_getaffinity'))"
    assert run(sys.executable, "-c", program).strip() == "darwin False spawn False"


@pytest.mark.long
@pytest.mark.parametrize(("words", "expected"), COMMANDS, ids=lambda text: text.split()[0])
def test_a_command_works(words, expected, tmp_path):
    words = words.replace("FOLDER", str(tmp_path)).split()
    assert expected in run(sys.executable, "-m", "multigpu.cli", *words)


@pytest.mark.long
@pytest.mark.parametrize("stem", ["PT_CNN_DataParallel", "PT_CNN_DDPSpawn"])
def test_a_notebook_runs(stem, tmp_path):
    command = ("jupyter", "execute", ROOT / "notebooks" / f"{stem}.ipynb", "--output")
    run(*command, tmp_path / "executed.ipynb", folder=ROOT / "notebooks")
