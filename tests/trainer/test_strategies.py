"""Strategies in one process, through the Trainer: names, dp, pipeline, and what is refused."""

import pytest
import torch
from refusals import refusal
from strategy_net import Classes, Ended, X, Y, fitted, gap
from torch.nn import functional as F

from multigpu.errors import UserError
from multigpu.strategies import STRATEGIES, PipelineStrategy, strategy_by_name
from multigpu.virtual import control

pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_name_makes_its_strategy():
    for name in STRATEGIES:
        assert strategy_by_name(name).name == name
    for stem in ("ddp", "ddp_spawn", "ddp_notebook"):
        for answer in (True, False):
            made = strategy_by_name(f"{stem}_find_unused_parameters_{str(answer).lower()}")
            assert made.name == stem and made.keywords == {"find_unused_parameters": answer}
    assert "there is no strategy" in refusal(
        lambda: strategy_by_name("ddp_find_unused_parameters_maybe")
    )
    own = strategy_by_name("ddp")
    assert strategy_by_name(own) is own


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One device: the first loss, and the weights."""
    net = Classes(gathered=False)
    weights = fitted(tmp_path_factory.mktemp("one"), net, strategy="single_device")
    return net.losses[0], weights


def test_dp_is_one_device_where_the_loss_is_of_the_gathered_outputs(tmp_path, one):
    """10 rows on 4 devices are [3, 3, 3, 1]."""
    with control.running(count=4):
        net = Ended()
        weights = fitted(tmp_path, net, strategy="dp", accelerator="vgpu", devices=4)
    assert net.run.num_devices == 4
    assert gap(weights, one[1]) < 1e-6 and net.losses[0] == pytest.approx(one[0], abs=1e-6)


def test_dps_mean_over_replicas_is_another_number(tmp_path, one):
    pieces = [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    with control.running(count=4):
        net = Classes(gathered=False)
        weights = fitted(tmp_path, net, strategy="dp", accelerator="vgpu", devices=4)
    start = Classes()
    replicas = [F.cross_entropy(start(X[piece]), Y[piece]).item() for piece in pieces]
    assert net.losses[0] == pytest.approx(sum(replicas) / 4, abs=1e-6)
    assert abs(net.losses[0] - one[0]) > 0.01 and gap(weights, one[1]) > 1e-3


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_pipeline_is_one_device(tmp_path, one, micro_batches):
    with control.running(count=2) as devices:
        net = Classes(gathered=False)
        strategy = PipelineStrategy(micro_batches)
        net.on_train_end = lambda: places.extend(
            [net.first.weight.device, net.second.weight.device]
        )
        places: list = []
        weights = fitted(tmp_path, net, strategy=strategy, accelerator="vgpu", devices=2)
        assert places == devices
        assert net(X).device.type == "cpu", "afterwards the module is the user's, on the CPU"
    assert gap(weights, one[1]) < 1e-6 and net.losses[0] == pytest.approx(one[0], abs=1e-6)


def test_pipeline_leaves_a_tensor_without_dimensions_whole():
    """A weight for the whole batch, say, beside the rows."""
    strategy = PipelineStrategy(micro_batches=2)
    micro_batches = strategy.split((torch.arange(4.0), torch.tensor(3.0)))
    assert [batch[0].tolist() for batch, _ in micro_batches] == [[0, 1], [2, 3]]
    assert [batch[1].item() for batch, _ in micro_batches] == [3, 3]


def test_pipeline_cuts_a_batch_of_few_rows_into_single_rows():
    """An epoch's last batch can have fewer rows than there are micro-batches."""
    strategy = PipelineStrategy(micro_batches=4)
    rows = [(batch.tolist(), weight) for batch, weight in strategy.split(torch.arange(3.0))]
    assert rows == [([0], 1 / 3), ([1], 1 / 3), ([2], 1 / 3)]
    assert [len(batch) for batch, _ in strategy.split(torch.arange(5.0))] == [2, 1, 1, 1]


@pytest.mark.parametrize("batch", [torch.zeros(0, 3), torch.tensor(1.0), "text"])
def test_pipeline_refuses_a_batch_without_rows(batch):
    with pytest.raises(UserError, match=r"without rows .* 4 micro-batches"):
        PipelineStrategy(micro_batches=4).split(batch)


def test_pipeline_wants_a_device_for_each_stage(tmp_path):
    with (
        control.running(count=3),
        pytest.raises(UserError, match=r"2 stages.* 3 devices"),
    ):
        fitted(
            tmp_path,
            Classes(gathered=False),
            strategy="pipeline",
            accelerator="vgpu",
            devices=3,
        )


def test_the_loss_scaler_is_refused_where_it_would_break_an_algorithm(tmp_path):
    from multigpu.strategies import BaguaStrategy

    for name, takes in (
        ("qadam", False),
        ("low_precision_decentralized", False),
        ("bytegrad", True),
    ):
        assert BaguaStrategy(name).supports_loss_scaling == takes
