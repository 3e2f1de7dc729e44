"""Precision: which numbers a run computes with, and what the loss scaler does."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from numbered_rows import Net, Rows, ran, trainer
from small_net import QUIET, cpu, make_net, rows
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader
from user_methods import both

import multigpu.trainer as L
from multigpu.errors import UserError
from multigpu.virtual import control

pytestmark = pytest.mark.filterwarnings("ignore")


def test_gradients_are_scaled_back_before_they_are_clipped(request):
    """Clipped with the loss scaler's factor, 65536, the step would be that much smaller."""
    request.addfinalizer(control.stop)
    model = make_net()
    before = parameters_to_vector(model.parameters()).detach().clone()
    L.Trainer(
        accelerator="vgpu", precision=16, max_steps=1, gradient_clip_val=0.01, **QUIET
    ).fit(model, DataLoader(rows(6), 2))
    step = parameters_to_vector(model.parameters()).detach() - before
    assert step.norm().item() == pytest.approx(0.01 * 0.5, rel=0.01)  # 0.5: learning rate


def test_16_mixed_on_the_cpu_is_bf16_mixed_with_a_warning(tmp_path):
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        run = trainer(tmp_path, precision=16)
        run.fit(Net(), DataLoader(Rows(4), 2))
    assert run.run.precision.name == "bf16-mixed" and any(
        "bf16-mixed is used instead" in str(w.message) for w in reported
    )


def test_each_inner_step_computes_with_the_weights_of_the_step_before(tmp_path):
    """Autocast's cache would keep the first step's 16-bit weights for the whole batch."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
            self.recorded.append(loss.item())

    recorded, steps, _ = both(
        tmp_path,
        arguments={"precision": "bf16-mixed"},
        automatic_optimization=False,
        training_step=training_step,
    )
    assert steps == 24 and len(set(recorded[:4])) == 4


def test_64_bit_is_64_bit_throughout(tmp_path):
    kinds = []
    net = Net(
        train=lambda net, batch, i: kinds.extend(
            (batch.dtype, torch.zeros(1).dtype, net.dtype)
        )
    )
    ran(tmp_path, net, precision=64, fast_dev_run=True, val=0)
    assert set(kinds) == {torch.float64} and torch.get_default_dtype() == torch.float32


def test_a_batch_without_a_loss_is_skipped_with_a_scaler_too(request):
    request.addfinalizer(control.stop)
    model = make_net()
    model.training_step = lambda batch, i: (
        None if i == 0 else F.cross_entropy(model(batch[0]), batch[1])
    )
    with pytest.warns(UserWarning, match="returned nothing"):
        L.Trainer(accelerator="vgpu", precision=16, max_epochs=1, **QUIET).fit(
            model, DataLoader(rows(6), 2)
        )


def test_bfloat16_on_an_old_virtual_gpu_names_another(request):
    request.addfinalizer(control.stop)
    with pytest.raises(UserError, match=r"precision='16-mixed'.*gpu='A100-40GB'"):
        cpu(accelerator="vgpu", precision="bf16", devices=1).fit(
            make_net(), DataLoader(rows(8), 2)
        )
