"""Which batches of a dataloader each rank gets, without ranks."""

from types import SimpleNamespace

import pytest
import small_net
from numbered_rows import Backwards, Rows, Stream
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from multigpu.errors import UserError
from multigpu.trainer import dataloaders

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(loader, epoch=0):
    dataloaders.start_epoch(loader, epoch)
    return [batch.flatten().int().tolist() for batch in loader]


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_in_evaluation_the_shares_are_the_whole_each_batch_once(parts):
    loader = DataLoader(Rows(10), 3)
    shares = [
        dataloaders.shard_loader(loader, (parts, mine), training=False)
        for mine in range(parts)
    ]
    whole = rows(loader)
    assert [len(share) for share in shares] == [len(rows(share)) for share in shares]
    for mine, share in enumerate(shares):
        assert rows(share) == whole[mine::parts]


@pytest.mark.parametrize(
    ("sampler", "shuffle"), [(None, False), (None, True), (Backwards(10), None)]
)
def test_in_training_all_ranks_make_the_same_number_of_steps(sampler, shuffle):
    loader = DataLoader(Rows(10), 2, shuffle=shuffle, sampler=sampler)
    sharded = [dataloaders.shard_loader(loader, (3, mine), training=True) for mine in range(3)]
    for epoch in (0, 1):
        found = [rows(loader, epoch) for loader in sharded]
        assert (
            [len(share) for share in found] == [2, 2, 2] == [len(loader) for loader in sharded]
        )
        assert {row for share in found for batch in share for row in batch} == set(range(10))
    assert (rows(sharded[0], 0) != rows(sharded[0], 1)) == bool(shuffle)


def test_a_loader_that_is_shared_already_is_left_alone():
    own = DataLoader(Rows(10), 2, sampler=DistributedSampler(Rows(10), 2, 1, shuffle=False))
    for loader in (own, DataLoader(Stream(4)), [1, 2]):
        assert dataloaders.shard_loader(loader, (2, 0), training=True) is loader
    sharded = dataloaders.shard_loader(
        DataLoader(Rows(10), 3, drop_last=True), (2, 0), training=True
    )
    assert rows(sharded) == [[0, 2, 4]], "drop_last is kept"


def test_a_sampler_that_gives_whole_batches_is_dealt_out():
    """batch_size=None: torch's way to let a data set make a batch of a list of rows."""
    loader = DataLoader(
        Rows(10), None, sampler=BatchSampler(SequentialSampler(range(10)), 2, False)
    )
    for training in (True, False):
        sharded = dataloaders.shard_loader(loader, (2, 0), training)
        assert list(sharded.sampler) == [[0, 1], [4, 5], [8, 9]] and len(sharded) == 3


def test_fewer_batches_than_ranks_is_said(monkeypatch):
    with pytest.warns(UserWarning, match=r"1 batch .*2 ranks.*smaller batch_size"):
        dataloaders.shard_loader(DataLoader(small_net.rows(4), 4), (2, 0), training=False)
    lengthless = DataLoader(
        small_net.rows(4), batch_sampler=SimpleNamespace(__iter__=lambda: iter([[0]]))
    )
    with pytest.raises(UserError, match=r"batch_sampler has no length.* 2 ranks.*__len__"):
        dataloaders.shard_loader(lengthless, (2, 0), training=False)
