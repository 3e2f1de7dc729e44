"""Layers that are frozen, thawed or unused: ranks stay equal, or an error names them."""

import pytest
import torch
from refusals import outcome
from small_net import Net, cpu, rows
from torch.utils.data import DataLoader

from multigpu import launch
from multigpu.errors import UserError
from multigpu.strategies import DDPStrategy
from multigpu.virtual import control


class TwoLayers(Net):
    """The first layer learns in those epochs for which `when` is True."""

    def __init__(self, when: dict):
        super().__init__()
        self.when, self.first = when, torch.nn.Linear(4, 4)
        self.first.requires_grad_(when.get("before", True))

    def forward(self, x):
        return super().forward(self.first(x))

    def on_train_start(self):
        self.first.requires_grad_(self.when.get("start", self.first.weight.requires_grad))

    def on_train_epoch_start(self):
        self.first.requires_grad_(
            self.when.get(self.current_epoch, self.first.weight.requires_grad)
        )


def changed(when: dict, strategy: object = "ddp") -> object:
    """The first layer's weights after three epochs, or what was said of them."""
    torch.manual_seed(0)
    model = TwoLayers(when)
    try:
        cpu(strategy=strategy, max_epochs=3).fit(model, DataLoader(rows(16), 2))
    except UserError as error:
        hooks = sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters())
        return f"{error} Hooks: {hooks}."
    return model.first.weight.detach().flatten()


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(1, 1)


class Freezes(Net):
    """The layer is frozen in the second epoch; momentum would move it on."""

    def __init__(self):
        super().__init__()
        self.second = torch.nn.Linear(3, 3)
        self.at: list = []

    def forward(self, x):
        return self.second(super().forward(x))

    def on_train_epoch_start(self):
        self.layer.requires_grad_(self.current_epoch == 0)
        self.at.append(self.layer[0].weight.detach().clone())

    def on_train_end(self):
        self.at.append(self.layer[0].weight.detach().clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def on_two_ranks() -> dict:
    found: dict = {}
    found["thawed"] = changed({"before": False, 1: True})
    found["frozen"] = changed({1: False})
    found["frozen, and thawed"] = changed(
        {"start": False, 1: True}, DDPStrategy(find_unused_parameters=True)
    )
    found["thawed, horovod"] = changed({"before": False, 1: True}, "horovod")
    found["frozen, and thawed, horovod"] = changed({"start": False, 1: True}, "horovod")

    train = DataLoader(rows(8), 2)
    found["unused"] = outcome(lambda: cpu(strategy="ddp").fit(Unused(), train))
    freezes = Freezes()
    cpu(strategy="horovod", max_epochs=2).fit(freezes, train)
    found["moved"] = [
        float((a - b).abs().max()) for a, b in zip(freezes.at, freezes.at[1:], strict=False)
    ]
    return found


@pytest.fixture(scope="module")
def two():
    return launch.call(on_two_ranks, 2)


def test_a_layer_that_is_thawed_between_epochs_is_refused_where_ranks_would_learn_it_alone(
    two,
):
    assert (
        "'first.weight' (one of 2) became trainable later, so each rank would train it alone: "
        in two[0]["thawed"]
    )
    assert (
        "'first.weight' (one of 2) was frozen later: give DDPStrategy(find_unused"
        in two[0]["frozen"]
    )
    assert (
        "horovod averages the gradients of the parameters that were trainable when fit began, "
        "but 'first.w" in two[0]["thawed, horovod"]
    )


@pytest.mark.parametrize("strategy", ["", ", horovod"])
def test_and_the_way_that_is_named_keeps_the_ranks_equal(two, strategy):
    first, second = (rank["frozen, and thawed" + strategy] for rank in two)
    assert torch.equal(first, second)
    torch.manual_seed(0)
    assert not torch.equal(first, TwoLayers({}).first.weight.flatten()), "it has learned"


def test_after_a_failure_nothing_hangs_on_the_model(two, request):
    request.addfinalizer(control.stop)
    assert two[0]["thawed, horovod"].endswith("; or call fit again. Hooks: 0.")
    model = TwoLayers({})
    model.pipeline_stages = lambda: [model.first, model.layer]
    model.training_step = lambda batch, batch_idx: model(batch[0]).sum() * (1 // batch_idx)
    with pytest.raises(ZeroDivisionError):
        cpu(accelerator="vgpu", devices=2, strategy="pipeline").fit(
            model, DataLoader(rows(4), 4)
        )
    assert model(torch.ones(1, 4)).device.type == "cpu"


def test_horovod_leaves_a_frozen_layer_where_it_is(two):
    assert two[0]["moved"][0] > 0 and two[0]["moved"][1] == 0


def test_parameters_that_the_loss_does_not_use_are_named(two):
    assert "'unused.weight' (one of 2)" in two[0]["unused"]
    assert "strategy='ddp_find_unused_parameters_true'" in two[0]["unused"]
