"""The processes that a program starts have the virtual GPUs too, and are in the report."""

import json
import os
import pty
import sys
from contextlib import suppress

import pytest
from commands import ROOT, run
from virtual_runs import TORCHRUN, reported, virtual, write

pytestmark = pytest.mark.slow

RANK = """
import os, signal, time, torch
from pathlib import Path
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
x = torch.ones(2**20 * (rank + 1), device="cuda")
y = x * 2
records = Path(os.environ["MULTIGPU_VIRTUAL_RECORDS"])
while len(list(records.glob("*.json"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
time.sleep(0.5)  # a process writes its record each 0.2 s
"""


def rows(folder):
    """{(rank, device): peak in MiB} of the report."""
    gpus = json.loads((folder / "n.json").read_text())["gpus"]
    return {(gpu["rank"], gpu["device"]): gpu["peak_bytes"] / 2**20 for gpu in gpus}


@pytest.mark.parametrize(
    ("ranks", "end", "code"),
    [(3, "", 0), (2, "if rank: os.kill(os.getpid(), signal.SIGKILL)", 1)],
)
def test_torchrun(tmp_path, ranks, end, code):
    """Each rank has a GPU, also without --gpus."""
    script = write(tmp_path, RANK + end)
    done = virtual(
        tmp_path, "--json", "n.json", *TORCHRUN, f"--nproc-per-node={ranks}", script
    )
    assert done.returncode == code, done.stdout
    found = {(rank, f"cuda:{rank}"): 8 * (rank + 1) for rank in range(ranks)}
    assert rows(tmp_path) == found
    assert "rank 1, cuda:1" in done.stdout
    assert ("rank 1 ended without Python's end" in done.stdout) == bool(end)


def test_spawned_processes_forks_and_the_loaders_workers(tmp_path):
    program = """
import multiprocessing, os, torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

def child(rank, size):
    torch.ones(2**18 * size, device="cuda:1")

def main():
    mp.spawn(child, (1,))
    fork = multiprocessing.get_context("fork").Process(target=child, args=(0, 2))
    fork.start()
    fork.join()
    assert fork.exitcode == 0
    for batch in DataLoader(torch.arange(8.0), batch_size=4, num_workers=2):
        print("batch", batch.cuda().sum().item())
    late = multiprocessing.get_context("fork").Process(target=child, args=(0, 2))
    late.start()
    late.join()
    print("after use", late.exitcode)

if __name__ == "__main__":
    main()
"""
    text, numbers = reported(tmp_path, write(tmp_path, program))
    assert "batch 6.0\nbatch 22.0\n" in text
    peaks = sorted((gpu["device"], gpu["peak_bytes"]) for gpu in numbers["gpus"])
    assert peaks == [("cuda:0", 1024), ("cuda:1", 2**20), ("cuda:1", 2**21)]
    # As on CUDA, a fork of a process that has used a GPU cannot use one.
    assert "Cannot re-initialize" in text and "after use 1" in text
    assert "without Python's end" not in text


def test_a_real_start(tmp_path):
    """Python's start imports sitecustomize; the environment's own has its turn.

    It prints nothing: a CUDA build without a driver would warn of triton.
    """
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('own sitecustomize', __name__)")
    (tmp_path / "multigpu.py").write_text("raise AssertionError('the wrong multigpu')")
    program = """
import gc, importlib.util, os, sys
print("before", "torch" in sys.modules, importlib.util.find_spec("torch") is not None)
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
phases, file = [], open("left open", "w")
def use():
    return file
gc.callbacks.append(lambda phase, info: phases.append(phase))
import torch
gc.callbacks.clear()
print("garbage", phases.count("start") < 5, gc.isenabled(), gc.get_freeze_count() > 100_000)
file.write("written at Python's end")
print(torch.cuda.device_count(), torch.ones(2).cuda() + 1)
import multigpu.virtual.control
"""
    write(tmp_path, program)
    path = f"{own}:{ROOT}"
    done = virtual(tmp_path, "-m", "program", real=True, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout
    # In the command's process, and in the program's.
    start = "own sitecustomize sitecustomize\n" * 2
    assert (tmp_path / "left open").read_text() == "written at Python's end"
    assert done.stdout.startswith(
        f"{start}before False True\ngarbage True True True\n1 tensor([2., 2.], device='cuda"
    )
    assert "cuda:0 (GPU 1)" in done.stdout


def test_a_package_that_cannot_run_is_imported_before_torch(tmp_path):
    program = """
import importlib.util
assert importlib.util.find_spec("flash_attn") is None
for package in ("bitsandbytes", "flash_attn_interface"):
    try:
        __import__(package)
    except ImportError as error:
        print(error)
from multigpu import elapsed  # which imports torch
import torch
print("torch", torch.cuda.device_count(), elapsed())
import apex
"""
    (tmp_path / "flash_attn_interface.py").write_text("raise SystemError('was imported')")
    done = virtual(tmp_path, write(tmp_path, program), real=True, PYTHONPATH=ROOT)
    assert done.returncode == 1
    assert "bitsandbytes does not run on virtual GPUs, because its kernels" in done.stdout
    assert "flash_attn_interface does not run on virtual GPUs, because" in done.stdout
    assert "torch 2 0.0\n" in done.stdout and "apex does not run on virtual" in done.stdout
    hidden = virtual(tmp_path, "-c", "import apex", CUDA_VISIBLE_DEVICES="")
    assert "No module named 'apex'" in hidden.stdout


def test_triton_is_imported_and_its_kernels_are_not_launched(tmp_path):
    (tmp_path / "triton" / "runtime").mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").write_text("from . import runtime")
    (tmp_path / "triton" / "runtime" / "__init__.py").write_text("from . import jit")
    (tmp_path / "triton" / "runtime" / "jit.py").write_text(
        "class KernelInterface:\n    def __getitem__(self, grid):\n        return print\n"
    )
    program = """
import sys
import torch
assert "triton" not in sys.modules, "the run's start has imported it"
import triton.runtime.jit
kernel = type("Kernel", (triton.runtime.jit.KernelInterface,), {})()
try:
    kernel[(1,)]("launched")
except RuntimeError as error:
    print(error)
"""
    path = f"{tmp_path}:{ROOT}"
    done = virtual(tmp_path, write(tmp_path, program), real=True, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout
    assert "triton does not run on virtual GPUs, because its kernels" in done.stdout
    assert "launched" not in done.stdout


def test_ctrl_c_at_a_terminal_reaches_the_program_once(tmp_path):
    program = """
import signal, time
received = []
signal.signal(signal.SIGINT, lambda *_: received.append(1))
print("ready", flush=True)
while not received:
    time.sleep(0.01)
time.sleep(0.3)
print("received", len(received))
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvp("multigpu", ["multigpu", "virtual", "--gpus=2", write(tmp_path, program)])
    text = b""
    with open(terminal, "r+b", buffering=0) as file:
        while b"ready" not in text:
            text += file.read(100)
        file.write(b"\x03")
        # Linux raises OSError when the last process of a terminal has ended.
        with suppress(OSError):
            while part := file.read(1000):
                text += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"received 1\r\n" in text
    assert b"No process of this command used a virtual GPU." in text


def test_the_command_and_python_without_torch_do_not_import_it():
    code = "import sys, multigpu.cli, multigpu.cli.virtual; print('torch' in sys.modules)"
    assert run(sys.executable, "-c", code, PYTHONPATH=ROOT).stdout == "False\n"


def test_the_wheel_has_the_folder_for_pythonpath(tmp_path):
    code = """
from setuptools import Distribution
made = Distribution({"script_name": "setup.py"})
made.parse_config_files()
# It would write a folder of its own.
made.include_package_data = False
build = made.get_command_obj("build_py")
build.ensure_finalized()
print("\\n".join(build.get_outputs()))
"""
    files = run(sys.executable, "-c", code, cwd=ROOT).stdout
    assert "multigpu/site/sitecustomize.py\n" in files
