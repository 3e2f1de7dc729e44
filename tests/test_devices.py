"""Which device a rank takes, on machines that this one is not."""

import pytest
import torch

from multigpu import devices
from multigpu.errors import UserError
from multigpu.world import World


@pytest.fixture
def gpus(monkeypatch):
    """Pretend a number of GPUs; gives the list of devices that were made current."""

    def pretend(count: int) -> list:
        taken: list = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        for name in ("SLURM_GPUS_ON_NODE", "SLURM_CLUSTER_NAME"):
            monkeypatch.delenv(name, raising=False)
        return taken

    return pretend


def test_the_local_rank_picks_the_gpu(gpus):
    taken = gpus(2)
    assert devices.pick(World(3, 4, 1, 2)) == torch.device("cuda:1") and taken == [torch.device("cuda:1")]
    assert devices.backend(torch.device("cuda:1")) == "nccl"


def test_the_cpu_where_there_is_no_gpu(gpus):
    gpus(0)
    assert devices.pick(World(1, 2, 1, 2)) == torch.device("cpu")
    assert devices.backend(torch.device("cpu")) == "gloo"


def test_more_ranks_than_gpus(gpus):
    gpus(1)
    with pytest.raises(UserError, match=r"2 ranks on this node but 1 GPU,.*--spawn 1"):
        devices.pick(World(0, 2, 0, 2))


def test_a_gpu_a_task_under_srun(gpus, monkeypatch):
    """srun --gpus-per-task=1 shows each rank one GPU, its own, as number 0."""
    gpus(1)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert devices.pick(World(1, 2, 1, 2, "srun")) == torch.device("cuda:0")
    with pytest.raises(UserError):
        devices.pick(World(1, 2, 1, 2, "torchrun"))


def test_the_classroom_clusters_gpus_are_pretended(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", devices.CLASSROOM)
    assert devices.pick(World(1, 4, 1, 2)) == torch.device("cpu")
    assert "pretended" in devices.describe(World(1, 4, 1, 2), torch.device("cpu"))


def test_the_16_bit_type_of_an_old_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert devices.amp_dtype(torch.device("cuda:0")) == torch.float16
    assert devices.amp_dtype(torch.device("cpu")) == torch.bfloat16
