"""A run resumes from a checkpoint as if it had never stopped."""

import lightnings
import pytest
import torch
import trainer_user
from trainer_user import trainer

import multigpu.trainer as ours
from multigpu.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")


def fit(L, root, epochs=3, ckpt_path=None, callbacks=(), data=None, **of_module):
    """The losses of a run, its weights and its trainer."""
    L.seed_everything(3, verbose=False)
    module = trainer_user.net(L, **of_module)
    run = trainer(
        L,
        root,
        max_epochs=epochs,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks) or None,
    )
    run.fit(module, *trainer_user.loaders(**data or {}), ckpt_path=ckpt_path)
    return module.losses, {name: w.clone() for name, w in module.state_dict().items()}, run


def packages():
    return {"multigpu": ours, "lightning": lightnings.package()}


def test_training_resumes_where_the_file_was_written(tmp_path):
    """Lightning keeps the progress of its loops in its own form."""
    _, _, run = fit(lightnings.package(), tmp_path, epochs=1)
    run.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(UserError, match=r"written by Lightning.*load_from_checkpoint"):
        fit(ours, tmp_path, ckpt_path=tmp_path / "one.ckpt")


@pytest.mark.parametrize("schedule", ["step", "epoch", "plateau"])
def test_a_checkpoint_at_an_epochs_end_goes_on(tmp_path, schedule):
    whole, weights, _ = fit(ours, tmp_path, schedule=schedule)
    started, _, run = fit(ours, tmp_path, epochs=1, schedule=schedule)
    run.save_checkpoint(tmp_path / "one.ckpt")
    continued, reached, other = fit(
        ours, tmp_path, ckpt_path=tmp_path / "one.ckpt", schedule=schedule
    )
    assert len(started) == 5 and started + continued == whole
    assert (other.current_epoch, other.global_step) == (3, 15)
    assert all(torch.equal(weights[name], w) for name, w in reached.items())


@pytest.mark.parametrize(
    "way", [("multigpu", "lightning"), ("lightning", "multigpu")], ids=" to ".join
)
def test_load_from_checkpoint_reads_the_others(tmp_path, way):
    first, second = (packages()[name] for name in way)
    _, weights, run = fit(first, tmp_path, epochs=1, schedule="epoch", dropout=0.25)
    run.save_checkpoint(tmp_path / "one.ckpt")
    kind = type(trainer_user.net(second))
    module = kind.load_from_checkpoint(tmp_path / "one.ckpt", manual=True)
    assert dict(module.hparams) == {"schedule": "epoch", "manual": True, "dropout": 0.25}
    assert all(torch.equal(weights[name], w) for name, w in module.state_dict().items())


def test_a_checkpoint_has_lightnings_keys(tmp_path):
    files = []
    for name, L in packages().items():
        _, _, run = fit(L, tmp_path, epochs=1, schedule="epoch")
        run.save_checkpoint(tmp_path / name)
        files.append(torch.load(tmp_path / name, weights_only=name == "multigpu"))
    mine, theirs = files
    assert mine.keys() - theirs.keys() == {"multigpu"}
    assert theirs.keys() - mine.keys() <= {"hparams_name", "loops"}
    assert (mine["epoch"], mine["global_step"]) == (theirs["epoch"], theirs["global_step"])
    assert mine["hyper_parameters"] == theirs["hyper_parameters"]
    assert mine["lr_schedulers"] == theirs["lr_schedulers"]


class Saver(ours.Callback):
    """Save after so many batches of the whole run."""

    def __init__(self, path, after):
        self.path, self.after, self.seen = path, after, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen += 1
        if self.seen == self.after:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("after", "schedule", "more"),
    [
        (1, "step", {}),
        (7, "step", {"num_workers": 1}),
        (9, "plateau", {}),
        (5, "plateau", {}),
        (10, "epoch", {}),
    ],
)
def test_a_run_that_stops_within_an_epoch_goes_on_to_the_bit(tmp_path, after, schedule, more):
    """Shuffled data and dropout: the order of the rest and the masks are those of the run that
    never stopped.

    An epoch has 5 batches: what is saved at the end of the last, before the validation, goes
    on with the validation.
    """
    keywords = {"data": {"shuffle": True, **more}, "dropout": 0.5, "schedule": schedule}
    path = tmp_path / "within.ckpt"
    whole, weights, _ = fit(ours, tmp_path, callbacks=[Saver(path, after)], **keywords)
    ours.seed_everything(99, verbose=False)
    continued, reached, run = fit(ours, tmp_path, ckpt_path=path, **keywords)
    assert continued == whole[after:] and run.global_step == 15
    assert all(torch.equal(weights[name], w) for name, w in reached.items())


@pytest.mark.parametrize("after_validation", [True, False])
def test_a_modelcheckpoints_file_goes_on_to_the_bit(tmp_path, after_validation):
    """A scheduler that monitors val_loss steps after the save: resuming steps it, too."""
    keywords = {"data": {"shuffle": True}, "dropout": 0.5, "schedule": "plateau", "epochs": 4}
    save = {
        "save_top_k": -1,
        "filename": "{epoch}",
        "save_on_train_epoch_end": not after_validation,
    }
    whole, weights, run = fit(
        ours,
        tmp_path,
        callbacks=[ours.callbacks.ModelCheckpoint(tmp_path, **save)],
        **keywords,
    )
    assert run.optimizers[0].param_groups[0]["lr"] < 0.5
    for epoch in range(3):
        continued, reached, _ = fit(
            ours, tmp_path, ckpt_path=tmp_path / f"epoch={epoch}.ckpt", **keywords
        )
        assert continued == whole[5 * (epoch + 1) :]
        assert all(torch.equal(weights[name], w) for name, w in reached.items())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    _, _, run = fit(ours, folder, epochs=1)
    run.save_checkpoint(folder / "whole.ckpt")
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    (folder / "half.ckpt").write_bytes((folder / "whole.ckpt").read_bytes()[:1500])
    (folder / "text.ckpt").write_text("no checkpoint")
    torch.save({"weights": 1}, folder / "other.ckpt")
    return folder


@pytest.mark.parametrize(
    ("file", "facts"),
    [
        ("half.ckpt", ["half.ckpt", "truncated"]),
        ("text.ckpt", ["text.ckpt", "not a checkpoint"]),
        ("none.ckpt", ["no checkpoint", "none.ckpt"]),
        ("", ["a folder", "a checkpoint in it"]),
        ("other.ckpt", ["other.ckpt", "'state_dict'"]),
        ("weights.ckpt", ["weights.ckpt", "weights only", "load_from_checkpoint"]),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named_in_one_line(tmp_path, checkpoint, file, facts):
    with pytest.raises(UserError) as refusal:
        fit(ours, tmp_path, ckpt_path=checkpoint / file)
    text = str(refusal.value)
    missing = [fact for fact in facts if fact not in text]
    assert not missing and "\n" not in text, f"{missing} not in: {text}"


@pytest.mark.parametrize("name", ["multigpu", "lightning"])
def test_max_epochs_counts_the_epochs_of_the_checkpoint(tmp_path, name):
    """With as many epochs nothing is left to train; with fewer, max_epochs is a mistake."""
    library = packages()[name]
    _, _, run = fit(library, tmp_path, epochs=2)
    run.save_checkpoint(tmp_path / "two.ckpt")
    losses, _, _ = fit(library, tmp_path, epochs=2, ckpt_path=tmp_path / "two.ckpt")
    assert losses == []
    with pytest.raises(Exception, match=r"(has |epoch=)2\b.*max_epochs\D*1\b"):
        fit(library, tmp_path, epochs=1, ckpt_path=tmp_path / "two.ckpt")


class Wider(type(trainer_user.net(ours))):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)


@pytest.mark.parametrize("stage", ["fit", "validate", "load_from_checkpoint"])
def test_another_classs_checkpoint_is_refused(tmp_path, checkpoint, stage):
    module = Wider()
    train, val = trainer_user.loaders()
    with pytest.raises(
        UserError,
        match=r"Wider: .*head.weight.*3, 8.*4, 8",
    ):
        if stage == "fit":
            trainer(ours, tmp_path).fit(
                module, train, val, ckpt_path=checkpoint / "whole.ckpt"
            )
        elif stage == "validate":
            trainer(ours, tmp_path).validate(module, val, ckpt_path=checkpoint / "whole.ckpt")
        else:
            Wider.load_from_checkpoint(checkpoint / "whole.ckpt")


def test_the_number_of_optimizers_must_be_the_same(tmp_path, checkpoint):
    with pytest.raises(UserError, match=r"1 optimizer.* 2"):
        fit(ours, tmp_path, ckpt_path=checkpoint / "whole.ckpt", manual=True)


def test_weights_of_a_weights_only_file_can_be_validated(tmp_path, checkpoint):
    module = trainer_user.net(ours)
    reported = trainer(ours, tmp_path).validate(
        module, trainer_user.loaders()[1], ckpt_path=checkpoint / "weights.ckpt", verbose=False
    )
    kept = torch.load(checkpoint / "weights.ckpt")["state_dict"]
    assert reported[0]["val_loss"] > 0 and all(
        torch.equal(kept[name], w) for name, w in module.state_dict().items()
    )


def test_a_checkpoint_is_written_beside_and_renamed(tmp_path, monkeypatch):
    """What fails while it is written leaves the old file as it was, and no rubbish."""
    _, _, run = fit(ours, tmp_path, epochs=1)
    path = tmp_path / "folder" / "kept.ckpt"
    run.save_checkpoint(path)
    before = path.read_bytes()

    def broken(content, file):
        file.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(UserError, match=r"kept.ckpt .*No space left"):
        run.save_checkpoint(path)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [
        "kept.ckpt"
    ]
