"""An invalid argument of the Trainer or of a strategy: the error names mistake and remedy."""

import pytest
import torch
import warm
from commands import ROOT, run
from numbered_rows import Net, fit
from refusals import names

import multigpu.trainer as L
from multigpu.strategies import PipelineStrategy

pytestmark = pytest.mark.filterwarnings("ignore")


# ---- the Trainer's arguments ----------------------------------------------------------------


BOTH = {"enable_checkpointing": False, "callbacks": [L.callbacks.ModelCheckpoint()]}


# case → (the Trainer's arguments, what the error names: argument, value, remedy)
ARGUMENTS = {
    "strategy ddpp": ({"strategy": "ddpp"}, ("'ddpp'", "'ddp' or 'ddp2'")),
    "devices 0": ({"devices": 0}, ("devices is 0", "-1", "list of GPUs")),
    "devices x": ({"devices": "x"}, ("devices is 'x'",)),
    "accelerator": ({"accelerator": "tpu"}, ("accelerator", "'tpu'", "'cpu', 'gpu', 'vgpu'")),
    "num_nodes": ({"num_nodes": 0}, ("num_nodes is 0", "from 1")),
    "one device on nodes": (
        {"strategy": "single_device", "num_nodes": 2},
        ("single_device", "one process", "2"),
    ),
    "max_epochs": ({"max_epochs": -2}, ("max_epochs is -2", "from 0", "-1 for no limit")),
    "accumulate": ({"accumulate_grad_batches": 0}, ("accumulate_grad_batches is 0", "from 1")),
    "a fraction": ({"limit_train_batches": 1.5}, ("limit_train_batches is 1.5", "0.0 to 1.0")),
    "clip by": (
        {"gradient_clip_algorithm": "max"},
        ("gradient_clip_algorithm is 'max'", "'norm' or 'value'"),
    ),
    "over epochs": (
        {"check_val_every_n_epoch": None},
        ("check_val_every_n_epoch=None", "give val_check_interval"),
    ),
    "misspelt": ({"max_epoch": 3}, ("'max_epoch'", "'max_epochs' or 'min_epochs'")),
    "a bar that is off": (
        {"enable_progress_bar": False, "callbacks": [L.callbacks.TQDMProgressBar()]},
        ("enable_progress_bar=False", "ProgressBar"),
    ),
    "two savers": (BOTH, ("enable_checkpointing=False", "ModelCheckpoint")),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_invalid_argument_is_named(case):
    arguments, facts = ARGUMENTS[case]
    names(lambda: L.Trainer(**arguments), *facts)


def test_a_script_prints_the_sentence_alone(tmp_path):
    for code in (
        "L.Trainer(strategy='ddpp')",
        "L.Trainer(logger=False).fit(L.LightningModule())",
    ):
        done = run(
            warm.python(),
            "-c",
            f"import multigpu.trainer as L; {code}",
            cwd=tmp_path,
            PYTHONPATH=ROOT,
        )
        lines = done.stdout.strip().splitlines()
        assert done.returncode != 0 and len(lines) == 1 and lines[0].startswith("error: ")


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
    names(lambda: L.Trainer(accelerator="gpu"), "accelerator='gpu'", "no GPU")


# ---- strategies -----------------------------------------------------------------------------


# case → (a call, what the error names)
STRATEGIES = {
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
