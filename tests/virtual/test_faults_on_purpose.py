"""--kill-rank and --slow-rank: the others wait for the rank, as on GPUs."""

import pytest
from virtual_runs import TORCHRUN, reported, virtual, write

from multigpu.errors import UserError
from multigpu.virtual.faults import Kill, Slow

TWO = (*TORCHRUN, "--nproc-per-node=2")
PROGRAM = """
import os, torch
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.ones(2048, 2048, device="cuda")
ones = torch.ones(1, device="cuda")
for number in range(1, 5):
    dist.all_reduce(ones)
    print("rank", rank, "collective", number, flush=True)
    for _ in range(5):
        x @ x
dist.destroy_process_group()
"""


def test_a_slow_rank(tmp_path):
    """Its kernels take so many times as long, but for their overhead; the other one waits."""
    flags = ("--slow-rank", "1:2", "--shapes-only")
    text, numbers = reported(tmp_path, *flags, *TWO, write(tmp_path, PROGRAM))
    fast, slow = sorted(numbers["gpus"], key=lambda gpu: gpu["rank"])
    assert slow["compute_seconds"] == pytest.approx(2 * fast["compute_seconds"], rel=0.05)
    assert fast["collective_seconds"] == pytest.approx(slow["collective_seconds"])
    assert fast["idle_seconds"] > slow["idle_seconds"] + 0.3 * slow["compute_seconds"]
    assert "Rank 1 takes 2 times as long (--slow-rank)." in text


def test_a_killed_rank(tmp_path):
    flags = ("--kill-rank", "1@3", "--shapes-only")
    done = virtual(tmp_path, *flags, *TWO, write(tmp_path, PROGRAM))
    assert done.returncode != 0
    assert "rank 1 collective 2" in done.stdout and "collective 3" not in done.stdout
    assert "Signal 9 (SIGKILL)" in done.stdout


@pytest.mark.parametrize("text", ["1", "1@0", "a@2", "1:2", ""])
def test_a_wrong_kill(text):
    with pytest.raises(UserError, match="give RANK@NUMBER, such as 1@20"):
        Kill.parse(text)


@pytest.mark.parametrize("text", ["1", "1:0", "a:2", "1@2", "1:-1"])
def test_a_wrong_slow_rank(text):
    with pytest.raises(UserError, match=r"give RANK:FACTOR, such as 2:1\.5"):
        Slow.parse(text)
