"""Evaluation and prediction on two ranks: each sample counts once, and the order stays."""

import numbered_rows
import pytest
import torch
from numbered_rows import evaluated, flat
from small_net import cpu, make_net, rows
from torch.utils.data import DataLoader, SubsetRandomSampler

from multigpu import launch
from multigpu.trainer.dataloaders import shard_loader

pytestmark = pytest.mark.filterwarnings("ignore")


def evaluations(folder: str) -> dict:
    found = {"evaluated": evaluated(folder, strategy="ddp", devices=2)}
    model = make_net(norm=True)
    # One validation batch: rank 1 has none, and there are buffers.
    trainer = cpu(strategy="ddp")
    trainer.fit(model, DataLoader(rows(8), 2, shuffle=True), DataLoader(rows(3), 3))
    found["validated"] = float(trainer.callback_metrics["v"])
    # The ranks' random states differ.
    torch.manual_seed(launch.find_world().rank)
    loader = DataLoader(rows(16), 2, sampler=SubsetRandomSampler(range(16)))
    sharded = shard_loader(loader, (2, launch.find_world().rank), training=False)
    before = torch.get_rng_state()
    found["rows"] = [index for batch in sharded.batch_sampler for index in batch]
    found["its draws are nobody else's"] = torch.equal(before, torch.get_rng_state())
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks finds in `evaluations`."""
    return launch.call(evaluations, 2, str(tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return numbered_rows.evaluated(tmp_path_factory.mktemp("alone"))


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


def test_predict_gives_every_batch_once_in_order(ranks, alone):
    assert alone["predicted"] == [(0, [0, 1, 2]), (1, [3, 4, 5]), (2, [6, 7, 8]), (3, [9])]
    for rank in ranks:
        for what in ("predicted", "several", "limited"):
            assert rank["evaluated"][what] == alone[what]
        assert rank["evaluated"]["not wanted"] is None
        assert rank["evaluated"]["streamed"] == 4, (
            "a stream has no order to share: each rank's own, one after the other"
        )


def test_a_rank_without_a_validation_batch_is_not_waited_for(ranks):
    assert ranks[0]["validated"] == ranks[1]["validated"]


def test_a_random_sampler_of_the_users_gives_each_row_once_in_an_evaluation(ranks):
    assert sorted(ranks[0]["rows"] + ranks[1]["rows"]) == list(range(16))
    assert ranks[0]["its draws are nobody else's"]
