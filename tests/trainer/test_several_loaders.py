"""Several dataloaders: what Lightning's Trainer gives from them, this Trainer gives, too."""

import lightnings
import plain_net
import pytest
import torch
from torch.utils.data import DataLoader
from trainer_user import trainer
from user_methods import user

import multigpu.trainer as ours
from multigpu.errors import UserError
from multigpu.trainer.utilities import CombinedLoader

pytestmark = pytest.mark.filterwarnings("ignore")

MODES = ("min_size", "max_size", "max_size_cycle", "sequential")


def lightning_s():
    return lightnings.package().pytorch.utilities.CombinedLoader


def loaders():
    return {"a": DataLoader(range(5), 2), "b": [DataLoader(range(10, 17), 1), range(3)]}


@pytest.mark.parametrize("limits", [None, 2, [1, 4, 0]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_combined_loader_gives_lightnings_batches(mode, limits):
    rows = []
    for loader_class in (CombinedLoader, lightning_s()):
        loader = loader_class(loaders(), mode)
        loader.limits = limits
        rows.append([(str(batch), *indices) for batch, *indices in loader])
        iter(loader)
        rows.append(len(loader))
    assert rows[0] == rows[2]
    assert rows[1] == rows[3]


def test_a_list_of_numbers_is_one_loader():
    for loader_class in (CombinedLoader, lightning_s()):
        loader = loader_class([[1, 2], ["a", "b", "c"], [[3]]], "max_size")
        assert loader.flattened == [[1, 2], ["a", "b", "c"], [3]]
        rows = [batch for batch, *_ in loader]
        assert rows == [[1, "a", [3]], [2, "b", [None]], [None, "c", [None]]]


class Starts:
    """A dataloader that notes when its workers would start."""

    def __init__(self, number, started):
        self.number = number
        self.started = started

    def __iter__(self):
        self.started.append(self.number)
        return iter([self.number])

    def __len__(self):
        return 1


@pytest.mark.parametrize("mode", MODES)
def test_workers_start_with_the_iterator(mode):
    started = []
    loader = CombinedLoader([Starts(0, started), Starts(1, started)], mode)
    batches = iter(loader)
    assert started == ([0] if mode == "sequential" else [0, 1])
    list(batches)
    assert started[:2] == [0, 1]


def test_a_loader_without_a_length_counts_as_endless():
    endless = iter(int, 1)
    assert len(CombinedLoader([endless, range(3)], "min_size")) == 3
    with pytest.raises(TypeError):
        len(CombinedLoader([endless, range(3)], "max_size"))


def batches_trained(L, folder, given, **arguments):
    """The batches that training_step gets, as text, and the number of batches of an epoch."""

    def training_step(self, batch, batch_idx):
        self.recorded.append(str(batch))
        return self.layer(torch.ones(1, 6)).sum()

    module = user(L, training_step=training_step)()
    module.recorded = []
    run = trainer(L, folder, limit_val_batches=0, max_epochs=2, **arguments)
    run.fit(module, given)
    return module.recorded, run.num_training_batches, type(run.train_dataloader)


@pytest.mark.parametrize("limit", [1.0, 3, 0.5])
@pytest.mark.parametrize("how", ["list", "dict", "min_size", "max_size"])
def test_training_reads_several_loaders_as_lightning_does(tmp_path, how, limit):
    found = []
    for L, combined in ((ours, CombinedLoader), (lightnings.package(), lightning_s())):
        given = {"x": DataLoader(range(12), 2), "y": DataLoader(range(20, 24), 1)}
        if how == "list":
            given = list(given.values())
        elif how != "dict":
            given = combined(given, how)
        found.append(batches_trained(L, tmp_path, given, limit_train_batches=limit))
    assert found[0] == found[1]


def test_a_module_can_return_several_training_loaders(tmp_path):
    class Two(plain_net.Net):
        def train_dataloader(self):
            return {"a": DataLoader(plain_net.rows(), 4), "b": DataLoader(plain_net.rows(), 2)}

        def training_step(self, batch, batch_idx):
            return super().training_step(torch.cat([batch["a"], batch["b"]]), batch_idx)

    run = plain_net.trainer(tmp_path)
    run.fit(Two())
    assert run.global_step == 4


def test_one_loader_after_the_other_is_for_evaluation(tmp_path):
    sequential = CombinedLoader([DataLoader(plain_net.rows(), 4)] * 2, "sequential")
    with pytest.raises(UserError, match="sequential"):
        plain_net.trainer(tmp_path).fit(plain_net.Net(), sequential)

    class Named(plain_net.Net):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log(f"v{dataloader_idx}", dataloader_idx, add_dataloader_idx=False)

    found = plain_net.trainer(tmp_path).validate(Named(), sequential)
    assert found == [{"v0": 0.0}, {"v1": 1.0}]


def test_each_loaders_metrics_are_its_own(tmp_path):
    """add_dataloader_idx=False: a name belongs to the dataloader in whose batches it was."""

    def test_step(self, batch, batch_idx, dataloader_idx):
        self.log(f"own_{dataloader_idx}", batch_idx, add_dataloader_idx=False)
        self.log("numbered", batch_idx)

    def on_test_epoch_end(self):
        self.log("whole", 3.0)

    found = []
    for L in (ours, lightnings.package()):
        module = user(L, test_step=test_step, on_test_epoch_end=on_test_epoch_end)()
        two = [DataLoader(range(4), 2), DataLoader(range(6), 2)]
        found.append(trainer(L, tmp_path).test(module, two, verbose=False))
    assert found[0] == found[1]
    assert set(found[0][1]) == {"own_1", "numbered/dataloader_idx_1", "whole"}


def test_one_name_for_two_loaders_is_refused(tmp_path):
    class Same(plain_net.Net):
        def test_step(self, batch, batch_idx, dataloader_idx):
            self.log("x", 1.0, add_dataloader_idx=False)

    two = [DataLoader(plain_net.rows(), 4)] * 2
    with pytest.raises(UserError, match="add_dataloader_idx"):
        plain_net.trainer(tmp_path).test(Same(), two)


def test_dataloaders_are_made_again(tmp_path):
    """reload_dataloaders_every_n_epochs=2: the epochs in which each dataloader is made."""
    found = []
    for L in (ours, lightnings.package()):
        made = []

        def train(self, made=made):
            made.append(("train", self.trainer.current_epoch))
            return self.loader()

        def val(self, made=made):
            made.append(("val", self.trainer.current_epoch))
            return self.loader()

        module = user(L, train_dataloader=train, val_dataloader=val)()
        arguments = {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5}
        trainer(L, tmp_path, **arguments).fit(module)
        found.append(made)
    assert found[0] == found[1]
    assert [epoch for kind, epoch in found[0] if kind == "train"] == [0, 2, 4]
