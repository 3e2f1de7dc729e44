"""LightningDataModule.from_datasets and str(datamodule): as Lightning's, side by side."""

import lightnings
import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, TensorDataset

import multigpu.trainer as ours

pytestmark = pytest.mark.filterwarnings("ignore")

STAGES = ("train", "val", "test", "predict")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def both():
    return ours, lightnings.package()


def rows(n):
    return TensorDataset(torch.arange(n))


def described(loader):
    """What a user can see of a dataloader, or of a list or dict of them."""
    if isinstance(loader, list):
        return [described(each) for each in loader]
    if isinstance(loader, dict):
        return {name: described(each) for name, each in loader.items()}
    kinds = [
        kind.__name__
        for kind in (RandomSampler, SequentialSampler)
        if isinstance(loader.sampler, kind)
    ]
    return len(loader.dataset), loader.batch_size, loader.num_workers, kinds


def test_each_dataset_becomes_a_dataloader():
    found = []
    for L in both():
        made = L.LightningDataModule.from_datasets(
            rows(6), [rows(4), rows(3)], {"a": rows(2)}, rows(1), batch_size=4, num_workers=2
        )
        found.append([described(getattr(made, f"{stage}_dataloader")()) for stage in STAGES])
    assert found[0] == found[1]
    assert found[0][0] == (6, 4, 2, ["RandomSampler"])


def test_a_stream_is_not_shuffled():
    for L in both():
        loader = L.LightningDataModule.from_datasets(Stream(), batch_size=2).train_dataloader()
        assert [batch.tolist() for batch in loader] == [[0, 1], [2]]


@pytest.mark.parametrize("takes_all", [False, True])
def test_init_gets_its_own_arguments_and_batch_size_if_it_has_that_parameter(takes_all):
    found = []
    for L in both():

        class Named(L.LightningDataModule):
            def __init__(self, scale, batch_size=1):
                super().__init__()
                self.got = {"scale": scale, "batch_size": batch_size}

        class TakesAll(L.LightningDataModule):
            def __init__(self, scale, **keywords):
                super().__init__()
                self.got = {"scale": scale, **keywords}

        made = (TakesAll if takes_all else Named).from_datasets(rows(8), batch_size=4, scale=3)
        found.append((made.got, made.train_dataloader().batch_size))
    assert found[0] == found[1]
    assert found[0][0]["batch_size"] == 4


def test_str_counts_the_rows_behind_each_dataloader():
    found = []
    for L in both():

        class Unready(L.LightningDataModule):
            def train_dataloader(self):
                return torch.utils.data.DataLoader(self.made_in_setup)

        several = L.LightningDataModule.from_datasets(
            rows(6), [rows(4), rows(3)], predict_dataset=Stream()
        )
        found.append([str(several), str(Unready()), str(L.LightningDataModule())])
    assert found[0] == found[1]
    assert "6" in found[0][0] and "None" in found[0][1]


def test_str_counts_the_rows_of_a_dict_of_dataloaders():
    """Lightning's raises AttributeError."""
    made = ours.LightningDataModule.from_datasets({"a": rows(6), "b": rows(4)})
    assert all(f"size={number}" in str(made) for number in (6, 4))
