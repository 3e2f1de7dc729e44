"""ModelCheckpoint keeps what Lightning's keeps.

Lightning's Trainer runs both; files and states are compared.
"""

from functools import partial
from types import SimpleNamespace

import lightnings
import pytest
import torch
from lightnings import fake, fit

from multigpu.errors import UserError
from multigpu.trainer.callbacks import ModelCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore")
NAN = float("nan")
SCORES = (0.5, 0.3, 0.4, 0.2)


@pytest.fixture(scope="module")
def lightning():
    return lightnings.package()


def classes(lightning, root):
    """Lightning's ModelCheckpoint and ours, each with a folder of its own."""
    original = lightning.pytorch.callbacks.ModelCheckpoint
    return [(original, root / "lightning"), (ModelCheckpoint, root / "multigpu")]


def contents(path):
    """The step of a checkpoint, and whether it holds optimizer states."""
    content = torch.load(path, weights_only=False)
    return content["global_step"], "optimizer_states" in content


def state(checkpoint, root):
    """A ModelCheckpoint's state and the files on the disk, with paths relative to `root`."""

    def short(path):
        return str(path).replace(str(root), "")

    return {
        "files": sorted((short(p), p.is_symlink()) for p in root.rglob("*") if p.is_file()),
        "contents": {short(p): contents(p) for p in root.rglob("*.ckpt")},
        "best": short(checkpoint.best_model_path),
        "score": checkpoint.best_model_score,
        "top": {short(path): float(score) for path, score in checkpoint.best_k_models.items()},
        "last": short(checkpoint.last_model_path),
        "key": checkpoint.state_key,
    }


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# name → (ModelCheckpoint's arguments, the arguments of `fit`)
CHECKPOINTS = {
    "default": ({}, {}),
    "best": ({"monitor": "val_loss"}, {}),
    "best of many": (
        {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch:02d}-{val_loss:.2f}"},
        {},
    ),
    "max": ({"monitor": "val_loss", "mode": "max", "save_last": True}, {}),
    "none but last": ({"save_top_k": 0, "save_last": True}, {}),
    "one name": ({"filename": "same", "monitor": "val_loss", "save_top_k": 3}, {}),
    "one name, overwritten": (
        {"filename": "same", "save_top_k": -1, "enable_version_counter": False},
        {},
    ),
    "missing in the name": ({"filename": "{nothing}-{epoch}"}, {}),
    "every two epochs": ({"every_n_epochs": 2, "save_top_k": -1, "save_last": True}, {}),
    "every three steps": ({"every_n_train_steps": 3, "save_top_k": -1}, {}),
    "after validation": ({"save_on_train_epoch_end": False, "save_top_k": -1}, {}),
    "validation twice an epoch": (
        {"save_top_k": -1},
        {"val_check_interval": 0.5, "max_epochs": 2},
    ),
    "epoch end, validation every two": (
        {"monitor": "val_loss", "save_on_train_epoch_end": True},
        {"check_val_every_n_epoch": 2},
    ),
    "sanity": ({"monitor": "val_loss"}, {"num_sanity_val_steps": 2, "max_epochs": 3}),
    "weights only": ({"save_weights_only": True}, {}),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_same_checkpoints_as_lightnings(lightning, tmp_path, name):
    arguments, fit_arguments = CHECKPOINTS[name]
    states = []
    for cls, root in classes(lightning, tmp_path):
        checkpoint = cls(**arguments)
        fit(root, checkpoint, SCORES, **fit_arguments)
        states.append(state(checkpoint, root))
    assert states[0] == states[1]
    assert states[1]["files"]


def test_nan_is_worse_than_every_number(lightning, tmp_path):
    for cls, folder in classes(lightning, tmp_path):
        checkpoint = cls(monitor="val_loss", dirpath=folder, filename="{epoch}")
        fit(tmp_path, checkpoint, (NAN, 0.5, NAN))
        assert state(checkpoint, folder)["best"] == "/epoch=1.ckpt"


def test_a_second_run_in_one_folder_gets_v1_and_a_resumed_one_goes_on(lightning, tmp_path):
    states = []
    for cls, folder in classes(lightning, tmp_path):
        make = partial(cls, folder, monitor="val_loss", save_last=True, save_top_k=2)
        for _ in range(2):
            fit(tmp_path, make(), SCORES[:2])
        resumed = make()
        last = folder / "last-v1.ckpt"
        fit(tmp_path, resumed, SCORES[2:], ckpt_path=last, max_epochs=4)
        states.append(state(resumed, folder))
    assert states[0] == states[1]
    assert len(states[1]["files"]) > 4


def test_the_checkpoint_that_a_run_resumed_from_stays(lightning, tmp_path):
    for cls, folder in classes(lightning, tmp_path):
        fit(tmp_path, cls(dirpath=folder, monitor="val_loss"), (0.5,))
        start = folder / "epoch=0-step=4.ckpt"
        resumed = cls(dirpath=folder, monitor="val_loss")
        fit(tmp_path, resumed, (0.4, 0.3), ckpt_path=start, max_epochs=3)
        assert names(folder) == [start.name, "epoch=2-step=12.ckpt"]


def test_lightnings_checkpoint_state_is_restored(lightning, tmp_path):
    arguments = {"dirpath": tmp_path, "monitor": "val_loss", "save_top_k": 2}
    original = lightning.pytorch.callbacks.ModelCheckpoint(**arguments)
    fit(tmp_path, original, SCORES)
    restored = ModelCheckpoint(**arguments)
    restored.load_state_dict(original.state_dict())
    assert state(restored, tmp_path) == state(original, tmp_path)


def test_a_state_from_another_folder_restores_the_best_path_only(lightning, tmp_path):
    original = ModelCheckpoint(tmp_path / "a", monitor="val_loss")
    fit(tmp_path, original, SCORES)
    restored = ModelCheckpoint(tmp_path / "b", monitor="val_loss")
    restored.load_state_dict(original.state_dict())
    assert restored.best_model_path == original.best_model_path != ""
    assert not restored.best_k_models


def test_ranks_whose_metric_differs_keep_the_same_lists(tmp_path):
    """Rank 0's path and score go to all ranks.

    Otherwise the lists would differ: one rank would save and wait for the others.
    """
    broadcasts, lists = [], []

    def run(rank, metric):
        def broadcast(value, src=0):
            if rank == 0:
                broadcasts.append(value)
                return value
            return broadcasts.pop(0)

        strategy = SimpleNamespace(
            broadcast=broadcast, reduce_boolean_decision=lambda decision, all=True: decision
        )
        trainer = fake(strategy=strategy, is_global_zero=rank == 0)
        checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2)
        checkpoint.setup(trainer, None, "fit")
        for epoch in range(3):
            trainer.current_epoch = epoch
            trainer.global_step = epoch + 1
            trainer.callback_metrics = {"val_loss": torch.tensor(metric - epoch)}
            checkpoint.on_validation_end(trainer, None)
            checkpoint.on_train_epoch_end(trainer, None)
        lists.append(checkpoint.best_k_models)

    run(0, 5.0)
    run(1, 4.5)
    assert not broadcasts
    assert len(lists[1]) == 2
    assert lists[0] == lists[1]


def test_only_rank_0_deletes_and_only_in_its_folder(tmp_path):
    folder = tmp_path / "checkpoints"
    inside = folder / "a.ckpt"
    folder.mkdir(parents=True)
    inside.touch()
    outside = tmp_path / "a.ckpt"
    outside.touch()
    checkpoint = ModelCheckpoint(folder)
    checkpoint._remove(fake(is_global_zero=False), str(inside), "new")
    assert inside.exists()
    checkpoint._remove(fake(), str(outside), "new")
    assert outside.exists()
    checkpoint._remove(fake(), str(inside), "new")
    assert not inside.exists()


@pytest.mark.parametrize(
    ("arguments", "trainer"),
    [
        ({"monitor": "val_los"}, {}),
        ({"monitor": "val_los"}, {"val_check_interval": 0.5}),
        ({"monitor": "val_los"}, {"validate": False}),
    ],
)
def test_a_metric_that_is_not_logged(lightning, tmp_path, arguments, trainer):
    with pytest.raises(UserError, match=r"'val_los'.*the metrics are .*train/loss"):
        fit(tmp_path, ModelCheckpoint(**arguments), SCORES[:2] * 2, **trainer)


def test_wrong_arguments_of_a_checkpoint():
    for arguments in (
        {"mode": "mni"},
        {"save_top_k": -2},
        {"save_top_k": 2},
        {"every_n_epochs": 1, "every_n_train_steps": 1},
    ):
        with pytest.raises(UserError, match="ModelCheckpoint"):
            ModelCheckpoint(**arguments)
    with pytest.raises(UserError, match=r"filename='\{epoch:zz\}'"):
        ModelCheckpoint(filename="{epoch:zz}").format_checkpoint_name({"epoch": 1})


def test_the_counters_can_be_monitored(lightning, tmp_path):
    """The checkpoint itself adds "step", so that no step is without it."""
    kept = []
    for cls, root in classes(lightning, tmp_path):
        fit(root, cls(root, monitor="step", every_n_train_steps=1, save_top_k=2), SCORES)
        kept.append(sorted(path.name for path in root.glob("*.ckpt")))
    assert kept[0] == kept[1] == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]
