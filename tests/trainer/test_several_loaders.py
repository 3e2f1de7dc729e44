"""Several dataloaders: what Lightning's Trainer gives from them, this Trainer gives, too."""

import lightnings
import plain_net
import pytest
from torch.utils.data import DataLoader
from trainer_user import trainer
from user_methods import user

import multigpu.trainer as ours
from multigpu.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("kind", [list, tuple, lambda two: dict(enumerate(two))])
def test_training_takes_one_loader(tmp_path, kind):
    two = kind([DataLoader(plain_net.rows(), 4)] * 2)
    with pytest.raises(UserError, match=r"CombinedLoader.*one DataLoader"):
        plain_net.trainer(tmp_path).fit(plain_net.Net(), two)


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
