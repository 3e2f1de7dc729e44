"""Where data come from: dataloaders, dicts of them, data modules, and their workers."""

import os

import numpy as np
import pytest
import torch
from small_net import Net, cpu, make_net, rows
from torch.utils.data import DataLoader, Dataset

import multigpu.trainer as L
from multigpu import launch
from multigpu.trainer import dataloaders


def test_evaluation_takes_a_dict_of_dataloaders():
    class Many(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("n", float(len(batch[0])))

    loaders = {"small": DataLoader(rows(2), 2), "large": DataLoader(rows(3), 3)}
    reported = cpu().validate(Many(), loaders, verbose=False)
    assert reported == [{"n/dataloader_idx_0": 2.0}, {"n/dataloader_idx_1": 3.0}]


def test_a_data_modules_state_is_in_checkpoints(tmp_path):
    class Sized(L.LightningDataModule):
        def __init__(self, size: int = 4):
            super().__init__()
            self.save_hyperparameters()
            self.state = 0

        def train_dataloader(self):
            return DataLoader(rows(self.hparams.size), 2)

        def state_dict(self):
            return {"state": 7}

        def load_state_dict(self, state_dict):
            self.state = state_dict["state"]

    trainer = cpu(max_epochs=1)
    trainer.fit(make_net(), Sized(size=6))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = Sized(size=6)
    cpu(max_epochs=2).fit(make_net(), again, ckpt_path=tmp_path / "a.ckpt")
    assert again.state == 7


def test_a_users_own_worker_init_fn_stays():
    L.seed_everything(3, workers=True, verbose=False)

    def prepared(loader, training):
        trainer = cpu()
        return dataloaders.prepare_for_rank(trainer, trainer.strategy, loader, training)

    own = DataLoader(rows(4), worker_init_fn=print)
    assert prepared(own, training=True).worker_init_fn is print
    assert prepared(DataLoader(rows(4)), training=False).worker_init_fn is not None
    os.environ.pop("PL_SEED_WORKERS")
    assert prepared(DataLoader(rows(4)), training=True).worker_init_fn is None


class Random(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, row):
        return torch.rand(1).item(), float(np.random.rand())


def drawn(**how) -> list:
    L.seed_everything(3, verbose=False, **how)
    trainer = cpu(strategy="ddp")
    trainer.strategy.connect()
    loader = DataLoader(Random(), 2, num_workers=1)
    return list(dataloaders.prepare_for_rank(trainer, trainer.strategy, loader, training=True))


def drawn_three_times() -> dict:
    return {
        "workers": drawn(workers=True),
        "again": drawn(workers=True),
        "not seeded": drawn(),
    }


@pytest.mark.slow
def test_workers_draw_by_the_seed_and_the_rank():
    two = launch.call(drawn_three_times, 2)
    first, second = (
        np.array([[part.numpy() for part in batch] for batch in rank["workers"]])
        for rank in two
    )
    assert not np.isin(first, second).any()
    assert np.array_equal(
        first, [[part.numpy() for part in batch] for batch in two[0]["again"]]
    )
    first, second = (
        np.array([[part.numpy() for part in batch] for batch in rank["not seeded"]])
        for rank in two
    )
    assert np.array_equal(first, second), "torch's own seeds know no ranks"
