"""multigpu.gpus: the machine's GPUs if it has enough, otherwise virtual GPUs."""

import pytest
import torch

import multigpu
from multigpu.devices import CLASSROOM
from multigpu.errors import UserError
from multigpu.virtual import face
from multigpu.virtual.options import VARIABLE, Options


@pytest.fixture(autouse=True)
def taken_off():
    yield
    face.take_off()


def names(devices):
    return [str(device) for device in devices]


def test_without_gpus_virtual_ones_are_announced_and_started_once(capsys):
    assert not torch.cuda.is_available(), "this test is about a machine without GPUs"
    first, second = multigpu.gpus(2)
    printed = capsys.readouterr().out
    assert printed.count("no GPU") == 1 and "simulated: 2 × V100-16GB, NVLink2" in printed
    assert names((first, second)) == ["cuda:0", "cuda:1"] and torch.cuda.is_available()
    kept = torch.ones(2, device=second)
    assert multigpu.gpus(2) == [first, second] and multigpu.gpus() == [first, second]
    assert capsys.readouterr().out == "" and kept.sum().item() == 2
    assert names(multigpu.gpus(3)) == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize("real", [0, 3])
def test_a_notebook_has_room_for_the_announcement(capsys, monkeypatch, real):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: real)
    multigpu.gpus(16)
    lines = capsys.readouterr().out.splitlines()
    assert f"This machine has {real or 'no'} GPU" in lines[0]
    assert max(map(len, lines)) <= 95
    assert ("restart the kernel" in lines[-1]) == bool(real)


def test_real_gpus_come_first_unless_others_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with multigpu.gpus(2) as found:
        assert found == [torch.device("cuda", 0), torch.device("cuda", 1)]
        assert not face.is_on()
    # The GPUs of the classroom cluster are simulated.
    monkeypatch.setenv("SLURM_CLUSTER_NAME", CLASSROOM)
    multigpu.gpus(1)
    assert face.is_on()
    monkeypatch.delenv("SLURM_CLUSTER_NAME")
    face.take_off()
    multigpu.gpus(2, gpu="H100-80GB")
    assert face.is_on() and "H100" in torch.cuda.get_device_name()


def test_a_block_gives_the_gpus_before_it_back():
    """So each cell of a notebook can run again, after a sweep or a cell that failed."""
    multigpu.gpus(2, gpu="A100-80GB")
    with multigpu.gpus(4, shapes_only=True) as four:
        assert len(four) == torch.cuda.device_count() == 4
        assert "V100" in multigpu.label()
    assert "2 × A100-80GB" in multigpu.label()
    with pytest.raises(ZeroDivisionError), multigpu.gpus(1, memory="1GiB"):
        raise ZeroDivisionError
    assert "2 × A100-80GB" in multigpu.label(), "also after the second block"
    kept = torch.ones(1, device="cuda:1")
    for wrong, words in (({"count": 0}, "count is 0"), ({"clock": "fast"}, "clock is 'fast'")):
        with pytest.raises(UserError, match=words):
            multigpu.gpus(**wrong)
    assert kept.item() == 1, "a mistake ends no GPUs"
    face.take_off()
    with multigpu.gpus(1, memory="1GiB"):
        pass
    assert not face.is_on()


def test_what_multigpu_virtual_gave_is_not_replaced(monkeypatch):
    multigpu.gpus(2)
    monkeypatch.setenv(VARIABLE, Options().to_json())
    assert len(multigpu.gpus(2)) == 2
    for ask in (lambda: multigpu.gpus(3), lambda: multigpu.gpus(gpu="T4")):
        with pytest.raises(UserError, match=r"multigpu virtual.* 2 GPUs.*give the command"):
            ask()


def test_a_slurm_job_whose_gpus_torch_does_not_see(monkeypatch):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    with pytest.raises(UserError, match=r"gave this node 4 GPUs, but torch .* sees none"):
        multigpu.gpus(2)
