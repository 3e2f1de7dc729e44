"""Manual optimization: how a module says so, and what ranks and strategies make of it."""

import plain_net
import pytest
import torch
import torch.distributed as dist
from small_net import QUIET, Net, cpu, make_net, rows
from torch.utils.data import DataLoader
from trainer_user import trainer
from user_methods import sgd, user

import multigpu.trainer as L
from multigpu import launch
from multigpu.errors import UserError
from multigpu.strategies import DDPStrategy
from multigpu.virtual import control

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_scheduler_can_be_made_of_what_optimizers_returns():
    class Schedules(plain_net.Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.rates = []

        def on_train_start(self):
            self.halving = torch.optim.lr_scheduler.StepLR(self.optimizers(), 1, 0.5)

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            self.halving.step()
            self.rates.append(optimizer.param_groups[0]["lr"])

    model = Schedules()
    plain_net.trainer().fit(model, DataLoader(plain_net.rows(), 4))
    assert model.rates == pytest.approx([0.05, 0.025]) and model.global_step == 2


def test_several_optimizers_are_for_manual_optimization(tmp_path):
    module = user(L, configure_optimizers=lambda self: [sgd(self), sgd(self)])()
    with pytest.raises(
        UserError, match=r"2 optimizers: set self.automatic_optimization = False"
    ):
        trainer(L, tmp_path).fit(module)


@pytest.mark.parametrize("strategy", ["dp", "ddp2", "pipeline"])
def test_manual_optimization_is_refused_where_a_step_runs_in_pieces(strategy, request):
    request.addfinalizer(control.stop)
    # ddp2 makes a process group before it refuses. If it stayed, later tests would be rank 0.
    request.addfinalizer(lambda: dist.is_initialized() and dist.destroy_process_group())
    Net.pipeline_stages = lambda self: [self.layer[0], torch.nn.Identity()]
    with pytest.raises(
        UserError, match=r"manual optimization .*automatic optimization, or strategy='ddp'"
    ):
        L.Trainer(accelerator="vgpu", devices=2, strategy=strategy, **QUIET).fit(
            make_net(manual=True), DataLoader(rows(4), 4)
        )
    del Net.pipeline_stages


def synchronizes_after_detach() -> bool:
    strategy = DDPStrategy()
    strategy.manual_optimization = True
    strategy.connect()
    model = torch.nn.Linear(2, 1)
    wrapped = strategy.setup(model)
    strategy.detach()
    model(torch.ones(1, 2))
    return wrapped.require_backward_grad_sync


def test_detach_leaves_the_users_module_without_hooks():
    """The hook of a manual step turns DDP's synchronisation off."""
    assert launch.call(synchronizes_after_detach, 1) == [True]


def clipped_by_hand() -> torch.Tensor:
    model = make_net(manual=True)
    cpu(strategy="horovod").fit(model, DataLoader(rows(16), 2, shuffle=True))
    return model.layer[0].weight.detach().flatten()


def test_horovods_gradients_are_averaged_before_they_are_clipped_by_hand():
    assert torch.equal(*launch.call(clipped_by_hand, 2))
