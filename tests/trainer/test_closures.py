"""Closures: which optimizers get one, when it runs, and what `step` returns."""

import pytest
import torch
from refusals import names
from small_net import QUIET, make_net, rows
from torch.nn import functional as F
from torch.utils.data import DataLoader
from user_methods import both

import multigpu.trainer as L
from multigpu.virtual import control

pytestmark = pytest.mark.filterwarnings("ignore")


class SAM(torch.optim.SGD):
    """Sharpness-aware minimization: the gradient where the loss is highest nearby.

    `keywords` is what the last `step` was given besides the closure.
    """

    def step(self, closure=None, **keywords):
        assert closure is not None
        self.keywords = keywords
        closure = torch.enable_grad()(closure)
        weights = [weight for group in self.param_groups for weight in group["params"]]
        closure()
        ascent = [0.05 * weight.grad / (weight.grad.norm() + 1e-12) for weight in weights]
        with torch.no_grad():
            for weight, change in zip(weights, ascent, strict=True):
                weight += change
        loss = closure()
        with torch.no_grad():
            for weight, change in zip(weights, ascent, strict=True):
                weight -= change
        super().step()
        return loss


class WithoutKeywords(SAM):
    def step(self, closure=None):
        return super().step(closure)


def record_losses(self, batch, batch_idx):
    loss = F.cross_entropy(self(batch[0]), batch[1])
    self.recorded.append(loss.item())
    return loss


@pytest.mark.parametrize("kind", [SAM, WithoutKeywords])
def test_an_optimizer_decides_when_and_how_often_the_loss_is_computed(tmp_path, kind):
    recorded, steps, _ = both(
        tmp_path,
        arguments={"gradient_clip_val": 0.3},
        training_step=record_losses,
        configure_optimizers=lambda self: kind(self.parameters(), 0.1),
    )
    assert steps == 6 and len(recorded) == 12


def test_the_hook_sees_the_gradients_of_each_closure(tmp_path):
    def note(self, optimizer):
        self.recorded.append(self.layer.weight.grad.norm().item())

    recorded, _, _ = both(
        tmp_path,
        on_before_optimizer_step=note,
        configure_optimizers=lambda self: SAM(self.parameters(), 0.1),
    )
    assert len(recorded) == 12 and min(recorded) > 0


@pytest.mark.parametrize("kind", [SAM, torch.optim.SGD, torch.optim.LBFGS])
def test_a_manual_step_hands_on_its_arguments_and_returns_the_loss(tmp_path, kind):
    keywords = {"tag": 7} if kind is SAM else {}

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        self.recorded.append(optimizer.step(closure=closure, **keywords).item())
        if kind is SAM:
            self.recorded.append(optimizer.keywords)

    recorded, steps, _ = both(
        tmp_path,
        automatic_optimization=False,
        training_step=training_step,
        configure_optimizers=lambda self: kind(self.parameters(), 0.1),
    )
    assert steps == 6 and (kind is not SAM or recorded[1] == {"tag": 7})


def test_a_closure_that_nobody_calls_is_refused():
    """Without it nothing is trained; Lightning raises an error, too."""

    class Forgets(torch.optim.SGD):
        def step(self, closure=None): ...

    model = make_net()
    model.configure_optimizers = lambda: Forgets(model.parameters(), 0.1)
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, **QUIET)
    names(lambda: trainer.fit(model, DataLoader(rows(4), 2)), "Forgets.step", "closure")


@pytest.mark.parametrize("manual", [False, True])
def test_a_loss_scaler_supports_no_closure(request, manual):
    request.addfinalizer(control.stop)

    def manual_step(batch, batch_idx):
        model.optimizers().step(lambda: None)

    model = make_net(manual=manual)
    if manual:
        model.training_step = manual_step
    model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters())
    trainer = L.Trainer(accelerator="vgpu", precision=16, max_epochs=1, **QUIET)
    names(lambda: trainer.fit(model, DataLoader(rows(4), 2)), "LBFGS", "bf16-mixed")


def test_an_optimizer_without_the_argument_is_stepped_after_the_gradients():
    class Plain(torch.optim.SGD):
        def step(self):
            super().step()

    weights = []
    for kind in (Plain, torch.optim.SGD):
        model = make_net()
        model.configure_optimizers = lambda kind=kind, model=model: kind(
            model.parameters(), 0.1
        )
        L.Trainer(accelerator="cpu", max_epochs=1, **QUIET).fit(model, DataLoader(rows(4), 2))
        weights.append(model.layer[0].weight.detach())
    assert torch.equal(*weights)


def test_optimizers_that_are_replaced_are_stepped(tmp_path):
    def replace(self):
        self.trainer.optimizers = [torch.optim.SGD(self.parameters(), 0.01)]

    def own_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)

    both(tmp_path, on_train_start=replace, optimizer_step=own_step)
