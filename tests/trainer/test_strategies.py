"""dp, ddp2, horovod, pipeline and a strategy of the user, through the Trainer."""

import pytest
import torch
from torch.nn import functional as F
from trainer_strategies import RATE, Classes, Ended, X, Y, everything, fitted, nce

from multigpu import launch, vgpu
from multigpu.errors import UserError
from multigpu.strategies import PipelineStrategy

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch.call(everything, 2, str(tmp_path_factory.mktemp("ranks")))


def by_hand(losses, rates=(RATE,) * 9):
    """The weights after ordinary steps down these losses, each a function of the net."""
    net = Classes()
    for loss, rate in zip(losses, rates, strict=False):
        net.zero_grad()
        loss(net).backward()
        for weight in net.parameters():
            weight.data -= rate * weight.grad
    return [w.detach() for w in net.parameters()]


def whole(start, end):
    return lambda net: F.cross_entropy(net(X[start:end]), Y[start:end])


def gap(mine, theirs):
    return max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True))


def test_ddp_is_the_full_batch(ranks):
    for rank in ranks:
        assert gap(rank["ddp"], by_hand([whole(0, 20), whole(20, 40)])) < 1e-6


def test_a_strategy_can_be_given_a_group_and_a_wrapper_of_its_own(ranks):
    for rank in ranks:
        assert (
            rank["called"] == ["init_dist_connection", ("configure_ddp", None)]
            and rank["backend"] == "gloo"
        )
        assert gap(rank["own"], rank["ddp"]) == 0


def test_unused_parameters_are_looked_for_only_where_wanted(ranks):
    for rank in ranks:
        assert rank["unused"][0] == "" and "got none in the last step" in rank["unused"][1]


def test_ddp2_computes_the_loss_of_a_nodes_whole_batch(ranks):
    """In-batch negatives: the node's 10 rows are the reference; 5 rows a GPU, as ddp would
    have them, are not.
    """

    def parts(size):
        nodes = [X[rank:20:2] for rank in (0, 1)]
        pieces = [piece for node in nodes for piece in node.split(size)]
        return lambda net: sum(nce(net(piece)) for piece in pieces) / len(pieces)

    for rank in ranks:
        assert gap(rank["nodes"], by_hand([parts(10)])) < 1e-6
        assert gap(rank["nodes"], by_hand([parts(5)])) > 1e-3


def test_horovod_multiplies_the_learning_rate_and_what_the_scheduler_takes_for_it(ranks):
    """2 ranks: 0.2 in the first epoch, half of it in the second."""
    steps = [whole(0, 20), whole(20, 40)] * 2
    for rank in ranks:
        (rate, base), weights = rank["horovod"]
        assert rate == 2 * RATE and base == [2 * RATE]
        assert gap(weights, by_hand(steps, [2 * RATE, 2 * RATE, RATE, RATE])) < 1e-6


def test_strategies_work_in_an_ordinary_loop(ranks):
    reference = by_hand([whole(8 * step, 8 * step + 8) for step in range(3)])
    for rank in ranks:
        assert gap(rank["ddp alone"], reference) < 1e-6
        assert (
            0 < gap(rank["bagua alone"], reference) < 1e-2
            and gap(rank["bagua alone"], ranks[0]["bagua alone"]) == 0
        )


def test_a_step_that_returns_nothing_is_refused_on_several_ranks(ranks):
    for rank in ranks:
        assert (
            "training_step returned nothing in step 0 (batch 0 of epoch 0): return the loss."
            in rank["nothing"]
        )


def test_qadam_takes_one_optimizer(ranks):
    for rank in ranks:
        assert "qadam" in rank["qadam"] and "QAdamOptimizer" in rank["qadam"]


def test_every_strategy_calls_training_step_end(ranks, tmp_path):
    assert all(rank["ends"] == {"ddp": 2, "horovod": 2, "bagua": 2} for rank in ranks)
    for name, devices in (("single_device", 1), ("dp", 2), ("ddp2", 2), ("pipeline", 2)):
        net = Ended(gathered=False)
        if name == "ddp2":  # it starts a process group: see two_nodes
            continue
        with vgpu.running(count=devices):
            strategy = PipelineStrategy(1) if name == "pipeline" else name
            fitted(tmp_path, net, strategy=strategy, accelerator="vgpu", devices=devices)
        assert net.ends == 4, name


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One device: the first loss, and the weights."""
    net = Classes(gathered=False)
    weights = fitted(tmp_path_factory.mktemp("one"), net, strategy="single_device")
    return net.losses[0], weights


def test_dp_is_one_device_where_the_loss_is_of_the_gathered_outputs(tmp_path, one):
    """10 rows on 4 devices are [3, 3, 3, 1]."""
    with vgpu.running(count=4):
        net = Ended()
        weights = fitted(tmp_path, net, strategy="dp", accelerator="vgpu", devices=4)
    assert net.run.num_devices == 4
    assert gap(weights, one[1]) < 1e-6 and net.losses[0] == pytest.approx(one[0], abs=1e-6)


def test_dps_mean_over_replicas_is_another_number(tmp_path, one):
    pieces = [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    with vgpu.running(count=4):
        net = Classes(gathered=False)
        weights = fitted(tmp_path, net, strategy="dp", accelerator="vgpu", devices=4)
    start = Classes()
    replicas = [F.cross_entropy(start(X[piece]), Y[piece]).item() for piece in pieces]
    assert net.losses[0] == pytest.approx(sum(replicas) / 4, abs=1e-6)
    assert abs(net.losses[0] - one[0]) > 0.01 and gap(weights, one[1]) > 1e-3


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_pipeline_is_one_device(tmp_path, one, micro_batches):
    with vgpu.running(count=2) as devices:
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


def test_pipeline_refuses_a_batch_that_it_cannot_cut(tmp_path):
    with (
        vgpu.running(count=2),
        pytest.raises(UserError, match=r"3 rows .* 4 micro-batches"),
    ):
        fitted(
            tmp_path,
            Classes(gathered=False),
            batch=3,
            strategy="pipeline",
            accelerator="vgpu",
            devices=2,
        )


def test_pipeline_wants_a_device_for_each_stage(tmp_path):
    with (
        vgpu.running(count=3),
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


def test_sync_batchnorm_on_the_cpu_is_refused(tmp_path, monkeypatch):
    from trainer_ranks import Net, trainer

    from multigpu.launch.world import World

    run = trainer(tmp_path, sync_batchnorm=True)
    monkeypatch.setattr(run.strategy, "world", World(0, 2))
    with pytest.raises(UserError, match=r"sync_batchnorm=True.*CPU.*accelerator="):
        run.fit(Net(), torch.utils.data.DataLoader(X[:, :1], 2))
