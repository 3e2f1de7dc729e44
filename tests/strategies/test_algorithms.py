"""Gradients averaged whole and as bytes: how exact they are, and what is sent. With 2 and with 4 ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from ranked import (
    LR,
    NUMBERS,
    attached,
    batch,
    bytes_a_step,
    everywhere,
    gap,
    gradient,
    in_pieces,
    loss,
    meet,
    mine,
    mlp,
    refused,
    small_buckets,
    spread,
    train,
    vector,
)
from torch import nn

from multigpu import launch
from multigpu.strategies.bagua.bytegrad import ByteGrad, byte_mean
from multigpu.strategies.bagua.gradient_allreduce import GradientAllReduce


def serial(steps: int, ranks: int, start: torch.Tensor) -> torch.Tensor:
    """The weights after steps of one process that has the whole batch."""
    model = mlp()
    nn.utils.vector_to_parameters(start.clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, batch(step, ranks=ranks)).backward()
        optimizer.step()
    return vector(model)


def gradients(told: dict, algorithm, ranks: int) -> None:
    """What holds for GradientAllReduce and ByteGrad."""
    model, optimizer = attached(algorithm, small_buckets)
    start = vector(model)
    told["spread at the start"] = spread(model)
    mean = everywhere(gradient(model.module, mine(0))).mean(0)
    ranges = everywhere(gradient(model.module, mine(0))).aminmax(dim=1)
    loss(model, mine(0)).backward()
    told["gradient"] = gap(torch.cat([p.grad.reshape(-1) for p in model.parameters()]), mean)
    told["bound"] = ((ranges.max - ranges.min).mean() + mean.max() - mean.min()).item() / 510
    optimizer.zero_grad()
    train(model, optimizer, range(5))
    told["buckets"] = len(model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))
    told["spread"], told["to serial"] = (
        spread(model),
        gap(vector(model), serial(5, ranks, start)),
    )

    def run(steps: range) -> None:
        train(whole, other, steps)

    whole, other = attached(algorithm)
    train(whole, other, range(2))  # after the first step DDP sorts its buckets anew
    told["bytes"] = bytes_a_step(run)
    told["bytes in pieces"] = bytes_a_step(
        lambda steps: [in_pieces(whole, other, step) for step in steps] and None
    )
    twin, third = attached(algorithm)
    nn.utils.vector_to_parameters(start.clone(), twin.parameters())
    in_pieces(twin, third, 0)
    told["pieces to serial"] = gap(vector(twin), serial(1, ranks, start))
    algorithm.close()


def bytes_mean(told: dict, rank: int, ranks: int) -> None:
    for name, mine_ in {
        "1000 numbers": torch.randn(1000),
        "1001 numbers, above 100": torch.randn(1001) + 100,
        "3 numbers": torch.randn(3),
        "1 number": torch.randn(1),
        "constant": torch.full((1001,), 0.3),
    }.items():
        found, whole = byte_mean(mine_), everywhere(mine_)
        mean = whole.mean(0)
        bound = ((whole.amax(1) - whole.amin(1)).mean() + mean.max() - mean.min()) / 510
        told[name] = gap(found, mean), bound.item(), gap(everywhere(found), found), len(found)
    bad = torch.ones(100)
    bad[-1] = math.nan if rank == 0 else 1.0
    told["NaN comes back"] = byte_mean(bad).isnan().sum().item()
    told["empty"] = len(byte_mean(torch.empty(0)))


def experiments() -> dict:
    rank, ranks = meet()
    told = {name: {} for name in ("gradient_allreduce", "bytegrad", "mean")}
    gradients(told["gradient_allreduce"], GradientAllReduce(), ranks)
    gradients(told["bytegrad"], ByteGrad(), ranks)
    bytes_mean(told["mean"], rank, ranks)
    dist.destroy_process_group()
    return told


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    """What each rank tells of the experiments."""
    return launch.call(experiments, request.param)


def test_gradient_allreduce_is_the_full_batch(ranks):
    for told in (told["gradient_allreduce"] for told in ranks):
        assert (
            told["gradient"] < 1e-7
            and told["to serial"] < 1e-6
            and told["pieces to serial"] < 1e-6
        )
        assert told["spread"] == 0 and told["buckets"] > 1


# Tolerances of the bytes: gloo puts a header of about 50 bytes before each message, and nothing else comes on top.
def test_gradient_allreduce_sends_what_a_ring_sends(ranks):
    n = len(ranks)
    for told in (told["gradient_allreduce"] for told in ranks):
        assert told["bytes"] == pytest.approx(8 * NUMBERS * (n - 1) / n, rel=0.01)
        assert told["bytes in pieces"] == pytest.approx(told["bytes"], rel=0.01)


@pytest.mark.parametrize(
    "what", ["1000 numbers", "1001 numbers, above 100", "3 numbers", "1 number"]
)
def test_a_mean_by_bytes_is_within_its_bound_and_the_same_everywhere(ranks, what):
    for told in ranks:
        error, bound, apart, length = told["mean"][what]
        assert error <= bound * 1.001 + 2e-5 and apart == 0
        assert (
            error > 0 or length < 1000
        )  # or nothing was quantised; a chunk of one or two numbers is exact
        assert length == int(what.split()[0])


def test_a_mean_by_bytes_of_equal_numbers_is_exact_and_hides_no_nan(ranks):
    for told in ranks:
        assert told["mean"]["constant"][0] == 0 and told["mean"]["empty"] == 0
        assert told["mean"]["NaN comes back"] == 100 / len(ranks)  # the chunk that it is in


def test_bytegrad_keeps_its_bound_and_the_ranks_the_same(ranks):
    for told in (told["bytegrad"] for told in ranks):
        assert (
            0 < told["gradient"] <= told["bound"]
            and told["spread"] == 0
            and told["buckets"] > 1
        )
        assert 1e-7 < told["to serial"] < 5 * LR * told["bound"] * 1.5
        assert told["pieces to serial"] < LR * told["bound"]


def test_bytegrad_sends_a_quarter(ranks):
    n = len(ranks)
    for told in ranks:
        expected = 2 * (n - 1) * (NUMBERS / n + 8)
        assert told["bytegrad"]["bytes"] == pytest.approx(expected, rel=0.02)
        assert told["bytegrad"]["bytes in pieces"] == pytest.approx(expected, rel=0.02)
        assert told["gradient_allreduce"]["bytes"] / told["bytegrad"][
            "bytes"
        ] == pytest.approx(4, rel=0.02)


def test_all_start_from_rank_0s_weights(ranks):
    for told in ranks:
        assert (
            told["gradient_allreduce"]["spread at the start"]
            == told["bytegrad"]["spread at the start"]
            == 0
        )


def test_what_there_is_not_is_refused():
    assert "hierarchical" in refused(lambda: ByteGrad(hierarchical=True))
