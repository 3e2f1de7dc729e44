"""For test_endings.py: train in several ways; print at the end how many gloo threads run."""

import atexit
from pathlib import Path

import torch
import torch.nn.functional as F
from quiet import QUIET
from torch.utils.data import DataLoader, TensorDataset


def threads() -> int:
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


atexit.register(lambda: print(f"at the end {threads()}\n", end="", flush=True))

# After the line above: the function registered first is called last.
import multigpu.trainer as L  # noqa: E402
from multigpu.strategies import BaguaStrategy, DDPStrategy, QAdamOptimizer  # noqa: E402


class Lit(L.LightningModule):
    def __init__(self, manual: bool = False, qadam: bool = False):
        super().__init__()
        self.net = torch.nn.Linear(6, 3)
        self.automatic_optimization = not manual
        self.qadam = qadam

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
    (Lit(), BaguaStrategy("async", sync_interval_ms=5)),
    (Lit(), "horovod"),
]
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
# Kept, so that nothing is released before the end.
trainers = []
for model, strategy in RUNS:
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=1,
        **QUIET,
    )
    trainers.append(trainer)
    trainer.fit(model, DataLoader(data, 5))

# Without the Trainer; the DDP wrapper exists until the process ends.
ddp = DDPStrategy()
ddp.connect()
wrapped = ddp.setup(torch.nn.Linear(6, 3))
wrapped(data.tensors[0]).sum().backward()
print(f"before {threads()}\n", end="", flush=True)
