"""Invalid arguments, modules and data raise an error that names mistake and remedy."""

import inspect
import sys

import pytest
import torch
from commands import ROOT, run
from torch.utils.data import DataLoader
from trainer_ranks import Net, Rows, Stream, changed, refusal, trainer

import multigpu.trainer as L
from multigpu.strategies import BaguaStrategy, PipelineStrategy
from multigpu.trainer.arguments import RENAMED, UNSUPPORTED

pytestmark = pytest.mark.filterwarnings("ignore")


def names(function, *facts):
    """The UserError that `function` raises names all these facts."""
    text = refusal(function)
    missing = [fact for fact in facts if fact not in text]
    assert not missing, f"{missing} not in: {text}"


BOTH = {"enable_checkpointing": False, "callbacks": [L.callbacks.ModelCheckpoint()]}
# case → (the Trainer's arguments, what the error names: argument, value, remedy)
ARGUMENTS = {
    "strategy ddpp": ({"strategy": "ddpp"}, ("'ddpp'", "'ddp' or 'ddp2'")),
    "strategy zzz": ({"strategy": "zzz"}, ("'zzz'", "'single_device'", "'dp'", "'ddp'")),
    "strategy fsdp": ({"strategy": "fsdp"}, ("strategy", "'fsdp'")),
    "devices 0": ({"devices": 0}, ("devices is 0", "-1", "list of GPUs")),
    "devices x": ({"devices": "x"}, ("devices is 'x'",)),
    "devices twice": ({"devices": [0, 0]}, ("devices is [0, 0]",)),
    "devices []": ({"devices": []}, ("devices is []",)),
    "devices -2": ({"devices": -2}, ("devices is -2",)),
    "devices 1.5": ({"devices": 1.5}, ("devices is 1.5",)),
    "devices True": ({"devices": True}, ("devices is True",)),
    "accelerator": ({"accelerator": "tpu"}, ("accelerator", "'tpu'", "'cpu', 'gpu', 'vgpu'")),
    "num_nodes": ({"num_nodes": 0}, ("num_nodes is 0", "from 1")),
    "dp on nodes": ({"strategy": "dp", "num_nodes": 2}, ("dp", "one process", "2")),
    "max_epochs": ({"max_epochs": -2}, ("max_epochs is -2", "from 0", "-1 for no limit")),
    "max_steps": ({"max_steps": 1.5}, ("max_steps is 1.5", "whole number")),
    "accumulate": ({"accumulate_grad_batches": 0}, ("accumulate_grad_batches is 0", "from 1")),
    "log_every_n_steps": ({"log_every_n_steps": -1}, ("log_every_n_steps is -1",)),
    "a fraction": ({"limit_train_batches": 1.5}, ("limit_train_batches is 1.5", "0.0 to 1.0")),
    "val_check_interval": ({"val_check_interval": -1}, ("val_check_interval is -1",)),
    "clip": ({"gradient_clip_val": "a"}, ("gradient_clip_val is 'a'", "from 0", "None")),
    "clip by": (
        {"gradient_clip_algorithm": "max"},
        ("gradient_clip_algorithm is 'max'", "'norm' or 'value'"),
    ),
    "over epochs": (
        {"check_val_every_n_epoch": None},
        ("check_val_every_n_epoch=None", "give val_check_interval"),
    ),
    "profiler": ({"profiler": "deep"}, ("profiler is 'deep'", "'simple'")),
    "misspelt": ({"max_epoch": 3}, ("'max_epoch'", "'max_epochs' or 'min_epochs'")),
    "unknown": ({"xyzzy": 3}, ("'xyzzy'", "help(Trainer)")),
    "two savers": (BOTH, ("enable_checkpointing=False", "ModelCheckpoint")),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_invalid_argument_is_named(case):
    arguments, facts = ARGUMENTS[case]
    names(lambda: L.Trainer(**arguments), *facts)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_argument_of_lightnings_names_the_alternative(name):
    names(lambda: L.Trainer(**{name: True}), repr(name), "Lightning", UNSUPPORTED[name])


def test_every_argument_of_lightnings_is_supported_or_has_an_alternative():
    import lightnings

    lightning = set(inspect.signature(lightnings.package().Trainer.__init__).parameters)
    this = set(inspect.signature(L.Trainer.__init__).parameters)
    assert lightning - this - set(UNSUPPORTED) - set(RENAMED) == set()


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


def test_a_script_prints_the_sentence_alone(tmp_path):
    for code in (
        "L.Trainer(strategy='ddpp')",
        "L.Trainer(logger=False).fit(L.LightningModule())",
    ):
        done = run(
            sys.executable,
            "-c",
            f"import multigpu.trainer as L; {code}",
            cwd=tmp_path,
            PYTHONPATH=ROOT,
        )
        lines = done.stdout.strip().splitlines()
        assert done.returncode != 0 and len(lines) == 1 and lines[0].startswith("error: ")


# ---- the module and the data --------------------------------------------------------------


def fit(tmp_path, net, loader=None, val=None, **arguments):
    return trainer(tmp_path, **arguments).fit(
        net, DataLoader(Rows(8), 2) if loader is None else loader, val
    )


# case → (training_step, what the error names)
LOGS = {
    "a vector": (
        lambda net, batch, i: net.log("a", torch.ones(2)),
        ("self.log('a')", "shape (2,)", "one number"),
    ),
    "a text": (
        lambda net, batch, i: net.log("a", "b"),
        ("self.log('a')", "str", "one number"),
    ),
    "reduce_fx": (
        lambda net, batch, i: net.log("a", 1, reduce_fx="median"),
        ("reduce_fx='median'", "mean, sum, max, min"),
    ),
    "nothing": (
        lambda net, batch, i: net.log("a", 1, on_step=False, on_epoch=False),
        ("self.log('a'", "on_step=False, on_epoch=False"),
    ),
}


@pytest.mark.parametrize("case", LOGS)
def test_what_cannot_be_logged(tmp_path, case):
    step, facts = LOGS[case]
    names(lambda: fit(tmp_path, Net(train=step)), *facts)


def test_a_step_cannot_be_logged_at_an_epochs_end(tmp_path):
    net = changed(on_train_epoch_end=lambda self: self.log("a", 1, on_step=True))
    names(
        lambda: fit(tmp_path, net), "on_step=True", "on_train_epoch_end", "leave on_step out"
    )


# case → (training_step, what the error names)
STEPS = {
    "several numbers": (
        lambda self, batch, i: self.layer(batch),
        ("shape (2, 1)", "one number", "mean"),
    ),
    "a number": (
        lambda self, batch, i: 1.5,
        ("training_step returned float", "a tensor", "'loss'"),
    ),
    "no graph": (lambda self, batch, i: torch.tensor(1.0), ("loss", "without a graph")),
    "no loss": (
        lambda self, batch, i: {"los": 1},
        ("without 'loss'", "step 0 (batch 0 of epoch 0)", "return the loss"),
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_what_a_step_may_not_return(tmp_path, case):
    step, facts = STEPS[case]
    names(lambda: fit(tmp_path, changed(training_step=step)), *facts)


def skips(self, batch, i):
    return None if i == 2 else self.layer(batch).mean()


def test_with_detect_anomaly_no_batch_is_skipped(tmp_path):
    net = changed(training_step=skips)
    names(
        lambda: fit(tmp_path, net, detect_anomaly=True),
        "returned nothing in step 2 (batch 2 of epoch 0)",
        "return the loss",
    )
    fit(tmp_path, changed(training_step=skips))


def broken(self, batch, i):
    loss = self.layer(batch).mean()
    return loss * (float("nan") if i == 2 else 1.0)


def root(self, batch, i):
    """0, where the square root's slope is infinite."""
    zero = self.layer(batch * 0).mean() - self.layer.bias.detach()
    return zero.abs().sqrt().sum()


def spoil_weight(self):
    self.layer.weight.data.fill_(float("nan"))


INFINITE = DataLoader([torch.ones(1), torch.full((1,), float("inf"))])
# case → (the module's methods, fit's arguments, what the error names)
ANOMALIES = {
    "the loss": ({"training_step": broken}, {}, ("step 2 (epoch 0)", "the loss")),
    "a gradient": ({"training_step": root}, {}, ("step 0 (epoch 0)", "gradient of 'layer.")),
    "the batch": ({}, {"loader": INFINITE}, ("step 1 (epoch 0)", "the batch's tensor 0")),
    "a weight": ({"on_train_start": spoil_weight}, {}, ("the weight 'layer.weight'",)),
}


@pytest.mark.parametrize("case", ANOMALIES)
def test_detect_anomaly_names_the_step_and_the_tensor(tmp_path, case):
    methods, keywords, facts = ANOMALIES[case]
    names(lambda: fit(tmp_path, changed(**methods), **keywords, detect_anomaly=True), *facts)
    fit(tmp_path, changed(**methods), **keywords)  # without it nothing is checked


class Bare(L.LightningModule):
    def training_step(self, batch, batch_idx): ...


# case → (a call, what the error names)
MISSING = {
    "no training_step": (
        lambda run: run.fit(L.LightningModule()),
        ("LightningModule has no training_step", "trainer.fit"),
    ),
    "no optimizers": (
        lambda run: run.fit(Bare()),
        ("Bare has no configure_optimizers", "trainer.fit"),
    ),
    "no validation_step": (
        lambda run: run.validate(Bare()),
        ("Bare has no validation_step", "trainer.validate"),
    ),
    "no test_step": (lambda run: run.test(Bare()), ("Bare has no test_step", "trainer.test")),
    "no module": (
        lambda run: run.fit(torch.nn.Linear(1, 1)),
        ("Linear is not a LightningModule", "subclass"),
    ),
    "no model": (lambda run: run.predict(), ("trainer.predict", "no model")),
    "no data": (
        lambda run: run.fit(Net()),
        ("trainer.fit", "train_dataloaders", "datamodule", "train_dataloader."),
    ),
    "no data to validate": (
        lambda run: run.validate(Net()),
        ("trainer.validate", "no data", "val_dataloader"),
    ),
    "two loaders": (lambda run: run.fit(Net(), [[1], [2]]), ("one training dataloader",)),
    "best": (
        lambda run: run.validate(Net(), [1], ckpt_path="best"),
        ("ckpt_path", "'best'", "ModelCheckpoint", "file"),
    ),
    "last": (
        lambda run: run.fit(Net(), [1], ckpt_path="last"),
        ("ckpt_path", "'last'", "ModelCheckpoint", "file"),
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_named(tmp_path, case):
    call, facts = MISSING[case]
    names(lambda: call(trainer(tmp_path)), *facts)


STREAM = {"loader": DataLoader(Stream(4))}
MANUAL = {"net": {"automatic_optimization": False}}
# case → (fit's arguments, what the error names)
FITS = {
    "val_check_interval": (
        {"val_check_interval": 9, "val": DataLoader(Rows(2))},
        ("val_check_interval=9", "4 batches", "check_val_every_n_epoch=None"),
    ),
    "validate in a stream": (
        {"val_check_interval": 0.5, "val": DataLoader(Rows(2)), **STREAM},
        ("val_check_interval=0.5", "without a length", "whole number"),
    ),
    "a fraction of a stream": (
        {"limit_train_batches": 0.5, **STREAM},
        ("limit_train_batches=0.5", "without a length"),
    ),
    "precision": ({"precision": "17"}, ("precision is '17'", "32, 64, 16, bf16, 32-true")),
    "clip by hand": (
        {"gradient_clip_val": 1.0, **MANUAL},
        ("gradient_clip_val", "self.clip_gradients"),
    ),
    "accumulate by hand": (
        {"accumulate_grad_batches": 2, **MANUAL},
        ("accumulate_grad_batches", "optimizer.step()"),
    ),
    "dp on one CPU": ({"strategy": "dp", "devices": 2}, ("one CPU", "2 devices")),
    "pipeline": ({"strategy": "pipeline"}, ("Changed", "pipeline_stages()")),
}


@pytest.mark.parametrize("case", FITS)
def test_what_only_shows_in_fit(tmp_path, case):
    keywords, facts = FITS[case]
    net = changed()
    keywords = dict(keywords)
    for name, value in keywords.pop("net", {}).items():
        setattr(net, name, value)
    names(lambda: fit(tmp_path, net, **keywords), *facts)


def test_a_scheduler_that_monitors_what_nobody_logs(tmp_path):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            "monitor": "val",
        }

    net = changed(configure_optimizers=configure_optimizers)
    names(lambda: fit(tmp_path, net), "scheduler", "'val'", "not logged", "none")


def test_one_step_takes_too_few_arguments_for_several_loaders(tmp_path):
    net = changed(validation_step=lambda self, batch, batch_idx: None)
    loaders = [DataLoader(Rows(2)), DataLoader(Rows(2))]
    names(
        lambda: trainer(tmp_path).validate(net, loaders),
        "2 dataloaders",
        "validation_step",
        "dataloader_idx",
    )


# case → (a call, what the error names)
STRATEGIES = {
    "algorithm": (lambda: BaguaStrategy(algorithm="bytgrad"), ("'bytgrad'", "'bytegrad'")),
    "its argument": (lambda: BaguaStrategy(algorithm="async", speed=3), ("async", "argument")),
    "micro_batches": (lambda: PipelineStrategy(micro_batches=0), ("micro_batches is 0",)),
    "horovod": (
        lambda: fit(".", Net(), strategy="horovod", devices=3),
        ("multigpu horovodrun -np 3",),
    ),
}


@pytest.mark.parametrize("case", STRATEGIES)
def test_an_invalid_strategy_is_named(case):
    make, facts = STRATEGIES[case]
    names(make, *facts)


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for devices, highest in ((3, 2), ([0, 5], 5)):
        names(
            lambda devices=devices: L.Trainer(accelerator="gpu", devices=devices),
            f"GPU {highest}",
            "2 GPUs",
        )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    names(lambda: L.Trainer(accelerator="gpu"), "accelerator='gpu'", "none")
