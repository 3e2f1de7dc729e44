"""An invalid argument of the Trainer or of a strategy: the error names what is wrong."""

import pytest
import torch
import warm
from commands import ROOT, run
from numbered_rows import Net, fit
from refusals import names

import multigpu.trainer as L
from multigpu.strategies import PipelineStrategy

pytestmark = pytest.mark.filterwarnings("ignore")
# case → (the Trainer's arguments, what the error names)
ARGUMENTS = {
    "strategy ddpp": ({"strategy": "ddpp"}, "'ddp' or 'ddp2'"),
    "devices 0": ({"devices": 0}, "devices is 0"),
    "devices x": ({"devices": "x"}, "devices is 'x'"),
    "accelerator": ({"accelerator": "tpu"}, "'tpu'"),
    "num_nodes": ({"num_nodes": 0}, "num_nodes is 0"),
    "one device on nodes": ({"strategy": "single_device", "num_nodes": 2}, "one process"),
    "max_epochs": ({"max_epochs": -2}, "max_epochs is -2"),
    "accumulate": ({"accumulate_grad_batches": 0}, "accumulate_grad_batches is 0"),
    "a fraction": ({"limit_train_batches": 1.5}, "limit_train_batches is 1.5"),
    "over epochs": ({"check_val_every_n_epoch": None}, "give val_check_interval"),
    "misspelt": ({"max_epoch": 3}, "'max_epochs' or 'min_epochs'"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_invalid_argument_is_named(case):
    arguments, fact = ARGUMENTS[case]
    names(lambda: L.Trainer(**arguments), fact)


def test_a_script_prints_the_sentence_alone(tmp_path):
    for code in (
        "L.Trainer(strategy='ddpp')",
        "L.Trainer(logger=False).fit(L.LightningModule())",
    ):
        program = f"import multigpu.trainer as L; {code}"
        done = run(warm.python(), "-c", program, cwd=tmp_path, PYTHONPATH=ROOT)
        lines = done.stdout.strip().splitlines()
        assert done.returncode != 0 and len(lines) == 1 and lines[0].startswith("error: ")


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names(lambda: L.Trainer(accelerator="gpu", devices=3), "GPU 2", "2 GPUs")
    names(lambda: L.Trainer(accelerator="gpu", devices=[0, 5]), "GPU 5", "2 GPUs")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    names(lambda: L.Trainer(accelerator="gpu"), "accelerator='gpu'", "no GPU")


def test_an_invalid_strategy_is_named():
    names(lambda: PipelineStrategy(micro_batches=0), "micro_batches is 0")
    names(lambda: fit(".", Net(), strategy="horovod", devices=3), "horovodrun -np 3")
