"""If a package `horovod` can be imported, the strategy uses it: same script, same numbers."""

import re

import pytest
import warm
from commands import ROOT, run

pytestmark = pytest.mark.slow

SCRIPT = """
import torch, torch.nn.functional as F
import multigpu.trainer as L
from torch.utils.data import DataLoader, TensorDataset

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(6, 3)
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

L.seed_everything(1)
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
model = Lit()
trainer = L.Trainer(strategy="horovod", max_epochs=2, accelerator="cpu", logger=False,
                    enable_checkpointing=False, enable_progress_bar=False,
                    gradient_clip_val=0.5)
trainer.fit(model, DataLoader(data, 5))
trainer.print("weights", repr(model.net.weight.flatten().tolist()))
"""
# It has horovod.torch's interface, prints that it is used, and lets the course's own do the
# work.
PACKAGE = """
from multigpu.strategies.horovod import *
from multigpu.strategies import horovod as own
Compression = own.Compression

def DistributedOptimizer(*args, **keywords):
    print("the package is used", flush=True)
    return own.DistributedOptimizer(*args, **keywords)
"""


def test_an_importable_horovod_does_the_work_and_the_numbers_stay(tmp_path):
    script, package = tmp_path / "train.py", tmp_path / "site" / "horovod"
    script.write_text(SCRIPT)
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "torch.py").write_text(PACKAGE)
    command = ("multigpu", "horovodrun", "-np", 2, warm.python(), script)
    own = run(*command, PYTHONPATH=ROOT)
    other = run(*command, PYTHONPATH=f"{ROOT}:{package.parent}")
    weights = [re.search(r"weights (\[.*\])", done.stdout)[1] for done in (own, other)]
    assert own.returncode == other.returncode == 0 and weights[0] == weights[1]
    assert "the package is used" not in own.stdout
    assert other.stdout.count("the package is used") == 2
