"""val_check_interval as a time: validation after the batches at which it is over."""

import time
from datetime import timedelta

import lightnings
import pytest
from trainer_user import trainer
from user_methods import user

import multigpu.trainer as ours
from multigpu.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")

SECONDS = 100  # that a batch takes on the patched clock


def validations(L, folder, monkeypatch, **arguments):
    """The steps after which the run validates, with a clock that each batch sets ahead."""
    clock = time.monotonic
    trained = []
    found = []

    def on_train_batch_start(self, batch, batch_idx):
        trained.append(batch_idx)

    def on_validation_start(self):
        found.append(self.trainer.global_step)

    hooks = {
        "on_train_batch_start": on_train_batch_start,
        "on_validation_start": on_validation_start,
    }
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock() + SECONDS * len(trained))
        run = trainer(L, folder, num_sanity_val_steps=0, max_epochs=3, **arguments)
        run.fit(user(L, **hooks)())
    return found


@pytest.mark.parametrize("every", [1, None])
@pytest.mark.parametrize(
    "interval",
    ["00:00:03:00", timedelta(seconds=180), {"minutes": 3}, {"seconds": 50}, {"hours": 1}],
    ids=str,
)
def test_it_validates_when_lightning_does(tmp_path, monkeypatch, interval, every):
    arguments = {"val_check_interval": interval, "check_val_every_n_epoch": every}
    found = [
        validations(L, tmp_path, monkeypatch, **arguments)
        for L in (ours, lightnings.package())
    ]
    assert found[0] == found[1]
    assert len(found[0]) == {50: 9, 1: 0}.get(_number(interval), 4)


def _number(interval):
    return next(iter(interval.values())) if isinstance(interval, dict) else None


def test_what_is_no_time_is_refused(tmp_path):
    with pytest.raises(UserError, match="val_check_interval"):
        trainer(ours, tmp_path, val_check_interval="3 minutes")
