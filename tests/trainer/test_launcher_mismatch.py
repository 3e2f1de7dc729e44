"""The Trainer and the launcher disagree: the error names the line to change."""

import numbered_rows
import pytest

from multigpu.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")
RANKS = {
    "torchrun": {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2},
    # torchrun takes the ranks of one node, on however many nodes it runs.
    "torchrun, two nodes": {
        "RANK": 0,
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
    },
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": 0,
        "OMPI_COMM_WORLD_SIZE": 2,
        "OMPI_COMM_WORLD_LOCAL_RANK": 0,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
    },
    "srun": {
        "SLURM_JOB_ID": 7,
        "SLURM_PROCID": 0,
        "SLURM_NTASKS": 2,
        "SLURM_LOCALID": 0,
        "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NUM_NODES": 1,
        "SLURM_NODEID": 0,
        "SLURM_STEP_NODELIST": "localhost",
    },
}
# (launcher, the Trainer's arguments, what the error names: both numbers, and the line to
# change)
MISMATCHES = [
    ("torchrun", {"devices": 3}, ("3 devices", "2 ranks", "--nproc-per-node=3", "devices=2")),
    ("torchrun, two nodes", {"devices": 3, "num_nodes": 2}, ("--nproc-per-node=3'",)),
    ("torchrun, two nodes", {"devices": 2, "num_nodes": 3}, ("--nnodes=3'",)),
    ("torchrun", {"strategy": "ddp2"}, ("1 rank", "2 ranks", "--nproc-per-node=1")),
    ("torchrun", {"strategy": "dp"}, ("'dp' is one process", "torchrun", "2")),
    (
        "mpirun",
        {"devices": 2, "num_nodes": 3},
        ("1 node", "'-np 6 -H NODE1:2,NODE2:2,NODE3:2'", "num_nodes=1"),
    ),
    ("srun", {"devices": 3}, ("srun", "2 ranks", "#SBATCH --ntasks-per-node=3", "devices=2")),
]


@pytest.mark.parametrize(("launcher", "arguments", "facts"), MISMATCHES)
def test_a_mismatch_names_the_line_to_change(
    tmp_path, monkeypatch, launcher, arguments, facts
):
    for name, value in RANKS[launcher].items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError) as refusal:
        trainer = numbered_rows.trainer(tmp_path, **{"strategy": "ddp", **arguments})
        trainer.fit(numbered_rows.Net(), numbered_rows.DataLoader(numbered_rows.Rows(4)))
    missing = [fact for fact in facts if fact not in str(refusal.value)]
    assert not missing, f"{missing} not in: {refusal.value}"


def test_nodes_without_a_launcher_are_refused(tmp_path):
    expected = r"num_nodes=2.*torchrun --nnodes=2 --nproc-per-node=2"
    with pytest.raises(UserError, match=expected):
        trainer = numbered_rows.trainer(tmp_path, strategy="ddp", devices=2, num_nodes=2)
        trainer.fit(numbered_rows.Net(), numbered_rows.DataLoader(numbered_rows.Rows(4)))


@pytest.mark.parametrize("strategy", ["ddp", "single_device"])
def test_the_trainer_counts_the_nodes_that_the_launcher_started(monkeypatch, strategy):
    """A strategy of one process is on one node, also if other ranks run elsewhere."""
    ranks = {"RANK": 0, "WORLD_SIZE": 6, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    for name, value in (ranks | {"GROUP_WORLD_SIZE": 3, "MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, str(value))
    trainer = numbered_rows.trainer(".", strategy=strategy)
    assert trainer.num_nodes == (3 if strategy == "ddp" else 1)
