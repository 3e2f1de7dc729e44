"""The closure of optimizer_step, and optimizers that would need one of their own."""

import pytest
import torch
from refusals import names
from small_net import QUIET, make_net, rows
from torch.nn import functional as F
from torch.utils.data import DataLoader
from user_methods import both

import multigpu.trainer as L

pytestmark = pytest.mark.filterwarnings("ignore")


def test_an_optimizer_step_that_forgets_the_closure_is_refused():
    """Without it nothing is trained; Lightning raises an error, too."""
    model = make_net()
    model.optimizer_step = lambda epoch, batch_idx, optimizer, closure: optimizer.step()
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, **QUIET)
    names(lambda: trainer.fit(model, DataLoader(rows(4), 2)), "optimizer_step", "closure")


def test_a_manual_step_calls_its_closure_once_and_returns_the_loss(tmp_path):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        self.recorded.append(optimizer.step(closure=closure).item())

    recorded, steps, _ = both(
        tmp_path,
        automatic_optimization=False,
        training_step=training_step,
        configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), 0.1),
    )
    assert steps == len(recorded) == 6
