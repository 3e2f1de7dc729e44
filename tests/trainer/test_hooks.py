"""Every hook of the module and of a callback is called when Lightning calls it."""

import lightnings
import plain_net
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer_user import data, trainer
from user_methods import both, user

import multigpu.trainer as ours
from multigpu.trainer.hooks import DataHooks, ModuleHooks

pytestmark = pytest.mark.filterwarnings("ignore")
# The module's hooks and steps; each new hook is covered, too.
MODULE = [
    *(
        name
        for hooks in (DataHooks, ModuleHooks)
        for name, method in vars(hooks).items()
        if callable(method) and not name.startswith("_")
    ),
    *("training_step", "validation_step", "test_step", "predict_step", "backward"),
    *("configure_optimizers", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    "configure_gradient_clipping",
]
CALLBACK = sorted(
    name
    for name in vars(ours.Callback)
    if name.startswith("on_") or name in ("setup", "teardown", "state_dict")
)


def recorded(base, names, calls, who):
    """A class whose methods write their name down, and then do what the base's do."""

    def method(name):
        def call(self, *args, **keywords):
            calls.append(f"{who}.{name}")
            return getattr(super(made, self), name)(*args, **keywords)

        return call

    made = type(who, (base,), {name: method(name) for name in names if hasattr(base, name)})
    return made


RUNS = {
    "fit, accumulated": ("fit", {"accumulate_grad_batches": 2}),
    "fit, validated in between": (
        "fit",
        {"val_check_interval": 1, "max_epochs": 1, "gradient_clip_val": 0.1},
    ),
    "fit, with checkpoints": ("fit", {"enable_checkpointing": True, "max_epochs": 1}),
    "fit, max_steps": (
        "fit",
        {"max_steps": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0},
    ),
    "fit without validation": ("fit", {"limit_val_batches": 0, "max_epochs": 1}),
    "fit, an epoch without validation": ("fit", {"check_val_every_n_epoch": 2}),
    "validate": ("validate", {}),
    "validate nothing": ("validate", {"limit_val_batches": 0}),
    "predict nothing": ("predict", {"limit_predict_batches": 0}),
    "test": ("test", {}),
    "predict": ("predict", {}),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_order_of_all_hooks_is_lightnings(tmp_path, run):
    stage, arguments = RUNS[run]
    orders = []
    for L in (ours, lightnings.package()):
        calls = []
        module = recorded(user(L), MODULE, calls, "module")()
        callback = recorded(L.Callback, CALLBACK, calls, "callback")()
        getattr(trainer(L, tmp_path, callbacks=[callback], **arguments), stage)(module)
        orders.append(calls)
    assert len(orders[1]) > 5
    assert orders[0] == orders[1]


def test_a_step_that_returns_nothing_skips_the_batch_on_one_device(tmp_path):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else F.cross_entropy(self(batch[0]), batch[1])

    def note(self, outputs, batch, batch_idx):
        self.recorded.append(bool(outputs))

    reported, steps, _ = both(tmp_path, training_step=training_step, on_train_batch_end=note)
    assert reported == [True, False, True] * 2 and steps == 6


def test_a_dict_reaches_the_end_of_the_batch(tmp_path):
    def training_step(self, batch, batch_idx):
        return {"loss": F.cross_entropy(self(batch[0]), batch[1]), "rows": len(batch[0])}

    def note(self, outputs, batch, batch_idx):
        self.recorded.append((outputs["rows"], outputs["loss"].requires_grad))

    assert (
        both(tmp_path, training_step=training_step, on_train_batch_end=note)[0]
        == [(4, False), (4, False), (2, False)] * 2
    )


def test_predict_step_is_the_forward_by_default(tmp_path):
    module = user(
        ours,
        predict_step=ours.LightningModule.predict_step,
        forward=lambda self, batch: self.layer(batch[0]),
    )()
    found = trainer(ours, tmp_path).predict(module)
    assert [len(rows) for rows in found] == [4, 4, 2] and torch.equal(
        found[0], module([data(10, 1).tensors[0][:4]])
    )


def test_hooks_of_the_batchs_way_may_stand_in_two_places():
    class Both_(plain_net.Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch * 0

    class Data(ours.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(plain_net.rows(), 4)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            seen.append(float(batch.abs().sum()))
            return batch

    seen: list = []
    model = Both_()
    model.on_train_batch_end = lambda outputs, batch, batch_idx: seen.append(
        float(batch.abs().sum())
    )
    plain_net.trainer().fit(model, datamodule=Data())
    assert seen[0] > 0 and seen[1] == 0


def test_a_resumed_epoch_calls_on_train_epoch_start(tmp_path):
    """Lightning does not, but what the hook prepares is not in the checkpoint."""

    class Prepares(plain_net.Net):
        def on_train_epoch_start(self):
            self.indices = []

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.indices.append(batch_idx)
            if batch_idx == 2:
                self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    loader = DataLoader(plain_net.rows(8), 2)
    plain_net.trainer(tmp_path).fit(Prepares(), loader)
    resumed = Prepares()
    plain_net.trainer(tmp_path).fit(resumed, loader, ckpt_path=tmp_path / "a.ckpt")
    assert resumed.indices == [3]
