"""What users of such Trainers complain of most: a rule each, and a test of the rule."""

import json
import sys
from pathlib import Path

import pytest
import trainer_ranks
from commands import ROOT, run

from multigpu import launch
from multigpu.errors import UserError

SCRIPT = ROOT / "tests" / "support" / "trainer_script.py"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found in trainer_ranks.everything."""
    return launch.call(trainer_ranks.everything, 2, str(tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trainer_ranks.evaluated(tmp_path_factory.mktemp("alone"))


def flat(batches):
    return [row for batch in batches for row in batch]


# ---- 1. ranks that log different things -----------------------------------------------------


def test_ranks_may_log_different_names(ranks):
    """The epoch's values, and a step's with sync_dist, are over those ranks that have logged
    the name: on every rank.
    """
    for rank in ranks:
        assert rank["logged"] == {
            "both": 1.5,
            "both_step": 1.5,
            "both_epoch": 1.5,
            "mine": 1.0,
            "seldom": 4.0,
            "that": 5.0,
            "that_step": 5.0,
            "that_epoch": 5.0,
            "this": 6.0,
            "this_step": 6.0,
            "this_epoch": 6.0,
        }


# ---- 2. a rank dies -------------------------------------------------------------------------


def script(mode, folder, *starter, timeout=60):
    done = run(
        *(starter or (sys.executable,)), SCRIPT, mode, folder, PYTHONPATH=ROOT, timeout=timeout
    )
    return done.returncode, done.stdout


def test_a_rank_that_dies_without_a_word_ends_the_run(tmp_path):
    code, reported = script("exit", tmp_path)
    assert code == 7 and "error: rank 1" in reported and "exit code 7" in reported
    assert "Traceback" not in reported, "not that of gloo's lost connection"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_the_one_that_is_told(tmp_path, rank):
    code, reported = script(f"raise {rank}", tmp_path)
    assert code == 1 and f"ZeroDivisionError: planted in rank {rank}" in reported
    assert reported.count("Traceback") == 1 and "peer" not in reported


def test_horovodrun_ends_the_run_too(tmp_path):
    code, reported = script(
        "raise 1", tmp_path, "multigpu", "horovodrun", "-np", 2, sys.executable
    )
    assert code == 1 and "ZeroDivisionError: planted in rank 1" in reported
    assert (
        reported.count("Traceback") == 1
        and "error: rank 1" in reported
        and "exit code 1" in reported
    )


# ---- 3. SIGTERM -----------------------------------------------------------------------------


def test_sigterm_to_one_rank_stops_all_after_the_same_step_and_the_run_goes_on_from_there(
    tmp_path,
):
    code, reported = script("term", tmp_path)
    assert code == 143 and "SIGTERM after step 5" in reported and "ckpt_path=" in reported
    assert script("resume", tmp_path)[0] == 0 and script("whole", tmp_path)[0] == 0
    for rank in (0, 1):
        first, second, whole = (
            json.loads((tmp_path / f"{m}{rank}.json").read_text())
            for m in ("term", "resume", "whole")
        )
        assert first[1] == 5 and second[1] == whole[1] == 9
        assert first[0] + second[0] == whole[0], "to the bit, on each rank"


# ---- 4. the Trainer and the launcher disagree -----------------------------------------------

RANKS = {
    "torchrun": {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2},
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
    ("torchrun", {"devices": 2, "num_nodes": 4}, ("1 node", "--nnodes=4", "num_nodes=1")),
    ("torchrun", {"strategy": "ddp2"}, ("1 rank", "2 ranks", "--nproc-per-node=1")),
    ("torchrun", {"strategy": "dp"}, ("'dp' is one process", "torchrun", "2")),
    ("mpirun", {"devices": 3}, ("mpirun", "2 ranks", "-np 3", "devices=2")),
    ("srun", {"devices": 3}, ("srun", "2 ranks", "#SBATCH --ntasks-per-node=3", "devices=2")),
    ("srun", {"devices": 2, "num_nodes": 2}, ("1 node", "#SBATCH --nodes=2", "num_nodes=1")),
]


@pytest.mark.parametrize(("launcher", "arguments", "facts"), MISMATCHES)
def test_a_mismatch_names_the_line_to_change(
    tmp_path, monkeypatch, launcher, arguments, facts
):
    for name, value in RANKS[launcher].items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError) as refusal:
        trainer = trainer_ranks.trainer(tmp_path, **{"strategy": "ddp", **arguments})
        trainer.fit(trainer_ranks.Net(), trainer_ranks.DataLoader(trainer_ranks.Rows(4)))
    missing = [fact for fact in facts if fact not in str(refusal.value)]
    assert not missing, f"{missing} not in: {refusal.value}"


def test_nodes_without_a_launcher_are_refused(tmp_path):
    expected = r"num_nodes=2.*torchrun --nnodes=2 --nproc-per-node=2"
    with pytest.raises(UserError, match=expected):
        trainer = trainer_ranks.trainer(tmp_path, strategy="ddp", devices=2, num_nodes=2)
        trainer.fit(trainer_ranks.Net(), trainer_ranks.DataLoader(trainer_ranks.Rows(4)))


# ---- 5. notebooks: tests/trainer/test_spawn.py ----------------------------------------------
# ---- 6. the user's order, and each sample once ----------------------------------------------


def test_evaluation_counts_every_sample_once(ranks, alone):
    """10 rows in batches of 3: the metrics are one process's, and so are the numbers of the
    batches.
    """
    assert [rank["evaluated"]["seen"] for rank in ranks] == [
        [[0, 1, 2], [6, 7, 8]],
        [[3, 4, 5], [9]],
    ]
    assert alone["metrics"] == [
        pytest.approx({"mean": 4.5, "sum": 45, "max": 9, "min": 0, "index": 1.2})
    ]
    for rank in ranks:
        assert (
            rank["evaluated"]["metrics"] == alone["metrics"]
            and rank["evaluated"]["tested"] == alone["tested"]
        )
    first, second = (flat(rank["evaluated"]["tested rows"]) for rank in ranks)
    assert sorted(first + second) == sorted([*range(7), *range(3)]), (
        "shuffled, or not: each row once"
    )


def test_a_users_sampler_is_dealt_out_and_not_replaced(ranks):
    first, second = (rank["backwards"] for rank in ranks)
    assert first == [[7, 5], [3, 1]] * 2 and second == [[6, 4], [2, 0]] * 2
    assert [rank["in order"][:2] for rank in ranks] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]], (
        "not shuffled unasked"
    )
    assert all(rank["not shared"] == [[0, 1], [2, 3]] * 2 for rank in ranks)
    assert [rank["overfit"] for rank in ranks] == [[[0, 2]] * 2, [[1, 3]] * 2]
    assert "cannot be shared by 2 ranks" in ranks[0]["batch sampler"]


def test_shuffled_data_are_shared_anew_each_epoch(ranks):
    first, second = (rank["shuffled"] for rank in ranks)
    assert (
        sorted(flat(first[:2] + second[:2]))
        == list(range(8))
        == sorted(flat(first[2:] + second[2:]))
    )
    assert first[:2] != first[2:]


def test_a_sampler_with_replacement_stays_one(ranks):
    """6 draws of 8 rows: 3 a rank, of one order that both drew alike."""
    from multigpu.trainer import seed_everything
    from multigpu.trainer.loops import dataloaders

    seed_everything(5, verbose=False)
    loader = trainer_ranks.DataLoader(
        trainer_ranks.Rows(8),
        2,
        sampler=trainer_ranks.torch.utils.data.RandomSampler(range(8), True, 6),
    )
    whole = []
    for mine in (0, 1):
        sharded = dataloaders.shard_loader(loader, (2, mine), training=True)
        dataloaders.start_epoch(sharded, 0)
        whole.append([int(row) for batch in sharded for row in batch])
        assert whole[-1] == flat(ranks[mine]["weighted"][:2]) and len(whole[-1]) == 3
    assert ranks[0]["weighted"][:2] != ranks[0]["weighted"][2:], "drawn anew each epoch"


def test_streams_of_uneven_length_end_together(ranks):
    assert all(rank["streams"] == [[0], [1], [2]] * 2 for rank in ranks)
    assert all(rank["uneven loaders"] == [[0], [1], [2]] * 2 for rank in ranks)
    assert all(rank["an empty stream"] == [] for rank in ranks)


def test_a_collective_that_would_hang_is_refused(ranks):
    shapes, numbers = ranks[0]["gathered"]
    assert "different shapes ((1, 1), (3, 1))" in shapes
    assert "different numbers of batches" in numbers
    assert all(rank["evenly gathered"] == (2, 2, 1) for rank in ranks)


# ---- 7. checkpoints -------------------------------------------------------------------------


def test_all_ranks_save_and_rank_0_writes_under_another_name_first(ranks):
    (wrote,), none = (rank["saved"]["wrote"] for rank in ranks)
    assert wrote.startswith(".kept.ckpt.") and none == []
    for rank in ranks:
        assert rank["saved"]["there"] == ["kept.ckpt"] and rank["saved"]["best"] == "kept.ckpt"


def test_one_rank_that_wants_to_stop_stops_all(ranks):
    assert [rank["stopped"] for rank in ranks] == [2, 2]


# ---- 8. predictions -------------------------------------------------------------------------


def test_predict_gives_every_batch_once_in_order(ranks, alone):
    assert alone["predicted"] == [(0, [0, 1, 2]), (1, [3, 4, 5]), (2, [6, 7, 8]), (3, [9])]
    for rank in ranks:
        for what in ("predicted", "several", "limited"):
            assert rank["evaluated"][what] == alone[what]
        assert rank["evaluated"]["not wanted"] == (None, False)
        assert rank["evaluated"]["streamed"] == 4, (
            "a stream has no order to share: each rank's own, one after the other"
        )


def test_every_rule_has_its_test():
    text = Path(__file__).read_text()
    assert all(f"# ---- {number}. " in text for number in range(1, 9))
