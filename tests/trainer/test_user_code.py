"""Code as people write it for Lightning: it runs, or an error says what to write."""

import collections
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu.errors import UserError
from multigpu.nested import map_tensors, tensors

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layer(batch), batch[:, :2])

    def validation_step(self, batch, batch_idx):
        self.log("v", F.mse_loss(self.layer(batch), batch[:, :2]))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def rows(n=8):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(0))


def trainer(folder=".", **more):
    return L.Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "default_root_dir": folder, **QUIET, **more}
    )


def test_a_class_may_say_that_its_optimization_is_manual():
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    class ByProperty(Manual):
        @property
        def automatic_optimization(self):
            return False

    for kind in (Manual, ByProperty):
        torch.manual_seed(0)
        model, run = kind(), trainer()
        before = model.layer.weight.detach().clone()
        run.fit(model, DataLoader(rows(), 4))
        assert run.global_step == 2 and not torch.equal(before, model.layer.weight)


def test_two_callbacks_of_one_key_are_refused():
    class Counts(L.Callback):
        def state_dict(self):
            return {"n": 1}

    with pytest.raises(UserError, match=r"two callbacks.*Counts'.* override state_key"):
        trainer(callbacks=[Counts(), Counts()])


class Kept(Net):
    def __init__(self, folder):
        super().__init__()
        self.save_hyperparameters()


def test_a_checkpoint_with_any_object_is_read_if_it_is_trusted(tmp_path):
    path, run = tmp_path / "any.ckpt", trainer(tmp_path)
    run.fit(Kept(collections.UserDict(a=1)), DataLoader(rows(), 4))
    run.save_checkpoint(path)
    with pytest.raises(UserError, match=r"UserDict.* weights_only=False.* trust"):
        Kept.load_from_checkpoint(path)
    assert Kept.load_from_checkpoint(path, weights_only=False).hparams.folder["a"] == 1
    again = trainer(tmp_path, max_epochs=2)
    again.fit(Kept({}), DataLoader(rows(), 4), ckpt_path=path, weights_only=False)
    assert again.global_step == 4
    for name in ("validate", "test"):
        assert getattr(trainer(), name)(
            Kept({}), DataLoader(rows(), 4), ckpt_path=path, weights_only=False, verbose=False
        )


def test_an_optimizer_whose_step_needs_the_closure_gets_it():
    class Twice(torch.optim.SGD):
        """As SAM: the loss is computed, a step made, and the loss computed again."""

        def step(self, closure):
            closure()
            super().step()
            closure()
            super().step()

    models = Net(), Net()
    models[1].load_state_dict(models[0].state_dict())
    models[0].configure_optimizers = lambda: Twice(models[0].parameters(), 0.1)
    run = trainer()
    run.fit(models[0], DataLoader(rows(), 4))
    optimizer = torch.optim.SGD(models[1].parameters(), 0.1)
    for batch in (batch for batch in rows().split(4) for _ in range(2)):
        optimizer.zero_grad()
        models[1].training_step(batch, 0).backward()
        optimizer.step()
    assert run.global_step == 2 and torch.equal(models[0].layer.weight, models[1].layer.weight)


def test_a_trial_has_a_logger_that_keeps_nothing(tmp_path):
    class Draws(Net):
        def on_train_start(self):
            self.logger.experiment.add_scalar("x", 1)

    run = trainer(
        tmp_path, fast_dev_run=True, logger=True, callbacks=[L.callbacks.LearningRateMonitor()]
    )
    run.fit(Draws(), DataLoader(rows(), 4))
    assert not any(tmp_path.iterdir()) and run.log_dir == str(tmp_path)


def test_a_checkpoint_fits_by_what_load_state_dict_says(tmp_path):
    class Extra(Net):
        def get_extra_state(self):
            return {"n": 3}

        def set_extra_state(self, state):
            self.found = state["n"]

    class Wider(Extra):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(5, 2)

    class Renamed(Net):
        def __init__(self):
            super().__init__()
            self.linear = self.layer
            del self.layer
            self.register_load_state_dict_pre_hook(self.rename)

        @staticmethod
        def rename(module, state, prefix, *_):
            for name in ("weight", "bias"):
                if (old := f"{prefix}layer.{name}") in state:
                    state[f"{prefix}linear.{name}"] = state.pop(old)

    run, path = trainer(tmp_path), tmp_path / "extra.ckpt"
    run.fit(Extra(), DataLoader(rows(), 4))
    run.save_checkpoint(path)
    assert Extra.load_from_checkpoint(path).found == 3
    with pytest.raises(
        UserError,
        match=r"Wider: layer\.weight .*\(2, 4\).*\(2, 5\)",
    ):
        Wider.load_from_checkpoint(path)
    run.fit(plain := Net(), DataLoader(rows(), 4))
    run.save_checkpoint(path)
    assert torch.equal(Renamed.load_from_checkpoint(path).linear.weight, plain.layer.weight)


def test_a_mistake_in_the_users_init_is_the_users():
    class Faulty(Net):
        def __init__(self):
            super().__init__()
            len(3)

    from multigpu.trainer.checkpointing.from_checkpoint import module_from_checkpoint

    with pytest.raises(TypeError, match="has no len"):
        module_from_checkpoint(Faulty, {"state_dict": {}}, Path("x"), None, {})


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Both:
    x: torch.Tensor
    name: str


def test_what_a_batch_may_be():
    half = {
        "a": Pair(torch.ones(2), [torch.zeros(1), "b"]),
        "c": collections.UserDict(d=torch.ones(1)),
        "e": Both(torch.ones(3), "n"),
    }
    reported = map_tensors(half, lambda tensor: tensor.half())
    assert [tensor.dtype for tensor in tensors(reported)] == [torch.float16] * 4
    assert (
        type(reported["a"]) is Pair
        and type(reported["c"]) is collections.UserDict
        and reported["e"].name == "n"
    )
    assert half["c"]["d"].dtype == torch.float32, "the batch itself is left alone"


def test_named_tuples_in_other_numbers():
    class Named(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch.x, batch_idx)

    data = [Pair(row, 1) for row in rows()]
    for precision in ("64-true", "bf16-true"):
        trainer(precision=precision).fit(Named(), DataLoader(data, 4))


def test_names_that_everyday_code_reads():
    class Stops(Net):
        def training_step(self, batch, batch_idx):
            self.lasts = [*getattr(self, "lasts", []), self.trainer.is_last_batch]
            self.log_dict({"a": 1.0}, True)
            return super().training_step(batch, batch_idx)

    loader, model = DataLoader(rows(), 4), Stops()
    stopping, bar = L.callbacks.EarlyStopping("v"), L.callbacks.TQDMProgressBar()
    run = trainer(callbacks=[stopping, bar], enable_progress_bar=None)
    run.fit(model, loader, loader)
    assert model.lasts == [False, True] and run.progress_bar_metrics["a"] == 1.0
    assert run.early_stopping_callback is stopping and run.progress_bar_callback is bar
    assert (
        run.val_dataloaders is loader
        and run.node_rank == 0
        and run.strategy.root_device.type == "cpu"
    )
    run.fit_loop.max_epochs = 3
    run.fit(model, loader, loader)
    assert run.current_epoch == 3


def test_hooks_of_the_batchs_way_may_stand_in_two_places():
    class Both_(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch * 0

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(rows(), 4)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            seen.append(float(batch.abs().sum()))
            return batch

    seen: list = []
    model = Both_()
    model.on_train_batch_end = lambda outputs, batch, batch_idx: seen.append(
        float(batch.abs().sum())
    )
    trainer().fit(model, datamodule=Data())
    assert seen[0] > 0 and seen[1] == 0
