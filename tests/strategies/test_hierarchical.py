"""Bagua's arguments hierarchical and average. Four ranks are two nodes with two ranks each."""

import os

import pytest
import torch
import torch.distributed as dist
from ranked import (
    LR,
    NUMBERS,
    attached,
    bytes_per_step,
    gather_ranks,
    gradient,
    local_batch,
    loss,
    max_difference,
    mlp,
    rank_difference,
    small_buckets,
    start_gloo,
    train,
    user_error,
    vector,
    wrap,
)

from multigpu import launch
from multigpu.strategies import BaguaStrategy
from multigpu.strategies.bagua.bytegrad import ByteGrad
from multigpu.strategies.bagua.decentralized import Decentralized
from multigpu.strategies.bagua.gradient_allreduce import GradientAllReduce
from multigpu.strategies.bagua.hierarchy import Hierarchy
from multigpu.strategies.bagua.low_precision import LowPrecisionDecentralized
from multigpu.strategies.bagua.qadam import QAdam, QAdamOptimizer

pytestmark = pytest.mark.slow

PER_NODE = 2


def pretend_nodes(rank: int, per_node: int) -> None:
    os.environ.update(LOCAL_RANK=str(rank % per_node), LOCAL_WORLD_SIZE=str(per_node))


def node_means(whole: torch.Tensor) -> torch.Tensor:
    """(ranks, N) → (nodes, N)."""
    return whole.view(-1, PER_NODE, whole.shape[-1]).mean(1)


def reduced(algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's gradient after the exchange, and all ranks' own gradients."""
    model, optimizer = attached(algorithm, small_buckets)
    whole = gather_ranks(gradient(model.module, local_batch(0)))
    loss(model, local_batch(0)).backward()
    averaged = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    assert rank_difference(model) == 0
    algorithm.close()
    return averaged, whole


def bytes_of(algorithm, optimizer_class=None) -> float:
    if optimizer_class is None:
        model, optimizer = attached(algorithm)
    else:
        inner = mlp(0)
        optimizer = optimizer_class(inner.parameters(), warmup_steps=1)
        model = algorithm.attach(inner, [optimizer], wrap)
    train(model, optimizer, range(2))
    counted = bytes_per_step(lambda steps: train(model, optimizer, steps))
    algorithm.close()
    return counted


def gradients(report: dict) -> None:
    averaged, whole = reduced(GradientAllReduce(hierarchical=True))
    report["allreduce"] = max_difference(averaged, whole.mean(0))
    summed, whole = reduced(GradientAllReduce(average=False))
    report["sum"] = max_difference(summed, whole.sum(0))
    summed, whole = reduced(GradientAllReduce(True, False))
    report["sum of sums"] = max_difference(summed, whole.sum(0))
    for name, average in (("bytes", True), ("sum of bytes", False)):
        result, whole = reduced(ByteGrad(hierarchical=True, average=average))
        nodes = node_means(whole) if average else node_means(whole) * PER_NODE
        expected = nodes.mean(0) if average else nodes.sum(0)
        # Only the nodes' means are quantised.
        bound = (
            (nodes.amax(1) - nodes.amin(1)).mean() + nodes.mean(0).max() - nodes.mean(0).min()
        )
        scale = 1 if average else len(nodes)
        report[name] = (max_difference(result, expected), scale * bound.item() / 510)
    result, whole = reduced(ByteGrad(average=False))
    report["plain sum of bytes"] = (
        max_difference(result, whole.sum(0)) / whole.sum(0).abs().max()
    )


def decentralized(report: dict, mode: str) -> None:
    algorithm = Decentralized(hierarchical=True, peer_selection_mode=mode)
    model, optimizer = attached(algorithm)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape)
    averages = []
    optimizer.register_step_pre_hook(lambda *_: averages.append(vector(model)))
    before = vector(model)
    own = gradient(mlp(), local_batch(0), at=before)
    others = gather_ranks(before)
    train(model, optimizer, range(1))
    # With two nodes, the peer of a node is the other one: the mean over all.
    report[mode] = max_difference(averages[0], others.mean(0))
    report[f"{mode}, own step"] = max_difference(vector(model), averages[0] - LR * own)
    algorithm.close()


def low_precision(report: dict, rank: int) -> None:
    algorithm = LowPrecisionDecentralized(hierarchical=True, communication_interval=2)
    model, optimizer = attached(algorithm)
    differences = []
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        weights = gather_ranks(vector(model))
        twin = weights[rank ^ 1]
        differences.append(max_difference(vector(model), twin))
    # Steps 0 and 2 exchange: then the ranks of a node are equal. 1 and 3 do not.
    report["low precision"] = differences
    algorithm.close()


def one_node(report: dict, rank: int) -> None:
    """All ranks are on one node: nothing is left between nodes, and nothing is rounded."""
    pretend_nodes(rank, 4)
    averaged, whole = reduced(ByteGrad(hierarchical=True))
    report["one node"] = max_difference(averaged, whole.mean(0))
    model, optimizer = attached(LowPrecisionDecentralized(hierarchical=True))
    train(model, optimizer, range(3))
    report["one node, low precision"] = rank_difference(model)
    model, optimizer = attached(Decentralized(True, "shift_one"))
    train(model, optimizer, range(1), torch.float32)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, range(1))
    report["one node, shift_one"] = rank_difference(model)
    os.environ.update(LOCAL_RANK=str(max(0, rank - 1)), LOCAL_WORLD_SIZE="3")
    report["unequal nodes"] = user_error(Hierarchy)
    pretend_nodes(rank, PER_NODE)


def experiments() -> dict:
    rank, _ = start_gloo()
    pretend_nodes(rank, PER_NODE)
    report = {}
    gradients(report)
    decentralized(report, "all")
    decentralized(report, "shift_one")
    low_precision(report, rank)
    report["sent"] = {
        "allreduce": bytes_of(GradientAllReduce(hierarchical=True)),
        "bytegrad": bytes_of(ByteGrad(hierarchical=True)),
        "qadam": bytes_of(QAdam(hierarchical=True), QAdamOptimizer),
        "decentralized": bytes_of(Decentralized(hierarchical=True)),
        "low precision": bytes_of(LowPrecisionDecentralized(hierarchical=True)),
    }
    one_node(report, rank)
    dist.destroy_process_group()
    return report


@pytest.fixture(scope="module")
def reports():
    """Each of four ranks' report of the experiments."""
    return launch.call(experiments, 4)


def test_the_mean_and_the_sum_are_those_of_all_ranks(reports):
    for report in reports:
        assert report["allreduce"] < 1e-7
        assert report["sum"] < 1e-6 and report["sum of sums"] < 1e-6


def test_bytegrad_rounds_between_the_nodes_only(reports):
    for report in reports:
        for name in ("bytes", "sum of bytes"):
            error, bound = report[name]
            assert 0 < error <= bound * 1.001
        assert 0 < report["plain sum of bytes"] < 0.02


def test_decentralized_averages_nodes(reports):
    for report in reports:
        for mode in ("all", "shift_one"):
            assert report[mode] < 1e-6 and report[f"{mode}, own step"] < 1e-6


def test_low_precision_averages_the_node_in_every_second_step(reports):
    for report in reports:
        first, second, third, fourth = report["low precision"]
        assert first == third == 0 and second > 1e-4 and fourth > 1e-4


def test_only_one_rank_per_node_sends_to_other_nodes(reports):
    """Between the nodes a leader sends what one of two ranks sends without nodes.

    Within the node, gloo's reduce sends N/2 floats from each of two ranks, and N/2 more to the
    leader; the leader's broadcast sends N floats.
    """
    whole = 4 * NUMBERS
    between = {
        "allreduce": 4 * NUMBERS,
        "bytegrad": NUMBERS + 16,
        "qadam": NUMBERS + 16,
        "decentralized": 4 * NUMBERS,
        "low precision": 2 * (NUMBERS + 8),
    }
    for rank, report in enumerate(reports):
        for name, sent in report["sent"].items():
            expected = 1.5 * whole + between[name] if rank % PER_NODE == 0 else whole
            assert sent == pytest.approx(expected, rel=0.02), (rank, name)


def test_with_one_node_nothing_is_rounded(reports):
    for report in reports:
        assert report["one node"] < 1e-7
        assert report["one node, low precision"] == 0
        assert report["one node, shift_one"] == 0
        assert "1 or 3" in report["unequal nodes"]


def test_arguments_have_baguas_names_and_order():
    optimizer = QAdamOptimizer(mlp().parameters(), 1e-3, 7, (0.8, 0.9), 1e-6, 0.1)
    (group,) = optimizer.param_groups
    names = ("lr", "warmup_steps", "betas", "eps", "weight_decay")
    assert [group[name] for name in names] == [1e-3, 7, (0.8, 0.9), 1e-6, 0.1]
    for name, keywords in {
        "gradient_allreduce": {"hierarchical": True, "average": False},
        "bytegrad": {"hierarchical": True, "average": False},
        "qadam": {"q_adam_optimizer": optimizer, "hierarchical": True},
        "decentralized": {
            "hierarchical": True,
            "peer_selection_mode": "shift_one",
            "communication_interval": 2,
        },
        "low_precision_decentralized": {"hierarchical": True, "communication_interval": 2},
        "async": {"peer_selection_mode": "all", "sync_interval_ms": 20, "warmup_steps": 1},
    }.items():
        BaguaStrategy(name, **keywords)


def test_arguments_in_the_wrong_place_are_refused():
    assert "by name" in user_error(lambda: Decentralized("shift_one"))
    assert "warmup_steps" in user_error(
        lambda: QAdamOptimizer(mlp().parameters(), 1e-3, (0.9, 0.999))
    )
    assert "communication_interval is 0" in user_error(
        lambda: LowPrecisionDecentralized(communication_interval=0)
    )
    other, own = (QAdamOptimizer(mlp().parameters()) for _ in range(2))
    assert "q_adam_optimizer" in user_error(lambda: QAdam(other).attach(mlp(), [own], wrap))
