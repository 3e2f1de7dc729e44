"""Which checkpoints a Trainer saves, which is the best, and whose files it reads."""

import collections
import os
from pathlib import Path

import numbered_rows
import plain_net
import pytest
import small_net
import torch
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu import launch
from multigpu.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_checkpoint_watches_what_is_logged_at_the_epochs_end(tmp_path):
    class Ends(small_net.Net):
        def on_train_epoch_end(self):
            self.log("score", float(self.current_epoch))

    saver = L.callbacks.ModelCheckpoint(tmp_path, monitor="score", mode="max", save_top_k=-1)
    stop = L.callbacks.EarlyStopping(
        "score", mode="min", patience=2, check_on_train_epoch_end=True
    )
    trainer = small_net.fitted(
        Ends(), callbacks=[saver, stop], enable_checkpointing=True, max_epochs=9
    )
    assert (
        sorted(map(float, saver.best_k_models.values())) == [0, 1, 2]
        and trainer.current_epoch == 3
    )


def test_fast_dev_run_leaves_the_users_checkpoint_callback(tmp_path):
    saver = L.callbacks.ModelCheckpoint(tmp_path / "none")
    trainer = small_net.fitted(
        small_net.make_net(), callbacks=[saver], enable_checkpointing=True, fast_dev_run=True
    )
    assert (
        trainer.checkpoint_callback is saver
        and saver.best_model_path == ""
        and not (tmp_path / "none").exists()
    )


def test_test_without_a_model_takes_the_best_checkpoint(tmp_path):
    saver = L.callbacks.ModelCheckpoint(
        tmp_path, monitor="v", mode="max"
    )  # the worst: surely not the last
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=4,
        callbacks=[saver],
        **{**small_net.QUIET, "enable_checkpointing": True},
    )
    trainer.fit(
        small_net.make_net(),
        DataLoader(small_net.rows(12), 4),
        DataLoader(small_net.rows(12), 4),
    )
    assert trainer.test(dataloaders=DataLoader(small_net.rows(12), 4), verbose=False)[0][
        "v"
    ] == pytest.approx(float(saver.best_model_score), abs=1e-6)


def saved(folder):
    """Who wrote, and under which name."""
    wrote, real = [], torch.save

    def note(content, path, **rest):
        if isinstance(path, Path):  # else it is a message to another rank
            wrote.append(path.name)
        real(content, path, **rest)

    torch.save = note
    saver = L.callbacks.ModelCheckpoint(folder, filename="kept")
    arguments = {"callbacks": [saver], "enable_checkpointing": True}
    trainer = numbered_rows.trainer(folder, strategy="ddp", devices=2, **arguments)
    trainer.fit(numbered_rows.Net(), DataLoader(numbered_rows.Rows(8), 2))
    torch.save = real
    return {
        "wrote": wrote,
        "there": sorted(os.listdir(folder)),
        "best": Path(saver.best_model_path).name,
    }


def test_all_ranks_save_and_rank_0_writes_under_another_name_first(tmp_path):
    ranks = launch.call(saved, 2, str(tmp_path / "saved"))
    (wrote,), none = (rank["wrote"] for rank in ranks)
    assert wrote.startswith(".kept.ckpt.") and none == []
    for rank in ranks:
        assert rank["there"] == ["kept.ckpt"] and rank["best"] == "kept.ckpt"


class Kept(plain_net.Net):
    def __init__(self, folder):
        super().__init__()
        self.save_hyperparameters()


def test_a_checkpoint_with_any_object_is_read_if_it_is_trusted(tmp_path):
    path, run = tmp_path / "any.ckpt", plain_net.trainer(tmp_path)
    run.fit(Kept(collections.UserDict(a=1)), DataLoader(plain_net.rows(), 4))
    run.save_checkpoint(path)
    with pytest.raises(UserError, match=r"UserDict.* weights_only=False.* trust"):
        Kept.load_from_checkpoint(path)
    assert Kept.load_from_checkpoint(path, weights_only=False).hparams.folder["a"] == 1
    again = plain_net.trainer(tmp_path, max_epochs=2)
    again.fit(Kept({}), DataLoader(plain_net.rows(), 4), ckpt_path=path, weights_only=False)
    assert again.global_step == 4
    for name in ("validate", "test"):
        assert getattr(plain_net.trainer(), name)(
            Kept({}),
            DataLoader(plain_net.rows(), 4),
            ckpt_path=path,
            weights_only=False,
            verbose=False,
        )


def test_a_mistake_in_the_users_init_is_the_users(tmp_path):
    class Faulty(plain_net.Net):
        def __init__(self):
            super().__init__()
            len(3)

    torch.save({"state_dict": {}}, tmp_path / "a.ckpt")
    with pytest.raises(TypeError, match="has no len"):
        Faulty.load_from_checkpoint(tmp_path / "a.ckpt")


def test_a_missing_weight_is_an_error_unless_strict_is_false(tmp_path):
    run, path = plain_net.trainer(tmp_path), tmp_path / "a.ckpt"
    run.fit(plain_net.Net(), DataLoader(plain_net.rows(), 4))
    run.save_checkpoint(path)
    content = torch.load(path)
    content["state_dict"].pop("layer.bias")
    torch.save(content, path)
    with pytest.raises(UserError, match=r"layer.bias"):
        plain_net.Net.load_from_checkpoint(path)
    plain_net.Net.load_from_checkpoint(path, strict=False)


def test_a_file_that_may_not_be_read_is_not_called_truncated(tmp_path, monkeypatch):
    """root may read each file, so torch.load raises what it raises for another user."""

    def load(path, **keywords):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(UserError, match=r"cannot read a.ckpt \(Permission denied\)"):
        plain_net.Net.load_from_checkpoint("a.ckpt")


def test_a_file_of_hyperparameters_is_refused():
    with pytest.raises(UserError, match=r"hparams_file.*as arguments"):
        plain_net.Net.load_from_checkpoint("a.ckpt", hparams_file="hparams.yaml")
