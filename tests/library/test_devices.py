"""The device of a rank, on machines with simulated numbers of GPUs."""

import pytest
import torch

from multigpu import devices
from multigpu.errors import UserError
from multigpu.launch.world import World
from multigpu.strategies import accelerators


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n) makes torch count n GPUs; it returns the list of devices made current."""

    def simulate(count: int) -> list:
        current: list = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        for name in ("SLURM_GPUS_ON_NODE", "SLURM_CLUSTER_NAME"):
            monkeypatch.delenv(name, raising=False)
        return current

    return simulate


def test_the_local_rank_picks_the_gpu(gpus):
    current = gpus(2)
    assert devices.pick(World(3, 4, 1, 2)) == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
    assert devices.backend(torch.device("cuda:1")) == "nccl"


def test_more_ranks_than_gpus(gpus):
    gpus(1)
    with pytest.raises(UserError, match=r"2 ranks on this node but 1 GPU,.*per-node=1"):
        devices.pick(World(0, 2, 0, 2))


def test_a_gpu_a_task_under_srun(gpus, monkeypatch):
    """srun --gpus-per-task=1 shows each rank one GPU, its own, as number 0."""
    gpus(1)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert devices.pick(World(1, 2, 1, 2, "srun")) == torch.device("cuda:0")
    with pytest.raises(UserError):
        devices.pick(World(1, 2, 1, 2, "torchrun"))


def test_the_classroom_clusters_gpus_are_simulated(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", devices.CLASSROOM)
    assert devices.pick(World(1, 4, 1, 2)) == torch.device("cpu")
    assert accelerators.resolve("auto", 2).kind != "cuda"
    # Under `multigpu virtual` each node has its own.
    monkeypatch.setenv(devices.VIRTUAL, "{}")
    rank = World(3, 4, 1, 2, "srun")
    assert accelerators.resolve("auto", 2).of_rank(rank) == torch.device("cuda:1")


# ---- several GPUs per rank -----------------------------------------------------------------


def test_local_rank_1_has_the_third_and_the_fourth_gpu(gpus):
    current = gpus(4)
    third, fourth = torch.device("cuda", 2), torch.device("cuda", 3)
    assert devices.gpus_of_rank(2, World(1, 2, 1, 2)) == [third, fourth]
    assert current == [third]
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert devices.gpus_of_rank(2, World(2, 4, 0, 2)) == [first, second]
    gpus(3)
    assert devices.gpus_of_rank(2, World(0, 2, 0, 2)) == []


def test_gpus_that_slurm_gave_and_torch_does_not_see(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    with pytest.raises(UserError, match=r"gave this node 4 GPUs, but torch .* sees none"):
        devices.pick(World())
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "")
    assert devices.pick(World()) == torch.device("cpu")


def test_ranks_share_the_cores(gpus, monkeypatch):
    gpus(0)
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads: list = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    devices.pick(World(0, 2, 0, 2))
    assert threads == [4]
