"""The report says whether a program fits, and what fills its GPUs."""

import json

import pytest
from virtual_runs import virtual, write

from multigpu.virtual.fit import Fit
from multigpu.virtual.record import Device

MIB = 2**20
# Two layers of 4 MiB each, Adam, rows of 4 KiB.
PROGRAM = """
import torch
from torch import nn

def main():
    layers = [nn.Linear(1024, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 1024, bias=False)]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    rows = torch.randn(ROWS, 1024).cuda()
    for _ in range(3):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

main()
"""
PARAMETERS = 8 * MIB
# Two workspaces of cuBLAS on a V100, of 8.125 MiB each.
WORKSPACES = 16 * MIB + MIB // 4


def run(folder, program, *flags):
    """Run a program; return what it printed, with the report, and the report's numbers."""
    write(folder, program)
    flags = ("--gpus", 1, "--shapes-only", "--json", "o.json", *flags)
    done = virtual(folder, *flags, "program.py")
    return done, json.loads((folder / "o.json").read_text())


@pytest.mark.parametrize("rows", [4096, 64])
def test_a_training_step_by_hand(tmp_path, rows):
    done, numbers = run(tmp_path, PROGRAM.replace("ROWS", str(rows)))
    (gpu,) = numbers["gpus"]
    kinds = gpu["bytes_by_kind"]
    assert sum(kinds.values()) == gpu["peak_bytes"], "each byte has a kind"
    assert kinds["parameters"] == PARAMETERS
    assert kinds["optimizer state"] == 2 * PARAMETERS
    assert kinds["workspaces"] == WORKSPACES
    batch = rows * 4096
    assert kinds["other"] == batch, "the rows"
    if rows == 4096:
        # The peak is in backward, before the first gradient of a parameter. Forward has kept
        # what ReLU returned, the model's result, and the mean; backward() makes a one.
        assert kinds["activations"] == 2 * batch + 512 + 512
        assert "gradients" not in kinds
    else:
        # The peak is in Adam's step, with temporaries of the parameters' size.
        assert kinds["gradients"] == PARAMETERS
        assert kinds["temporaries"] % PARAMETERS == 0
    assert "fits: " in done.stdout and " free" in done.stdout
    assert numbers["fit"]["headroom_bytes"] == 16 * 2**30 - gpu["peak_reserved_bytes"]
    lines = {(one["line"], one["kind"]): one["bytes"] for one in gpu["bytes_by_line"]}
    assert lines[7, "parameters"] == PARAMETERS
    assert lines[13, "optimizer state"] == 2 * PARAMETERS


def test_gradients_of_a_later_peak_that_are_gone_at_the_end(tmp_path):
    step = "        optimizer.step()\n"
    more = "        optimizer.zero_grad()\n        rows = torch.cat([rows, rows])\n"
    program = PROGRAM.replace("ROWS", "64").replace(step, step + more)
    _, numbers = run(tmp_path, program)
    assert numbers["gpus"][0]["bytes_by_kind"]["gradients"] == PARAMETERS


FROZEN = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

def main():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.set_device(0)
    with torch.device("meta"):
        layers = [nn.Linear(1024, 1024, bias=False) for _ in range(2)]
        model = nn.Sequential(*layers)
    model[0].requires_grad_(False)
    fully_shard(model)
    model.to_empty(device="cuda")
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 1024, device="cuda")).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

main()
"""


def test_frozen_weights_that_fsdp_shards_are_parameters(tmp_path):
    _, numbers = run(tmp_path, FROZEN)
    kinds = numbers["gpus"][0]["bytes_by_kind"]
    assert kinds["parameters"] >= PARAMETERS and kinds.get("other", 0) < MIB, kinds


def lines(device: Device, exit_code: int = 0) -> list[str]:
    return list(Fit.of({"cuda:0": device}, exit_code).text())


def test_the_verdict():
    gib = 2**30
    device = Device(0, 0, peak=3 * gib, capacity=16 * gib, reserved=7 * gib)
    assert lines(device) == [
        "fits: the peak of cuda:0 is 3.00 GiB (reserved: 7.00 GiB) of 16.00 GiB, 9.00 GiB free"
    ]
    device.shortage = {"tried": 9, "missing": 5, "allocated": 0, "reserved": 0, "born": 0}
    assert lines(device)[0].startswith("fits, after the program has caught OutOfMemoryError: ")
    assert lines(device, exit_code=1)[0].startswith("does not fit: 5 bytes were missing on")
    device.reserved = 16 * gib - 1
    assert lines(device)[0].startswith("fits only without CUDA's context (527.00 MiB): ")
