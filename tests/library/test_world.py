"""Every launcher's variables are read, and values that contradict each other are refused."""

import pytest

from multigpu.errors import UserError
from multigpu.launch.world import World, find_world, port_candidates, tasks_per_node


def env(text: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in text.split())


TORCHRUN = (
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=29400"
)
# as printed by Slurm 22.05 on two nodes with two GPUs each, one task per rank
SRUN = (
    "SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 SLURM_NODEID=1 SLURM_STEP_ID=0 "
    "SLURM_STEP_NUM_TASKS=4 SLURM_JOB_ID=123456 SLURM_STEP_TASKS_PER_NODE=2(x2) "
    "SLURM_TASKS_PER_NODE=2(x2) SLURM_GPUS_ON_NODE=2 SLURM_JOB_NAME=train MASTER_ADDR=n1"
)
MPIRUN = (
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=2734161921"
)
MPICH = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"
HOROVOD = (
    "HOROVOD_RANK=3 HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 "
    "HOROVOD_CROSS_RANK=1 MASTER_ADDR=n1"
)
BATCH = (
    "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_NODEID=0 SLURM_JOB_ID=3 "
    "SLURM_TASKS_PER_NODE=2(x2) SLURM_JOB_NAME=c.sh"
)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ("", (0, 1, 0, 1, "python")),
        (TORCHRUN, (3, 4, 1, 2, "torchrun")),
        (SRUN, (3, 4, 1, 2, "srun")),
        (MPIRUN, (1, 2, 1, 2, "mpirun")),
        (MPICH, (1, 2, 1, 2, "mpirun")),
        (HOROVOD, (3, 4, 1, 2, "horovodrun")),
        # torchrun has priority over the srun that started it, and over mpirun; mpirun has
        # priority over the srun that starts its helpers
        (f"{SRUN} {TORCHRUN.replace('RANK=3', 'RANK=2', 1)}", (2, 4, 1, 2, "torchrun")),
        (f"{MPIRUN} {TORCHRUN}", (3, 4, 1, 2, "torchrun")),
        (f"{SRUN} {MPIRUN}", (1, 2, 1, 2, "mpirun")),
        # srun --mpi=pmi2 sets PMI_RANK, but no local rank
        (f"{SRUN} PMI_RANK=3 PMI_SIZE=4", (3, 4, 1, 2, "srun")),
        # shells in a Slurm job with one task: nothing was launched
        (BATCH.replace("NTASKS=4", "NTASKS=1"), (0, 1, 0, 1, "python")),
        ("SLURM_JOB_ID=4 SLURM_NTASKS=1 SLURM_JOB_NAME=interactive", (0, 1, 0, 1, "python")),
        # srun within salloc: the job's name is "interactive", but srun started the ranks
        (SRUN.replace("train", "interactive"), (3, 4, 1, 2, "srun")),
        # an uneven step: 2 tasks on the first node, 1 on the second
        (
            "SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=3 SLURM_NODEID=1 "
            "SLURM_STEP_TASKS_PER_NODE=2,1 MASTER_ADDR=a",
            (2, 3, 0, 1, "srun"),
        ),
        # by hand
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", (1, 2, 1, 2, "torchrun")),
    ],
)
def test_place(variables, place):
    world = find_world(env(variables))
    assert (
        world.rank,
        world.size,
        world.local_rank,
        world.local_size,
        world.launcher,
    ) == place


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (TORCHRUN.replace("WORLD_SIZE=4", "WORLD_SIZE=0", 1), "WORLD_SIZE is 0"),
        (TORCHRUN.replace("RANK=3", "RANK=4", 1), "RANK is 4"),
        (TORCHRUN.replace("RANK=3", "RANK=-1", 1), "RANK is -1"),
        (TORCHRUN.replace("RANK=3", "RANK=one", 1), "RANK is 'one'"),
        (TORCHRUN.replace("LOCAL_RANK=1", "LOCAL_RANK=2"), "LOCAL_RANK is 2"),
        (
            TORCHRUN.replace("LOCAL_WORLD_SIZE=2", "LOCAL_WORLD_SIZE=8"),
            "more than the whole world",
        ),
        (TORCHRUN.replace("29400", "99999"), "MASTER_PORT is 99999"),
        ("WORLD_SIZE=4", "RANK is not"),
        ("RANK=0 WORLD_SIZE=1", "LOCAL_RANK is not"),
        (BATCH, "srun python"),
        ("SLURM_JOB_ID=4 SLURM_NTASKS=4 SLURM_JOB_NAME=interactive", "srun python"),
        (f"{SRUN} SLURM_PTY_PORT=4000".replace("PROCID=3", "PROCID=0"), "srun python"),
        (SRUN.replace("GPUS_ON_NODE=2", "GPUS_ON_NODE=4"), "--ntasks-per-node=4"),
        (SRUN.replace("GPUS_ON_NODE=2", "GPUS_ON_NODE=1"), "--gpus-per-node=2"),
        (SRUN.replace("NODEID=1", "NODEID=5"), "SLURM_NODEID is 5"),
        (SRUN.replace("PER_NODE=2(x2)", "PER_NODE=two"), "SLURM_STEP_TASKS_PER_NODE"),
        (HOROVOD.replace("MASTER_ADDR=n1", ""), "MASTER_ADDR"),
    ],
)
def test_refused(variables, words):
    with pytest.raises(UserError) as error:
        find_world(env(variables))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (4, ""),
        (2, "needs 2 GPUs: give '--ntasks-per-node=1' or '--gpus-per-node=4'"),
        (1, "2 GPUs: give '--gpus-per-node=4'"),
    ],
)
def test_ranks_with_two_gpus_each(gpus, words):
    variables = env(SRUN.replace("GPUS_ON_NODE=2", f"GPUS_ON_NODE={gpus}"))
    if not words:
        assert find_world(variables, gpus_each=2).local_size == 2
        return
    with pytest.raises(UserError) as error:
        find_world(variables, gpus_each=2)
    assert words in str(error.value)


def test_the_address_of_rank_0():
    world = find_world(env(TORCHRUN))
    assert (world.address, world.port, world.nodes) == ("n1", 29400, 2)
    assert find_world(env(SRUN)).job == "123456.0" and find_world(env(SRUN)).port is None
    assert find_world(env(MPIRUN)).address == "127.0.0.1"
    assert World().nodes == 1


def test_nodes_with_different_numbers_of_ranks():
    uneven = (
        "SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=3 SLURM_NODEID=1 MASTER_ADDR=a "
    )
    assert find_world(env(uneven + "SLURM_STEP_TASKS_PER_NODE=2,1")).nodes == 2
    torchrun = TORCHRUN.replace("WORLD_SIZE=4", "WORLD_SIZE=5", 1) + " GROUP_WORLD_SIZE=2"
    assert find_world(env(torchrun)).nodes == 2


def test_scontrol_names_the_first_node(monkeypatch, tmp_path):
    fake = tmp_path / "scontrol"
    node = "NodeName=n1 NodeAddr=10.0.0.7 NodeHostName=x"
    fake.write_text(f'#!/bin/sh\n[ "$2" = hostnames ] && echo "n1\nn2" || echo "{node}"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    variables = SRUN.replace("MASTER_ADDR=n1", "SLURM_STEP_NODELIST=n[1-2]")
    assert find_world(env(variables)).address == "10.0.0.7"
    fake.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(UserError, match="export MASTER_ADDR"):
        find_world(env(SRUN.replace("MASTER_ADDR=n1", "")))


def test_tasks_per_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_the_port_follows_from_the_job():
    assert port_candidates("123456.0", 2) == [18456, 18457]
    assert port_candidates("9999", 2) == [24999, 15000]
    assert port_candidates("a name") == port_candidates("a name")
