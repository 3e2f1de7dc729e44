"""The processes of a run share the memory of each GPU, and the report counts a GPU once."""

import json
import re

import pytest
from virtual_runs import TORCHRUN, virtual, write

from multigpu.virtual.shared_memory import SharedMemory, machine, read_shared
from multigpu.virtual.sim.spans import in_turns

MIB = 2**20
TWO = (*TORCHRUN, "--nproc-per-node=2")

# 40 MiB for each of two ranks on a GPU of 64 MiB.
TWO_RANKS = """
import os, torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

def fill():
    return torch.ones(10 * 2**20, device="cuda:0")

if rank == 0:
    x = fill()
dist.barrier()
if rank == 1:
    try:
        fill()
    except torch.OutOfMemoryError as error:
        print(error)
    print("used", torch.cuda.device_memory_used(0) // 2**20)
    print(torch.cuda.list_gpu_processes(0))
print("free for", rank, torch.cuda.mem_get_info(0)[0] // 2**20)
dist.barrier()
if rank == 0:
    print("rank 0 is", os.getpid())
    del x
    small = torch.ones(1, device="cuda:0")
dist.barrier()
if rank == 1:
    try:
        fill()
    except torch.OutOfMemoryError:
        print("still full")
dist.barrier()
if rank == 0:
    torch.cuda.empty_cache()
dist.barrier()
if rank == 1:
    y = fill()
    print("free at last", torch.cuda.mem_get_info(0)[0] // 2**10)
dist.barrier()  # a process that has ended has no memory
"""


@pytest.mark.slow
def test_two_ranks_on_one_gpu(tmp_path):
    """The second rank gets CUDA's error, until the first one gives its memory back."""
    flags = ("--memory", "64MiB", "--json", "n.json")
    done = virtual(tmp_path, *flags, *TWO, write(tmp_path, TWO_RANKS))
    assert done.returncode == 0, done.stdout
    first = int(done.stdout.split("rank 0 is ")[1].split()[0])
    # c10/cuda/CUDACachingAllocator.cpp.
    assert (
        "Tried to allocate 40.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which 24.00 "
        f"MiB is free. Process {first} has 40.00 MiB memory in use. Including non-PyTorch "
        "memory, this process has 0 bytes memory in use. Of the allocated memory 0 bytes is "
        "allocated by PyTorch"
    ) in done.stdout
    for line in ("free for 0 24", "free for 1 24", "used 40", "still full"):
        assert f"{line}\n" in done.stdout
    # The small tensor has a segment of 2 MiB.
    assert f"free at last {(64 - 40 - 2) * 1024}\n" in done.stdout
    assert f"GPU:0\nprocess {first:>10d} uses       40.000 MB GPU memory\n" in done.stdout
    # A GPU's capacity is there once.
    assert re.search(
        r"^GPU 0, 2 processes, reserved +42\.00 MiB  64\.00 MiB\n"
        r"  rank 0, cuda:0 +40\.00 MiB +\d.*\n"
        r"  rank 1, cuda:0 +40\.00 MiB +\d",
        done.stdout,
        re.MULTILINE,
    )
    assert "GPU 0 computed for several processes in turns, as without MPS" in done.stdout
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert [gpu["peak_bytes"] for gpu in numbers["gpus"]] == [40 * MIB, 40 * MIB]
    assert numbers["memory"] == [
        {
            "machine": "node-0",
            "gpu": 0,
            "peak_reserved_bytes": 42 * MIB,
            "capacity_bytes": 64 * MIB,
            "processes": [0, 1],
        }
    ]


OTHERS = """
import os, signal, subprocess, sys, time, torch
from pathlib import Path

def fits(device, mebibytes=40):
    try:
        return bool(torch.ones(mebibytes * 2**18, device=device).numel())
    except torch.OutOfMemoryError:
        return False

if len(sys.argv) > 1:
    x = torch.ones(10 * 2**20, device="cuda:0")
    records = Path(os.environ["MULTIGPU_VIRTUAL_RECORDS"])
    while not list(records.glob(f"{os.getpid()}-*.json")):
        time.sleep(0.01)
    print("ready", flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)

def start(**more):
    command = [sys.executable, sys.argv[0], "child"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = subprocess.Popen(command, env=os.environ | more, **pipes)
    assert child.stdout.readline() == b"ready\\n"
    return child

child = start(CUDA_VISIBLE_DEVICES="1")
print("beside GPU 1:", fits("cuda:0"), fits("cuda:1"))
child.stdin.close()
# The child is a zombie until the parent waits for it.
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
print("after its death:", fits("cuda:1"))
torch.cuda.empty_cache()
start(GROUP_RANK="1", CUDA_VISIBLE_DEVICES="1").stdin.close()
print("beside another machine:", fits("cuda:1", 60))
"""


@pytest.mark.slow
def test_which_memory_is_shared(tmp_path):
    """That of a GPU with the same number on the same machine, until a process has ended."""
    flags = ("--memory", "64MiB", "--json", "n.json")
    done = virtual(tmp_path, *flags, write(tmp_path, OTHERS))
    assert done.returncode == 0, done.stdout
    assert "beside GPU 1: True False\n" in done.stdout
    assert "after its death: True\n" in done.stdout
    assert "beside another machine: True\n" in done.stdout
    memory = json.loads((tmp_path / "n.json").read_text())["memory"]
    used = {(gpu["machine"], gpu["gpu"]): gpu["peak_reserved_bytes"] // MIB for gpu in memory}
    # The dead child's 40 MiB and the parent's 60 MiB were not there at the same time.
    assert used == {("node-0", 0): 40, ("node-0", 1): 60, ("node-1", 1): 40}
    assert "GPU 1 of node-0, 2 processes, reserved" in done.stdout


TURNS = """
import sys, torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
x = torch.ones(1, device="cuda")
dist.barrier()
for _ in range(40):
    if dist.get_rank() < int(sys.argv[1]):
        torch.cuda._sleep(10**9)
torch.cuda.synchronize()
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("busy", [1, 2])
def test_ranks_on_one_gpu_take_turns(tmp_path, busy):
    """Two ranks that compute all the time take twice as long as on two GPUs."""
    script = write(tmp_path, TURNS)
    seconds = []
    for gpus in (1, 2):
        options = ("--gpus", gpus, "--json", "n.json")
        done = virtual(tmp_path, *options, *TWO, script, busy)
        assert done.returncode == 0, done.stdout
        numbers = json.loads((tmp_path / "n.json").read_text())
        seconds.append(numbers["simulated_seconds"])
        # No GPU computes for longer than there is time.
        assert sum(gpu["compute_seconds"] for gpu in numbers["gpus"]) <= gpus * seconds[-1]
    assert seconds[0] / seconds[1] == pytest.approx(busy, rel=0.01)


def test_work_in_turns():
    first, second = in_turns([{0: [(0, 1), (2, 3)]}, {0: [(0, 1), (1.5, 4)], 1: [(5, 6)]}])
    assert list(map(first, (0, 0.5, 1, 2, 3, 4))) == [0, 1, 2, 3, 5, 6]
    assert list(map(second, (0, 0.5, 1, 1.5, 2, 4, 5, 6, 7))) == [0, 1, 2, 2.5, 3, 6, 7, 8, 9]


# map_location is missing.
CHECKPOINT = """
import os, time, torch
from pathlib import Path

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
state = {name: torch.ones(5 * 2**20, device="cuda") for name in ("weight", "momentum")}
if rank == 0:
    torch.save(state, "new")
    records = Path(os.environ["MULTIGPU_VIRTUAL_RECORDS"])
    while not list(records.glob(f"{os.getpid()}-*.json")):
        time.sleep(0.01)
    os.rename("new", "checkpoint")
    time.sleep(60)
while not Path("checkpoint").exists():
    time.sleep(0.01)
torch.load("checkpoint")
"""


@pytest.mark.slow
def test_a_checkpoint_without_map_location(tmp_path):
    """A rank gets a copy of rank 0's tensors on GPU 0, until that has no room."""
    script = write(tmp_path, CHECKPOINT)
    done = virtual(tmp_path, "--memory", "64MiB", *TWO, script)
    assert done.returncode == 1
    assert 'torch.load("checkpoint")' in done.stdout
    assert "GPU 0 has a total capacity of 64.00 MiB of which 4.00 MiB is free" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("%")]
    assert [row[:5] for row in rows] == [
        ["rank", "0,", "cuda:0", "40.00", "MiB"],
        ["rank", "1,", "cuda:0", "20.00", "MiB"],
        ["rank", "1,", "cuda:1", "40.00", "MiB"],
    ]
    assert re.search("GPU 0, 2 processes, reserved +60.00 MiB  64.00 MiB", done.stdout)
    # Rank 1 only copies to GPU 0: that takes no turns.
    assert "computed for several processes" not in done.stdout


def test_a_run_whose_folder_is_gone(tmp_path):
    """The command has ended before the process, which then has its GPU for itself."""
    gone = SharedMemory(tmp_path / "gone" / "node-0.0.memory", 64)
    assert gone.occupy(32) and gone.others() == []
    shared = SharedMemory(tmp_path / "node-0.0.memory", 64)
    assert shared.occupy(32) and not shared.occupy(65)
    assert read_shared(tmp_path) == {("node-0", 0): (32, 1)}


def test_the_nodes_of_slurm_are_machines():
    """Two jobs on two nodes have a torchrun each, which calls its machine 0."""
    assert machine({"SLURMD_NODENAME": "n2", "GROUP_RANK": "0"}) == "n2-0"
    assert machine({"GROUP_RANK": "3"}) == "node-3" and machine({}) == "node-0"
