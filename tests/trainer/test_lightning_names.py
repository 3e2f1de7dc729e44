"""Names that code for Lightning uses: each works, or an error names the alternative."""

import importlib
import inspect
import sys
from dataclasses import fields

import pytest
from plain_net import Net, rows, trainer
from refusals import names, refusal
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu.errors import UserError
from multigpu.trainer.arguments import RENAMED
from multigpu.trainer.refused import REFUSED, sentence
from multigpu.trainer.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_argument_of_lightnings_is_supported_or_has_an_alternative():
    import lightnings

    lightning = set(inspect.signature(lightnings.package().Trainer.__init__).parameters)
    this = set(inspect.signature(L.Trainer.__init__).parameters)
    this |= {field.name for field in fields(Settings)}
    assert lightning - this - set(REFUSED) - set(RENAMED) == set()


@pytest.mark.parametrize("module", ["", ".callbacks", ".loggers"])
def test_every_class_of_lightnings_is_here_or_has_an_alternative(module):
    import lightnings

    theirs = importlib.import_module(lightnings.package().pytorch.__name__ + module)
    ours = importlib.import_module("multigpu.trainer" + module)
    assert [name for name in theirs.__all__ if not hasattr(ours, name)] == []


@pytest.mark.parametrize("name", ["max_time", "sync_batchnorm", "weights_summary"])
def test_a_refused_argument_names_the_replacement(name):
    names(lambda: L.Trainer(**{name: True}), name, sentence(name))
    L.Trainer(accelerator="cpu", **{name: None})  # which asks for nothing


def test_old_names_are_translated_with_a_hint(capsys, monkeypatch):
    # One of pytest's plugins imports it, so that the Trainer would see a notebook.
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    made = L.Trainer(gpus=2, distributed_backend="dp")
    assert made.strategy.name == "dp" and made.num_devices == 2
    hint = capsys.readouterr().out
    assert "Trainer(gpus=2, distributed_backend='dp')" in hint
    assert "devices=2, strategy='dp')" in hint
    assert L.Trainer(num_processes=2, accelerator="cpu").strategy.name == "ddp"
    hint = capsys.readouterr().out
    assert "Trainer(num_processes=2)" in hint and "Trainer(devices=2)" in hint
    assert not L.Trainer(replace_sampler_ddp=False).use_distributed_sampler
    assert L.Trainer(gpus=0).num_devices == 1
    # On a machine with a GPU, "auto" would take it.
    assert "write Trainer(accelerator='cpu')" in capsys.readouterr().out
    assert L.Trainer(gpus=None, accelerator="cpu").num_devices == 1
    names(lambda: L.Trainer(gpus=0, accelerator="gpu"), "gpus=0 contradicts accelerator")


def test_names_that_everyday_code_reads():
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.lasts = [*getattr(self, "lasts", []), self.trainer.is_last_batch]
            self.log_dict({"a": 1.0}, True)
            return super().training_step(batch, batch_idx)

    loader, model = DataLoader(rows(), 4), Logs()
    stopping, bar = L.callbacks.EarlyStopping("v"), L.callbacks.TQDMProgressBar()
    run = trainer(callbacks=[stopping, bar], enable_progress_bar=None)
    run.fit(model, loader, loader)
    assert model.lasts == [False, True] and run.progress_bar_metrics["a"] == 1.0
    assert run.early_stopping_callback is stopping and run.progress_bar_callback is bar
    assert run.val_dataloaders is loader and run.strategy.root_device.type == "cpu"
    run.fit_loop.max_epochs = 3
    run.fit(model, loader, loader)
    assert run.current_epoch == 3


def test_the_names_of_lightning_s_modules():
    from multigpu.trainer.strategies import DDPStrategy
    from multigpu.trainer.utilities import rank_zero_only

    assert DDPStrategy is L.strategies.DDPStrategy and rank_zero_only(lambda x: x + 1)(1) == 2


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (L.callbacks, "BatchSizeFinder", "multigpu.memory_held"),
        (L.loggers, "WandbLogger", "CSVLogger or TensorBoardLogger"),
        (L.utilities, "rank_zero_info", "@rank_zero_only"),
        (L.utilities, "grad_norm", "get_total_norm"),
        (L, "Fabric", "connect, setup and close"),
        (L.strategies, "FSDPStrategy", "pipeline"),
    ],
)
def test_what_is_not_here_says_what_is(module, name, expected):
    imported = getattr(module, name)  # a program can import what it does not use
    assert not isinstance(module, imported)
    with pytest.raises(UserError, match=f"{name}.*{expected}"):
        imported("x", a=1)
    with pytest.raises(UserError, match=f"{name}.*{expected}"):
        type("Mine", (imported,), {"__init__": lambda self: None})()
    with pytest.raises(AttributeError, match="'Nonsense'"):
        _ = module.Nonsense


@pytest.mark.parametrize(
    "name",
    ["fsdp", "fsdp_cpu_offload", "deepspeed_stage_2", "model_parallel", "ddp_fork", "xla"],
)
def test_a_strategy_of_lightnings_names_the_alternative(name):
    text = refusal(lambda: L.Trainer(strategy=name))
    assert repr(name) in text and "'dp'" not in text
    assert any(repr(known) in text for known in ("pipeline", "ddp", "ddp_spawn"))


def test_names_that_programs_read_of_the_package(monkeypatch):
    import lightnings

    assert L.__version__ == lightnings.package().__version__
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert L.utilities.rank_zero_only(lambda: "ran")() is None


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_data_module_beside_dataloaders_is_refused(stage):
    loader, data = DataLoader(rows(), 4), L.LightningDataModule()
    run = getattr(trainer(), stage)
    names(lambda: run(Net(), loader, datamodule=data), "data module", "dataloaders", "only")
