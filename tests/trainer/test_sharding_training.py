"""Which rows each of two ranks trains on: samplers, shuffled data, streams."""

import random

import numbered_rows
import numpy as np
import pytest
import small_net
import torch
import torch.nn.functional as F
from numbered_rows import Backwards, Rows, Stream, flat
from refusals import outcome, user_error
from small_net import cpu, make_net
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import multigpu.trainer as L
from multigpu import launch
from multigpu.trainer import dataloaders

pytestmark = pytest.mark.filterwarnings("ignore")


def trained_rows(folder, loader, **arguments):
    """Which rows this rank trains on, epoch after epoch."""
    L.seed_everything(5, verbose=False)
    net = numbered_rows.Net()
    numbered_rows.trainer(folder, max_epochs=2, **arguments).fit(net, loader)
    return net.rows


def orders(folder):
    rank, two = launch.find_world().rank, {"strategy": "ddp", "devices": 2}
    weighted = torch.utils.data.RandomSampler(Rows(8), True, 6)
    batches = [[0, 1], [2, 3]]
    return {
        "backwards": trained_rows(folder, DataLoader(Rows(8), 2, sampler=Backwards(8)), **two),
        "in order": trained_rows(folder, DataLoader(Rows(8), 2), **two),
        "shuffled": trained_rows(folder, DataLoader(Rows(8), 2, shuffle=True), **two),
        "weighted": trained_rows(folder, DataLoader(Rows(8), 2, sampler=weighted), **two),
        "not shared": trained_rows(
            folder, DataLoader(Rows(4), 2), use_distributed_sampler=False, **two
        ),
        "overfit": trained_rows(
            folder, DataLoader(Rows(8), 2, shuffle=True), overfit_batches=1, **two
        ),
        "streams": trained_rows(folder, DataLoader(Stream(5 if rank else 3), 1), **two),
        "uneven loaders": trained_rows(
            folder, DataLoader(Rows(5 if rank else 3), 1), use_distributed_sampler=False, **two
        ),
        "an empty stream": trained_rows(
            folder, DataLoader(Stream(0 if rank else 3), 1), **two
        ),
        "batch sampler": user_error(
            lambda: trained_rows(folder, DataLoader(Rows(8), batch_sampler=batches), **two)
        ),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks finds in `orders`."""
    return launch.call(orders, 2, str(tmp_path_factory.mktemp("ranks")))


def test_a_users_sampler_is_dealt_out_and_not_replaced(ranks):
    first, second = (rank["backwards"] for rank in ranks)
    assert first == [[7, 5], [3, 1]] * 2 and second == [[6, 4], [2, 0]] * 2
    assert [rank["in order"][:2] for rank in ranks] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]], (
        "not shuffled unasked"
    )
    assert all(rank["not shared"] == [[0, 1], [2, 3]] * 2 for rank in ranks)
    assert [rank["overfit"] for rank in ranks] == [[[0, 2]] * 2, [[1, 3]] * 2]
    assert "cannot be sharded over 2 ranks" in ranks[0]["batch sampler"]


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
    L.seed_everything(5, verbose=False)
    loader = DataLoader(
        Rows(8),
        2,
        sampler=torch.utils.data.RandomSampler(range(8), True, 6),
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


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, row):
        return row


class Drawn(Sampler):
    """A sampler of the user's, that draws by Python's or NumPy's random numbers."""

    def __init__(self, permuted):
        self.permuted = permuted

    def __len__(self):
        return 8

    def __iter__(self):
        return iter([int(row) for row in self.permuted(8)])


DRAWING = {"random": lambda n: random.sample(range(n), n), "numpy": np.random.permutation}


class SmallStream(IterableDataset):
    def __iter__(self):
        return iter(small_net.rows(8))


class Unbatched(small_net.Net):
    def training_step(self, batch, batch_idx):
        self.seen.append(round(float(batch[0][0]), 4))
        return F.cross_entropy(self(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        return float(batch[0][0])


def data_of_a_rank() -> dict:
    found: dict = {}
    rank = launch.find_world().rank
    random.seed(rank)
    np.random.seed(rank)
    for name, permuted in DRAWING.items():
        trainer = cpu(strategy="ddp")
        trainer.strategy.connect()
        loader = DataLoader(Numbers(), 4, sampler=Drawn(permuted))
        shard = dataloaders.prepare_for_rank(trainer, trainer.strategy, loader, training=True)
        found[name] = []
        for epoch in range(3):
            shard.batch_sampler.sampler.set_epoch(epoch)
            found[name].append([row for batch in shard for row in batch.tolist()])

    train = DataLoader(small_net.rows(8), 2)
    some = [DataLoader(small_net.rows(4), 2)] if rank else []
    found["validates"] = outcome(lambda: cpu(strategy="ddp").fit(make_net(), train, some))
    streams = DataLoader(SmallStream(), 2) if rank else train
    found["streams"] = outcome(
        lambda: cpu(strategy="ddp", use_distributed_sampler=False).fit(make_net(), streams)
    )

    model, trainer = Unbatched(), cpu(strategy="ddp")
    trainer.fit(model, DataLoader(small_net.rows(8), batch_size=None))
    found["unbatched"], model.seen = model.seen, []
    trainer = cpu(strategy="ddp", max_epochs=2)
    trainer.fit(model, DataLoader(small_net.rows(8), batch_size=None, shuffle=True))
    found["shuffled"] = model.seen
    found["predicted"] = trainer.predict(model, DataLoader(small_net.rows(7), batch_size=None))
    return found


@pytest.fixture(scope="module")
def two():
    return launch.call(data_of_a_rank, 2)


@pytest.mark.parametrize("kind", DRAWING)
def test_a_sampler_of_any_random_numbers_is_dealt_out_anew_each_epoch(two, kind):
    epochs = list(zip(two[0][kind], two[1][kind], strict=True))
    assert all(sorted(first + second) == list(range(8)) for first, second in epochs)
    assert len({tuple(first) for first, _ in epochs}) == 3


def test_ranks_that_have_unlike_data_are_refused_together(two):
    assert "the number of validation dataloaders" in two[0]["validates"]
    assert "the kind of training dataloader (with a length, or without)" in two[0]["streams"]
    assert all("rank 1" in two[0][key] for key in ("validates", "streams"))
    assert all(
        rank[key].startswith("UserError") for rank in two for key in ("validates", "streams")
    )


def test_a_loader_without_batches_is_dealt_out(two):
    whole = [round(float(row[0]), 4) for row in small_net.rows(8).tensors[0]]
    assert [rank["unbatched"] for rank in two] == [whole[::2], whole[1::2]]
    first, second = (rank["shuffled"] for rank in two)
    assert sorted(first[:4] + second[:4]) == sorted(first[4:] + second[4:]) == sorted(whole)
    assert first[:4] != first[4:]


def test_a_loader_without_batches_is_predicted_once_and_in_order(two):
    for rank in two:
        assert rank["predicted"] == pytest.approx(
            [float(row[0]) for row in small_net.rows(7).tensors[0]]
        )
