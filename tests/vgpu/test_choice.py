"""multigpu.gpus: the machine's GPUs if it has enough, otherwise virtual GPUs."""

import pytest
import torch

import multigpu
from multigpu import vgpu
from multigpu.devices import CLASSROOM
from multigpu.errors import UserError
from multigpu.launch.world import World


def test_gpus(capsys):
    assert not torch.cuda.is_available(), "this test is about a machine without GPUs"
    try:
        first, second = multigpu.gpus(2)
        printed = capsys.readouterr().out
        assert printed.count("no GPU") == 1
        assert "simulated: 2 × V100-16GB, NVLink2" in printed
        assert [str(first), str(second)] == ["vgpu:0", "vgpu:1"]
        assert multigpu.gpus(2) == [first, second]
        with pytest.raises(UserError, match=r"3 GPUs.* 2 virtual GPUs.*vgpu\.stop\(\)"):
            multigpu.gpus(3)
    finally:
        vgpu.stop()


@pytest.mark.parametrize("world", [World(), World(size=16, local_size=16)])
def test_a_notebook_has_room_for_the_announcement(capsys, world):
    """95 columns, also for many processes and a machine with too few GPUs."""
    try:
        multigpu.gpus(16, world)
    finally:
        vgpu.stop()
    lines = capsys.readouterr().out.splitlines()
    assert "This machine has no GPU" in lines[0]
    assert max(map(len, lines)) <= 95


def test_gpus_prefers_real_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert multigpu.gpus(2) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    # The GPUs of the classroom cluster are simulated.
    monkeypatch.setenv("SLURM_CLUSTER_NAME", CLASSROOM)
    try:
        assert multigpu.gpus(1) == [torch.device("vgpu", 0)]
    finally:
        vgpu.stop()
    with pytest.raises(AttributeError):
        multigpu.nothing  # noqa: B018
