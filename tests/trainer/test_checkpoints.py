"""Does ModelCheckpoint keep what Lightning's keeps? Lightning's own Trainer drives both; files and states are compared."""

from datetime import timedelta
from types import SimpleNamespace

import lightnings
import pytest
import torch
from lightnings import fake, fit

from multigpu.errors import UserError
from multigpu.trainer import callbacks as ours
from multigpu.trainer.callbacks.checkpoint_files import remove_checkpoint
from multigpu.trainer.callbacks.monitor import to_score

pytestmark = pytest.mark.filterwarnings("ignore")


NAN = float("nan")


DOWN = (0.5, 0.3, 0.4, 0.2)


@pytest.fixture(scope="module")
def real():
    return lightnings.package()


def held(path):
    """The step and the parts of a checkpoint."""
    content = torch.load(path, weights_only=False)
    return content["global_step"], "optimizer_states" in content


def told(checkpoint, root):
    """What a ModelCheckpoint knows and what lies on the disk, without the folder's name."""
    short = lambda path: str(path).replace(str(root), "")  # noqa: E731
    return {
        "files": sorted((short(p), p.is_symlink()) for p in root.rglob("*") if p.is_file()),
        "holds": {short(p): held(p) for p in root.rglob("*.ckpt")},
        "best": short(checkpoint.best_model_path),
        "score": checkpoint.best_model_score,
        "current": checkpoint.current_score,
        "kth": (short(checkpoint.kth_best_model_path), checkpoint.kth_value),
        "top": {short(path): float(score) for path, score in checkpoint.best_k_models.items()},
        "last": short(checkpoint.last_model_path),
        "key": checkpoint.state_key,
        "state": sorted(checkpoint.state_dict()),
    }


CHECKPOINTS = {
    "default": ({}, {}),
    "best": ({"monitor": "val_loss"}, {}),
    "best of many": (
        {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch:02d}-{val_loss:.2f}"},
        {},
    ),
    "max": ({"monitor": "val_loss", "mode": "max", "save_last": True}, {}),
    "all": ({"save_top_k": -1, "filename": "a{step}b"}, {}),
    "all monitored": ({"monitor": "val_loss", "save_top_k": -1}, {}),
    "none": ({"save_top_k": 0}, {}),
    "none but last": ({"save_top_k": 0, "save_last": True}, {}),
    "plain names": (
        {"filename": "e{epoch}-{val_loss:.1f}", "auto_insert_metric_name": False},
        {},
    ),
    "one name": ({"filename": "same", "monitor": "val_loss", "save_top_k": 3}, {}),
    "one name, overwritten": (
        {"filename": "same", "save_top_k": -1, "enable_version_counter": False},
        {},
    ),
    "a slash": ({"filename": "x{train/loss:.2f}", "auto_insert_metric_name": False}, {}),
    "missing in the name": ({"filename": "{nothing}-{epoch}"}, {}),
    "link": ({"save_last": "link", "monitor": "val_loss"}, {}),
    "not full": ({"save_top_k": 9, "monitor": "val_loss"}, {}),
    "nothing but links": (
        {"save_last": "link", "save_top_k": 0, "every_n_train_steps": 3},
        {},
    ),
    "no validation, half an epoch": ({}, {"validate": False, "val_check_interval": 0.5}),
    "every two epochs": ({"every_n_epochs": 2, "save_top_k": -1, "save_last": True}, {}),
    "every three steps": ({"every_n_train_steps": 3, "save_top_k": -1}, {}),
    "steps with a metric": (
        {"every_n_train_steps": 2, "monitor": "val_loss", "save_top_k": 3},
        {},
    ),
    "steps, metric at validation": (
        {
            "every_n_train_steps": 2,
            "monitor": "val_loss",
            "save_top_k": -1,
            "save_on_train_epoch_end": False,
        },
        {},
    ),
    "steps and train loss": (
        {"every_n_train_steps": 3, "monitor": "train/loss", "filename": "{step}"},
        {},
    ),
    "all the time": ({"train_time_interval": timedelta(0), "save_top_k": -1}, {}),
    "after validation": ({"save_on_train_epoch_end": False, "save_top_k": -1}, {}),
    "validation twice an epoch": (
        {"save_top_k": -1},
        {"val_check_interval": 0.5, "max_epochs": 2},
    ),
    "validation every two epochs": ({"save_top_k": -1}, {"check_val_every_n_epoch": 2}),
    "epoch end, validation every two": (
        {"monitor": "val_loss", "save_on_train_epoch_end": True},
        {"check_val_every_n_epoch": 2},
    ),
    "no validation": ({"monitor": "train/loss"}, {"validate": False}),
    "fast_dev_run": ({"save_last": False}, {"fast_dev_run": True}),
    "accumulated": (
        {"every_n_train_steps": 1, "save_top_k": -1},
        {"accumulate_grad_batches": 2},
    ),
    "sanity": ({"monitor": "val_loss"}, {"num_sanity_val_steps": 2, "max_epochs": 3}),
    "weights only": ({"save_weights_only": True}, {}),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_same_checkpoints_as_lightnings(real, tmp_path, name):
    arguments, trainer = CHECKPOINTS[name]
    both = []
    for kind, who in (
        ("a", real.pytorch.callbacks.ModelCheckpoint),
        ("b", ours.ModelCheckpoint),
    ):
        root = tmp_path / kind
        both.append((who(**arguments), root))
        fit(root, both[-1][0], DOWN, **trainer)
    (theirs, their_root), (mine, my_root) = both
    assert told(mine, my_root) == told(theirs, their_root)
    assert bool(told(mine, my_root)["files"]) == (name not in ("none", "fast_dev_run"))


def test_nan_is_worse_than_every_number(real, tmp_path):
    for kind, who in (
        ("a", real.pytorch.callbacks.ModelCheckpoint),
        ("b", ours.ModelCheckpoint),
    ):
        checkpoint = who(monitor="val_loss", dirpath=tmp_path / kind, filename="{epoch}")
        fit(tmp_path, checkpoint, (NAN, 0.5, NAN))
        assert told(checkpoint, tmp_path / kind)["best"] == "/epoch=1.ckpt"


def test_a_second_run_in_one_folder_gets_v1_and_a_resumed_one_goes_on(real, tmp_path):
    seen = []
    for kind, who in (
        ("a", real.pytorch.callbacks.ModelCheckpoint),
        ("b", ours.ModelCheckpoint),
    ):
        make = lambda who=who, kind=kind: who(  # noqa: E731
            dirpath=tmp_path / kind, save_last=True, monitor="val_loss", save_top_k=2
        )
        for _ in range(2):
            fit(tmp_path, make(), DOWN[:2])
        resumed = make()
        fit(
            tmp_path,
            resumed,
            DOWN[2:],
            ckpt_path=tmp_path / kind / "last-v1.ckpt",
            max_epochs=4,
        )
        seen.append(told(resumed, tmp_path / kind))
    assert seen[0] == seen[1] and len(seen[1]["files"]) > 4


def test_checkpoint_states_are_read_by_the_other_one(real, tmp_path):
    theirs = real.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path, monitor="val_loss", save_top_k=2
    )
    fit(tmp_path, theirs, DOWN)
    mine = ours.ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_top_k=2)
    mine.load_state_dict(theirs.state_dict())
    assert {k: v for k, v in told(mine, tmp_path).items() if k != "current"} == {
        k: v for k, v in told(theirs, tmp_path).items() if k != "current"
    }
    elsewhere = ours.ModelCheckpoint(dirpath=tmp_path / "b", monitor="val_loss")
    with pytest.warns(UserWarning, match="left alone"):
        elsewhere.load_state_dict(theirs.state_dict())
    assert elsewhere.best_model_path == theirs.best_model_path and not elsewhere.best_k_models


def test_saved_on_an_exception(real, tmp_path):
    class Stops(real.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 2:
                raise RuntimeError("power cut")

    seen = []
    for kind, who in (
        ("a", real.pytorch.callbacks.ModelCheckpoint),
        ("b", ours.ModelCheckpoint),
    ):
        checkpoint = who(dirpath=tmp_path / kind, save_on_exception=True)
        checkpoint.on_train_batch_start = Stops().on_train_batch_start
        with pytest.raises(RuntimeError, match="power cut"):
            fit(tmp_path, checkpoint, DOWN)
        seen.append([path.name for path in (tmp_path / kind).iterdir()])
    assert seen[0] == seen[1] == ["epoch=0-step=2.ckpt"]


@pytest.mark.parametrize(
    ("arguments", "trainer"),
    [
        ({"monitor": "val_los"}, {}),
        ({"monitor": "val_los"}, {"val_check_interval": 0.5}),
        ({"monitor": "val_los", "every_n_train_steps": 1}, {}),
        ({"monitor": "val_los"}, {"validate": False}),
    ],
)
def test_a_metric_that_nobody_logs(real, tmp_path, arguments, trainer):
    with pytest.raises(UserError, match=r"no such metric; the metrics are .*train/loss"):
        fit(tmp_path, ours.ModelCheckpoint(**arguments), DOWN[:2] * 2, **trainer)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mode": "mni"}, "'min'.*or 'max'"),
        ({"save_top_k": -2}, "-1 for all"),
        ({"save_top_k": 2}, "needs monitor"),
        ({"every_n_epochs": -1}, "every_n_epochs=-1"),
        ({"every_n_train_steps": -1}, "every_n_train_steps=-1"),
        ({"every_n_epochs": 1, "every_n_train_steps": 1}, "two ModelCheckpoints"),
    ],
)
def test_wrong_arguments_of_a_checkpoint(arguments, says):
    with pytest.raises(UserError, match=says):
        ours.ModelCheckpoint(**arguments)


def test_a_wrong_format_in_a_files_name():
    with pytest.raises(UserError, match=r"\{epoch:zz\} cannot be filled"):
        ours.ModelCheckpoint(filename="{epoch:zz}").format_checkpoint_name(
            {"epoch": torch.tensor(1)}
        )


def test_ranks_whose_metric_differs_keep_the_same_lists(tmp_path):
    """Rank 0's path and score win; without that the lists grow apart, and at last the ranks wait for one another."""
    told, lists = [], []

    def run(rank, metric):
        def broadcast(value, src=0):
            if rank == 0:
                told.append(value)
                return value
            return told.pop(0)

        decisions = SimpleNamespace(
            broadcast=broadcast, reduce_boolean_decision=lambda d, all=True: d
        )
        trainer = fake(strategy=decisions, is_global_zero=rank == 0)
        checkpoint = ours.ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_top_k=2)
        checkpoint.setup(trainer, None, "fit")
        for epoch in range(3):
            trainer.current_epoch, trainer.global_step = epoch, epoch + 1
            trainer.callback_metrics = {"val_loss": torch.tensor(metric - epoch)}
            checkpoint.on_validation_end(trainer, None)
            checkpoint.on_train_epoch_end(trainer, None)
        lists.append(checkpoint.best_k_models)

    run(0, 5.0)
    run(1, 4.5)
    assert not told and len(lists[1]) == 2 and lists[0] == lists[1]


def test_a_last_checkpoint_with_the_epoch_in_its_name(real, tmp_path):
    for kind, who in (
        ("a", real.pytorch.callbacks.ModelCheckpoint),
        ("b", ours.ModelCheckpoint),
    ):
        checkpoint = who(dirpath=tmp_path / kind, save_last=True)
        checkpoint.CHECKPOINT_NAME_LAST = "last-{epoch}"
        fit(tmp_path, checkpoint, DOWN)
        assert sorted(p.name for p in (tmp_path / kind).iterdir()) == [
            "epoch=3-step=16.ckpt",
            "last-epoch=3.ckpt",
        ]


def test_the_checkpoint_that_a_run_began_with_stays(real, tmp_path):
    for kind, who in (
        ("a", real.pytorch.callbacks.ModelCheckpoint),
        ("b", ours.ModelCheckpoint),
    ):
        make = lambda who=who, kind=kind: who(dirpath=tmp_path / kind, monitor="val_loss")  # noqa: E731
        fit(tmp_path, make(), (0.5,))
        start = tmp_path / kind / "epoch=0-step=4.ckpt"
        fit(tmp_path, make(), (0.4, 0.3), ckpt_path=start, max_epochs=3)
        assert sorted(p.name for p in (tmp_path / kind).iterdir()) == [
            start.name,
            "epoch=2-step=12.ckpt",
        ]


def test_only_rank_0_deletes_and_only_in_its_folder(tmp_path):
    inside, outside = tmp_path / "c" / "a.ckpt", tmp_path / "a.ckpt"
    inside.mkdir(parents=True)  # a sharded checkpoint is a folder
    outside.touch()
    for path, zero in ((inside, False), (outside, True)):
        remove_checkpoint(fake(is_global_zero=zero), str(path), "new", str(tmp_path / "c"))
        assert path.exists()
    remove_checkpoint(fake(), str(inside), "new", str(tmp_path / "c"))
    assert not inside.exists()


def test_the_ranks_decide_together(tmp_path):
    """Rank 0's clock says whether to save; all ranks must find a score better; the sanity check saves nothing."""
    answers = SimpleNamespace(
        broadcast=lambda value: False, reduce_boolean_decision=lambda d, all=True: False
    )
    trainer = fake(
        strategy=answers, global_step=3, callback_metrics={"a": torch.tensor([1.0])}
    )
    ours.ModelCheckpoint(tmp_path, train_time_interval=timedelta(0)).on_train_batch_end(
        trainer, None, None, None, 0
    )
    checkpoint = ours.ModelCheckpoint(tmp_path, monitor="a")
    state = {
        "best_k_models": {"x": torch.tensor(5.0)},
        "kth_best_model_path": "x",
        "best_model_path": "x",
    }
    checkpoint.load_state_dict(state)
    checkpoint.on_train_epoch_end(trainer, None)
    assert checkpoint.best_k_models == state["best_k_models"] and not trainer.saved
    assert checkpoint.best_k_models is not state["best_k_models"]
    checkpoint, trainer = (
        ours.ModelCheckpoint(tmp_path, monitor="a"),
        fake(**vars(trainer) | {"sanity_checking": True}),
    )
    checkpoint.on_validation_end(trainer, None)
    checkpoint.on_train_epoch_end(trainer, None)
    assert not trainer.saved and to_score(trainer.callback_metrics["a"]).shape == ()
