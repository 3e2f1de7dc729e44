"""Gradients averaged as floats and as bytes: their error, and what is sent. 2 and 4 ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from ranked import (
    LR,
    NUMBERS,
    attached,
    batch,
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
    train_in_micro_batches,
    vector,
)
from refusals import user_error
from torch import nn

from multigpu import launch
from multigpu.strategies import BaguaStrategy
from multigpu.strategies.bagua.base import Algorithm
from multigpu.strategies.bagua.bytegrad import ByteGrad, Exchange
from multigpu.strategies.bagua.gradient_allreduce import GradientAllReduce
from multigpu.strategies.bagua.qadam import QAdamOptimizer


def serial(steps: int, ranks: int, start: torch.Tensor) -> torch.Tensor:
    """The weights after training in one process with the whole batch."""
    model = mlp()
    nn.utils.vector_to_parameters(start.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, batch(step, ranks=ranks)).backward()
        optimizer.step()
    return vector(model)


def gradients(report: dict, algorithm: Algorithm, ranks: int) -> None:
    """The properties of GradientAllReduce and ByteGrad."""
    model, optimizer = attached(algorithm, small_buckets)
    start = vector(model)
    report["difference at the start"] = rank_difference(model)
    local = gather_ranks(gradient(model.module, local_batch(0)))
    mean = local.mean(0)
    ranges = local.amax(1) - local.amin(1)
    loss(model, local_batch(0)).backward()
    averaged = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    report["gradient"] = max_difference(averaged, mean)
    report["bound"] = (ranges.mean() + mean.max() - mean.min()).item() / 510
    optimizer.zero_grad()
    train(model, optimizer, range(5))
    report["buckets"] = len(model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))
    report["difference"] = rank_difference(model)
    report["to serial"] = max_difference(vector(model), serial(5, ranks, start))

    model, optimizer = attached(algorithm)
    # DDP sorts its buckets anew after the first step.
    train(model, optimizer, range(2))
    report["bytes"] = bytes_per_step(lambda steps: train(model, optimizer, steps))
    report["bytes in micro-batches"] = bytes_per_step(
        lambda steps: train_in_micro_batches(model, optimizer, steps)
    )

    model, optimizer = attached(algorithm)
    nn.utils.vector_to_parameters(start.clone(), model.parameters())
    train_in_micro_batches(model, optimizer, range(1))
    report["micro-batches to serial"] = max_difference(vector(model), serial(1, ranks, start))
    algorithm.close()


def byte_mean(values: torch.Tensor) -> torch.Tensor:
    exchange = Exchange(values)
    exchange.gather()
    return exchange.finish()


def means_by_bytes(report: dict, rank: int) -> None:
    for name, values in {
        "1000 numbers": torch.randn(1000),
        "1001 numbers, above 100": torch.randn(1001) + 100,
        "3 numbers": torch.randn(3),
        "1 number": torch.randn(1),
        "constant": torch.full((1001,), 0.3),
    }.items():
        result = byte_mean(values)
        whole = gather_ranks(values)
        mean = whole.mean(0)
        bound = ((whole.amax(1) - whole.amin(1)).mean() + mean.max() - mean.min()) / 510
        report[name] = {
            "error": max_difference(result, mean),
            "bound": bound.item(),
            "between ranks": max_difference(gather_ranks(result), result),
            "length": len(result),
        }
    bad = torch.ones(100)
    bad[-1] = math.nan if rank == 0 else 1.0
    report["NaNs"] = byte_mean(bad).isnan().sum().item()


def experiments() -> dict:
    rank, ranks = start_gloo()
    report = {name: {} for name in ("gradient_allreduce", "bytegrad", "mean")}
    gradients(report["gradient_allreduce"], GradientAllReduce(), ranks)
    gradients(report["bytegrad"], ByteGrad(), ranks)
    means_by_bytes(report["mean"], rank)
    dist.destroy_process_group()
    return report


@pytest.fixture(scope="module", params=[2, 4])
def reports(request):
    """Each rank's report of the experiments."""
    return launch.call(experiments, request.param)


def test_gradient_allreduce_is_the_full_batch(reports):
    for report in (report["gradient_allreduce"] for report in reports):
        assert report["gradient"] < 1e-7
        assert report["to serial"] < 1e-6 and report["micro-batches to serial"] < 1e-6
        assert report["difference"] == 0 and report["buckets"] > 1


# The tolerances of the bytes are gloo's headers, about 50 bytes per message.
def test_gradient_allreduce_sends_what_a_ring_sends(reports):
    n = len(reports)
    for report in (report["gradient_allreduce"] for report in reports):
        assert report["bytes"] == pytest.approx(8 * NUMBERS * (n - 1) / n, rel=0.01)
        assert report["bytes in micro-batches"] == pytest.approx(report["bytes"], rel=0.01)


@pytest.mark.parametrize(
    "name", ["1000 numbers", "1001 numbers, above 100", "3 numbers", "1 number"]
)
def test_a_mean_by_bytes_is_within_its_bound_and_the_same_on_all_ranks(reports, name):
    for report in (report["mean"][name] for report in reports):
        assert report["error"] <= report["bound"] * 1.001 + 2e-5
        assert report["between ranks"] == 0
        # An error of 0 would mean that nothing was quantised, but one or two numbers are
        # exact.
        assert report["error"] > 0 or report["length"] < 1000
        assert report["length"] == int(name.split()[0])


def test_a_mean_by_bytes_of_equal_numbers_is_exact_and_hides_no_nan(reports):
    for report in (report["mean"] for report in reports):
        assert report["constant"]["error"] == 0
        # All of the chunk that contains the NaN.
        assert report["NaNs"] == 100 / len(reports)


def test_bytegrad_keeps_its_bound_and_the_ranks_equal(reports):
    for report in (report["bytegrad"] for report in reports):
        assert 0 < report["gradient"] <= report["bound"]
        assert report["difference"] == 0 and report["buckets"] > 1
        assert 1e-7 < report["to serial"] < 5 * LR * report["bound"] * 1.5
        assert report["micro-batches to serial"] < LR * report["bound"]


def test_bytegrad_sends_a_quarter(reports):
    n = len(reports)
    expected = 2 * (n - 1) * (NUMBERS / n + 8)
    for report in reports:
        in_bytes = report["bytegrad"]
        assert in_bytes["bytes"] == pytest.approx(expected, rel=0.02)
        assert in_bytes["bytes in micro-batches"] == pytest.approx(expected, rel=0.02)
        ratio = report["gradient_allreduce"]["bytes"] / in_bytes["bytes"]
        assert ratio == pytest.approx(4, rel=0.02)


def test_all_start_from_rank_0s_weights(reports):
    for report in reports:
        for name in ("gradient_allreduce", "bytegrad"):
            assert report[name]["difference at the start"] == 0


def test_arguments_have_baguas_names_and_order():
    optimizer = QAdamOptimizer(mlp().parameters(), 1e-3, 7, (0.8, 0.9), 1e-6, 0.1)
    (group,) = optimizer.param_groups
    names = ("lr", "warmup_steps", "betas", "eps", "weight_decay")
    assert [group[name] for name in names] == [1e-3, 7, (0.8, 0.9), 1e-6, 0.1]
    BaguaStrategy("decentralized", peer_selection_mode="shift_one")
    BaguaStrategy("async", sync_interval_ms=20)


def test_wrong_arguments_are_refused():
    refused = user_error(lambda: BaguaStrategy("decentralized", hierarchical=True))
    assert "decentralized" in refused and "hierarchical" in refused
    assert "warmup_steps" in user_error(
        lambda: QAdamOptimizer(mlp().parameters(), 1e-3, (0.9, 0.999))
    )
