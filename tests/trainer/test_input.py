"""What does the Trainer say of what cannot be meant? One sentence, with what to write instead."""

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


ARGUMENTS = {
    "strategy ddpp": ({"strategy": "ddpp"}, "there is no strategy 'ddpp': did you mean 'ddp' or 'ddp2'? There are"),
    "strategy zzz": ({"strategy": "zzz"}, "there is no strategy 'zzz': There are 'single_device', 'dp', 'ddp'"),
    "strategy None": ({"strategy": "fsdp"}, "there is no strategy 'fsdp'"),
    "devices 0": ({"devices": 0}, "devices is 0: expected a number from 1 up, -1 for all, a list of GPUs"),
    "devices x": ({"devices": "x"}, "devices is 'x': expected a number"),
    "devices twice": ({"devices": [0, 0]}, "devices is [0, 0]: expected a number"),
    "devices []": ({"devices": []}, "devices is []: expected"),
    "devices -2": ({"devices": -2}, "devices is -2: expected"),
    "devices 1.5": ({"devices": 1.5}, "devices is 1.5: expected"),
    "devices True": ({"devices": True}, "devices is True: expected"),
    "accelerator": ({"accelerator": "tpu"}, "accelerator is 'tpu': expected 'cpu', 'gpu', 'vgpu'"),
    "num_nodes": ({"num_nodes": 0}, "num_nodes is 0: expected a whole number from 1 up."),
    "dp on nodes": ({"strategy": "dp", "num_nodes": 2}, "dp is one process on one machine, and num_nodes is 2"),
    "max_epochs": ({"max_epochs": -2}, "max_epochs is -2: expected a whole number from 0 up, or -1 for no limit."),
    "max_steps": ({"max_steps": 1.5}, "max_steps is 1.5: expected a whole number"),
    "accumulate": ({"accumulate_grad_batches": 0}, "accumulate_grad_batches is 0: expected a whole number from 1 up."),
    "log_every_n_steps": ({"log_every_n_steps": -1}, "log_every_n_steps is -1: expected"),
    "a share": ({"limit_train_batches": 1.5}, "limit_train_batches is 1.5: expected a number of batches, or a share of them"),
    "val_check_interval": ({"val_check_interval": -1}, "val_check_interval is -1: expected"),
    "clip": ({"gradient_clip_val": "a"}, "gradient_clip_val is 'a': expected a number from 0 up, or None."),
    "clip by": ({"gradient_clip_algorithm": "max"}, "gradient_clip_algorithm is 'max': expected 'norm' or 'value'."),
    "over epochs": ({"check_val_every_n_epoch": None}, "check_val_every_n_epoch=None counts over epochs: give val_check"),
    "profiler": ({"profiler": "deep"}, "profiler is 'deep': expected 'simple'"),
    "misspelt": ({"max_epoch": 3}, "the Trainer has no argument 'max_epoch': did you mean 'max_epochs' or 'min_epochs'?"),
    "unknown": ({"xyzzy": 3}, "the Trainer has no argument 'xyzzy': see help(Trainer)."),
    "two savers": (
        {"enable_checkpointing": False, "callbacks": [L.callbacks.ModelCheckpoint()]},
        "enable_checkpointing=False, and callbacks holds a ModelCheckpoint: leave one of them out.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_that_cannot_be_meant(case):
    arguments, expected = ARGUMENTS[case]
    assert expected in refusal(lambda: L.Trainer(**arguments))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_argument_of_lightnings_that_is_not_here_says_what_does_the_same(name):
    told = refusal(lambda: L.Trainer(**{name: True}))
    assert (
        told == f"this Trainer has no argument {name!r}, unlike Lightning's: {UNSUPPORTED[name]}."
    )


def test_every_argument_of_lightnings_is_here_or_is_spoken_of():
    import lightnings

    theirs = set(inspect.signature(lightnings.package().Trainer.__init__).parameters) - {
        "self"
    }
    ours = set(inspect.signature(L.Trainer.__init__).parameters)
    assert theirs - ours - set(UNSUPPORTED) - set(RENAMED) == set()


def test_old_names_are_understood_with_a_hint(capsys, monkeypatch):
    monkeypatch.delitem(
        sys.modules, "ipykernel", raising=False
    )  # a plugin of pytest's; the Trainer would see a notebook
    made = L.Trainer(gpus=2, distributed_backend="dp")
    assert made.strategy.name == "dp" and made.num_devices == 2
    told = capsys.readouterr().out
    assert (
        "hint: Trainer(gpus=2, distributed_backend='dp') is written Trainer(" in told
        and "devices=2, strategy='dp') today" in told
    )
    assert L.Trainer(num_processes=2, accelerator="cpu").strategy.name == "ddp"
    assert (
        "hint: Trainer(num_processes=2) is written Trainer(devices=2) today"
        in capsys.readouterr().out
    )
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


# ---- the module and the data -----------------------------------------------------------------------------------------


def fit(tmp_path, net, loader=None, val=None, **arguments):
    return trainer(tmp_path, **arguments).fit(
        net, DataLoader(Rows(8), 2) if loader is None else loader, val
    )


LOGS = {
    "a vector": (lambda net, batch, i: net.log("a", torch.ones(2)), "self.log('a') was given a tensor of shape (2,): expected one number."),
    "a text": (lambda net, batch, i: net.log("a", "b"), "self.log('a') was given str: expected one number"),
    "reduce_fx": (lambda net, batch, i: net.log("a", 1, reduce_fx="median"), "reduce_fx='median'): expected one of mean, sum, max, min."),
    "nothing": (lambda net, batch, i: net.log("a", 1, on_step=False, on_epoch=False), "logs nothing: set one of them."),
}  # fmt: skip


@pytest.mark.parametrize("case", LOGS)
def test_what_cannot_be_logged(tmp_path, case):
    step, expected = LOGS[case]
    assert expected in refusal(lambda: fit(tmp_path, Net(train=step)))


def test_a_step_cannot_be_logged_at_an_epochs_end(tmp_path):
    net = changed(on_train_epoch_end=lambda self: self.log("a", 1, on_step=True))
    assert "there is no step, so leave on_step out." in refusal(lambda: fit(tmp_path, net))


STEPS = {
    "several numbers": (lambda self, batch, i: self.layer(batch), "a loss of shape (2, 1): expected one number. Take its mean."),
    "a number": (lambda self, batch, i: 1.5, "training_step returned float: expected the loss, a tensor, or a dict with 'loss'."),
    "no graph": (lambda self, batch, i: torch.tensor(1.0), "the loss does not depend on any parameter that learns"),
    "no loss": (lambda self, batch, i: {"los": 1}, "training_step returned a dict without 'loss' in step 0 (batch 0 of epoch 0): return the loss."),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_what_a_step_may_not_return(tmp_path, case):
    step, expected = STEPS[case]
    assert expected in refusal(lambda: fit(tmp_path, changed(training_step=step)))


def test_nothing_is_refused_where_it_is_asked_to_look(tmp_path):
    net = changed(
        training_step=lambda self, batch, i: None if i == 2 else self.layer(batch).mean()
    )
    told = refusal(lambda: fit(tmp_path, net, detect_anomaly=True))
    assert (
        "training_step returned nothing in step 2 (batch 2 of epoch 0): return the loss."
        in told
    )
    net = changed(
        training_step=lambda self, batch, i: None if i == 2 else self.layer(batch).mean()
    )
    fit(tmp_path, net)


def broken(self, batch, i):
    loss = self.layer(batch).mean()
    return loss * (float("nan") if i == 2 else 1.0)


def root(self, batch, i):
    return (
        (self.layer(batch * 0).mean() - self.layer.bias.detach()).abs().sqrt().sum()
    )  # 0, and its slope is infinite


ANOMALIES = {
    "the loss": ({"training_step": broken}, {}, "in step 2 (epoch 0) the loss is not finite"),
    "a gradient": ({"training_step": root}, {}, "in step 0 (epoch 0) the gradient of 'layer."),
    "the batch": ({}, {"loader": DataLoader([torch.ones(1), torch.full((1,), float("inf"))])}, "in step 1 (epoch 0) the batch's tensor 0 is not"),
    "a weight": ({"on_train_start": lambda self: self.layer.weight.data.fill_(float("nan"))}, {}, "the weight 'layer.weight' is not finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", ANOMALIES)
def test_detect_anomaly_names_the_step_and_the_tensor(tmp_path, case):
    methods, keywords, expected = ANOMALIES[case]
    assert expected in refusal(
        lambda: fit(tmp_path, changed(**methods), **keywords, detect_anomaly=True)
    )
    fit(tmp_path, changed(**methods), **keywords)  # without it, nobody looks


class Bare(L.LightningModule):
    def training_step(self, batch, batch_idx): ...


MISSING = {
    "no training_step": (lambda run: run.fit(L.LightningModule()), "LightningModule has no training_step, which trainer.fit needs"),
    "no optimizers": (lambda run: run.fit(Bare()), "Bare has no configure_optimizers, which trainer.fit needs: write it."),
    "no validation_step": (lambda run: run.validate(Bare()), "Bare has no validation_step, which trainer.validate needs"),
    "no test_step": (lambda run: run.test(Bare()), "Bare has no test_step, which trainer.test needs"),
    "no module": (lambda run: run.fit(torch.nn.Linear(1, 1)), "Linear is not a LightningModule: give a subclass"),
    "no model": (lambda run: run.predict(), "no model was given, and none was before"),
    "no data": (lambda run: run.fit(Net()), "has nothing to learn from: give train_dataloaders, a datamodule, or write"),
    "no data to validate": (lambda run: run.validate(Net()), "trainer.validate has no data: give dataloaders"),
    "two loaders": (lambda run: run.fit(Net(), [[1], [2]]), "takes one training dataloader"),
    "best": (lambda run: run.validate(Net(), [1], ckpt_path="best"), "ckpt_path='best', and no ModelCheckpoint has saved such a one"),
    "last": (lambda run: run.fit(Net(), [1], ckpt_path="last"), "ckpt_path='last', and no ModelCheckpoint has saved such"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_named(tmp_path, case):
    call, expected = MISSING[case]
    assert expected in refusal(lambda: call(trainer(tmp_path)))


FITS = {
    "val_check_interval": ({"val_check_interval": 9, "val": DataLoader(Rows(2))}, "val_check_interval=9, and an epoch has 4 batches"),
    "validate in a stream": ({"val_check_interval": 0.5, "loader": DataLoader(Stream(4)), "val": DataLoader(Rows(2))}, "val_check_interval=0.5, a share of a loader without a length: give a whole number."),
    "a share of a stream": ({"limit_train_batches": 0.5, "loader": DataLoader(Stream(4))}, "a share of a loader without a length"),
    "precision": ({"precision": "17"}, "precision is '17': expected one of 32, 64, 16, bf16, 32-true"),
    "clip by hand": ({"net": {"automatic_optimization": False}, "gradient_clip_val": 1.0}, "gradient_clip_val is for automatic"),
    "accumulate by hand": ({"net": {"automatic_optimization": False}, "accumulate_grad_batches": 2}, "is for automatic optim"),
    "dp on one CPU": ({"strategy": "dp", "devices": 2}, "one process has one CPU to compute on, and 2 devices were asked for"),
    "pipeline": ({"strategy": "pipeline"}, "places a module's stages, and Changed names none: give it a method pipeline_stages()"),
}  # fmt: skip


@pytest.mark.parametrize("case", FITS)
def test_what_only_shows_in_fit(tmp_path, case):
    keywords, expected = FITS[case]
    net, keywords = changed(), dict(keywords)
    for name, value in keywords.pop("net", {}).items():
        setattr(net, name, value)
    assert expected in refusal(lambda: fit(tmp_path, net, **keywords))


def test_a_scheduler_that_watches_what_nobody_logs(tmp_path):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            "monitor": "val",
        }

    assert "a scheduler watches 'val', which was not logged; there are: none." in refusal(
        lambda: fit(tmp_path, changed(configure_optimizers=configure_optimizers))
    )


def test_one_step_takes_too_few_arguments_for_several_loaders(tmp_path):
    net = changed(validation_step=lambda self, batch, batch_idx: None)
    told = refusal(
        lambda: trainer(tmp_path).validate(net, [DataLoader(Rows(2)), DataLoader(Rows(2))])
    )
    assert (
        "there are 2 dataloaders, and validation_step takes (batch, batch_idx): add a third argument, dataloader_idx."
        in told
    )


STRATEGIES = {
    "algorithm": (lambda: BaguaStrategy(algorithm="bytgrad"), "bagua has no algorithm 'bytgrad': did you mean 'bytegrad'"),
    "its argument": (lambda: BaguaStrategy(algorithm="async", speed=3), "bagua's async does not take that argument"),
    "micro_batches": (lambda: PipelineStrategy(micro_batches=0), "micro_batches is 0: expected a whole number from 1 up."),
    "horovod": (lambda: fit(".", Net(), strategy="horovod", devices=3), "run `multigpu horovodrun -np 3 python train.py`, and"),
}  # fmt: skip


@pytest.mark.parametrize("case", STRATEGIES)
def test_a_strategy_that_cannot_be_meant(case):
    make, expected = STRATEGIES[case]
    assert expected in refusal(make)


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for devices, highest in ((3, 2), ([0, 5], 5)):
        told = refusal(lambda devices=devices: L.Trainer(accelerator="gpu", devices=devices))
        assert (
            f"asks for GPU {highest}, and this machine has 2 GPUs, numbered from 0: ask for at most 2"
            in told
        )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "accelerator='gpu', but torch sees none" in refusal(
        lambda: L.Trainer(accelerator="gpu")
    )
