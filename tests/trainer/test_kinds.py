"""Batches, logs, optimizers and callbacks of many kinds: each test is for a past bug."""

from collections.abc import MutableMapping
from dataclasses import InitVar, dataclass, field

import pytest
import torch
from small_net import Net, cpu, make_net, rows
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu import vgpu
from multigpu.errors import UserError
from multigpu.nested import map_tensors
from multigpu.trainer.hooks import to_device


def loaders(n: int = 8):
    return DataLoader(rows(n), 2), DataLoader(rows(4), 2)


def fitted(model: Net, **keywords) -> L.Trainer:
    trainer = cpu(**keywords)
    trainer.fit(model, *loaders())
    return trainer


# ---- containers -----------------------------------------------------------------------------


@dataclass
class Scaled:
    """Its __init__ does more than to keep what it is given."""

    x: torch.Tensor
    by: InitVar[float] = 2.0
    scale: float = field(init=False, default=1.0)

    def __post_init__(self, by):
        self.x, self.scale = self.x * by, by


class Mine(MutableMapping):
    """Made of something else than a mapping, and copy.copy shares what is in it."""

    def __init__(self, **parts):
        self.parts = parts

    def __getitem__(self, key):
        return self.parts[key]

    def __setitem__(self, key, value):
        self.parts[key] = value

    def __delitem__(self, key):
        del self.parts[key]

    def __iter__(self):
        return iter(self.parts)

    def __len__(self):
        return len(self.parts)


def test_a_dataclass_is_copied_and_not_made_anew():
    given = Scaled(torch.ones(2))
    new = map_tensors(given, lambda tensor: tensor + 1)
    assert (new.x.tolist(), new.scale, given.x.tolist()) == ([3.0, 3.0], 2.0, [2.0, 2.0])


def test_a_mapping_stays_what_it_was():
    given = Mine(x=torch.ones(2))
    assert map_tensors(given, lambda tensor: tensor + 1)["x"].tolist() == [2.0, 2.0]
    assert given["x"].tolist() == [1.0, 1.0]


def test_a_packed_sequence_goes_to_a_device_as_a_whole(request):
    request.addfinalizer(vgpu.stop)
    (device,) = vgpu.start(1)
    moved = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), device)
    assert (moved.data.device, moved.batch_sizes.device.type) == (device, "cpu")


# ---- logs -----------------------------------------------------------------------------------


def test_what_is_logged_is_the_number_of_that_moment():
    class Counting(Net):
        def on_train_start(self):
            self.count = torch.zeros(())

        def training_step(self, batch, batch_idx):
            self.count += 1
            self.log("count", self.count, reduce_fx="sum", on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    assert fitted(Counting()).callback_metrics["count"] == 1 + 2 + 3 + 4


def test_a_hook_sees_what_it_has_just_logged():
    seen = []

    class Looks(Net):
        def training_step(self, batch, batch_idx):
            self.log("index", float(batch_idx))
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer):
            seen.append(float(self.trainer.callback_metrics["index"]))

        def on_validation_epoch_end(self):
            self.log("f1", 0.5)
            seen.append(self.trainer.callback_metrics["f1"])

    fitted(Looks())
    assert seen == [0.5, 0, 1, 2, 3, 0.5]  # the first is the sanity check's


def test_a_checkpoint_watches_what_is_logged_at_the_epochs_end(tmp_path):
    class Ends(Net):
        def on_train_epoch_end(self):
            self.log("score", float(self.current_epoch))

    saver = L.callbacks.ModelCheckpoint(tmp_path, monitor="score", mode="max", save_top_k=-1)
    stop = L.callbacks.EarlyStopping(
        "score", mode="min", patience=2, check_on_train_epoch_end=True
    )
    trainer = fitted(Ends(), callbacks=[saver, stop], enable_checkpointing=True, max_epochs=9)
    assert (
        sorted(map(float, saver.best_k_models.values())) == [0, 1, 2]
        and trainer.current_epoch == 3
    )


def test_a_name_that_is_logged_in_two_ways_is_refused():
    class Twice(Net):
        def training_step(self, batch, batch_idx):
            self.log("v", 1.0, on_epoch=True)
            self.log("v", 2.0, on_epoch=False)

    with pytest.raises(UserError, match=r"self.log\('v'\).* other arguments .*training_step"):
        fitted(Twice())


def test_validation_by_step_is_among_the_logged_metrics():
    class Steps(Net):
        def validation_step(self, batch, batch_idx):
            self.log("v", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)

    trainer = cpu()
    trainer.validate(Steps(), loaders()[1], verbose=False)
    assert (
        trainer.logged_metrics == {"v_step": 1.0, "v_epoch": 0.5}
        and trainer.progress_bar_metrics["v_step"] == 1.0
    )


# ---- optimizers and loops -------------------------------------------------------------------


class Counted(torch.optim.SGD):
    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


def test_an_optimizer_may_keep_plain_values():
    model = make_net()
    model.configure_optimizers = lambda: Counted(model.parameters(), 0.1)
    assert fitted(model).optimizers[0].state["steps"] == 4


def test_a_plateau_takes_whole_epochs_only():
    model, seen = make_net(), []
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau

    def configure_optimizers():
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = plateau(optimizer)
        scheduler.step = lambda metric: seen.append(model.current_epoch)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "v"}

    model.configure_optimizers = configure_optimizers
    fitted(model, max_epochs=3, max_steps=10)
    assert seen == [0, 1]


def test_a_callback_that_comes_late_is_called():
    class Late(L.Callback):
        batches = 0

        def on_train_batch_end(self, *_):
            self.batches += 1

    class First(L.Callback):
        def on_train_start(self, trainer, module):
            trainer.callbacks.append(late)

    late = Late()
    fitted(make_net(), callbacks=[First()])
    assert late.batches == 4


def test_how_many_steps_there_will_be_is_known_from_configure_optimizers_on():
    class Asks(Net):
        def configure_optimizers(self):
            self.steps = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    model = Asks()
    trainer = fitted(model, max_epochs=3)
    assert model.steps == 12
    model.setup = lambda stage: trainer.estimated_stepping_batches
    with pytest.raises(UserError, match=r"estimated_stepping_batches .*configure_optimizers"):
        trainer.fit(model, *loaders())


def test_log_every_n_steps_0_is_never():
    kept = []
    logger = type(
        "Kept",
        (L.loggers.Logger,),
        {"log_metrics": lambda self, metrics, step: kept.append(step)},
    )()
    model = make_net()
    model.training_step = lambda batch, batch_idx: (
        model.log("x", 1.0),
        Net.training_step(model, batch, batch_idx),
    )[1]
    fitted(model, logger=logger, log_every_n_steps=0, max_epochs=1)
    assert set(kept) == {3}, "the epoch's values alone"


def test_fast_dev_run_leaves_the_users_checkpoint_callback(tmp_path):
    saver = L.callbacks.ModelCheckpoint(tmp_path / "none")
    trainer = fitted(
        make_net(), callbacks=[saver], enable_checkpointing=True, fast_dev_run=True
    )
    assert (
        trainer.checkpoint_callback is saver
        and saver.best_model_path == ""
        and not (tmp_path / "none").exists()
    )


def test_best_is_that_of_the_module_s_own_callbacks(tmp_path):
    model = make_net()
    model.configure_callbacks = lambda: L.callbacks.ModelCheckpoint(tmp_path, monitor="v")
    trainer = fitted(model, enable_checkpointing=True)
    assert trainer.test(model, loaders()[1], ckpt_path="best", verbose=False)


def test_a_data_module_of_data_sets_and_from_a_checkpoint(tmp_path):
    data = L.LightningDataModule.from_datasets(
        rows(8), val_dataset=[rows(4), rows(2)], batch_size=2
    )
    assert (
        len(data.train_dataloader()),
        [len(loader) for loader in data.val_dataloader()],
    ) == (4, [2, 1])
    model = make_net()
    model.validation_step = lambda batch, batch_idx, dataloader_idx: None
    assert cpu(max_epochs=1).fit(model, data) is None and model.trainer.global_step == 4

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
    again = Sized.load_from_checkpoint(tmp_path / "a.ckpt")
    assert (again.hparams.size, again.state) == (6, 7)
