"""A script for test_endings.py: it trains in several ways, and tells at its very end how many threads gloo still has."""

import atexit
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def threads() -> int:
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


atexit.register(lambda: print(f"at the end {threads()}\n", end="", flush=True))

import multigpu.trainer as L  # noqa: E402  after the line above: what is registered first is called last
from multigpu.strategies import BaguaStrategy, DDPStrategy, QAdamOptimizer  # noqa: E402


class Lit(L.LightningModule):
    def __init__(self, manual: bool = False, qadam: bool = False):
        super().__init__()
        self.net = torch.nn.Linear(6, 3)
        self.automatic_optimization, self.qadam = not manual, qadam

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        if self.qadam:
            return QAdamOptimizer(self.parameters(), warmup_steps=2)
        return torch.optim.SGD(self.parameters(), lr=0.1)


RUNS = [
    (Lit(), "ddp"),
    (Lit(manual=True), "ddp"),
    (Lit(qadam=True), BaguaStrategy("qadam")),
    (Lit(), BaguaStrategy("async", sync_interval_ms=5, warmup_steps=2)),
    (Lit(), "horovod"),
]
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
trainers = []
for model, strategy in RUNS:
    trainers.append(
        L.Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
    )  # fmt: skip
    trainers[-1].fit(model, DataLoader(data, 5))

# Without the Trainer, with a wrapper that outlives everything.
alone = DDPStrategy()
alone.connect()
wrapped = alone.setup(torch.nn.Linear(6, 3))
wrapped(data.tensors[0]).sum().backward()
print(f"before {threads()}\n", end="", flush=True)
