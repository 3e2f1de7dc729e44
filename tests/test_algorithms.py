"""Bagua's algorithms: what each keeps, what it lets differ, and what it sends. With 2 and with 4 ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from ranked import (
    NUMBERS,
    ROWS,
    batch,
    bytes_a_step,
    everywhere,
    gap,
    gradient,
    loss,
    meet,
    mine,
    mlp,
    refused,
    small_buckets,
    spread,
    train,
    vector,
    wrap,
)
from torch import nn

from multigpu import launch
from multigpu.strategies.bytegrad import ByteGrad, byte_mean
from multigpu.strategies.decentralized import Decentralized, peer
from multigpu.strategies.flat import same_start
from multigpu.strategies.gradient_allreduce import GradientAllReduce
from multigpu.strategies.low_precision import LowPrecisionDecentralized
from multigpu.strategies.quantise import compress

LR = 0.1


def attached(algorithm, how=wrap, lr=LR):
    """A model that differs between ranks until it is attached, and its optimizer."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return algorithm.attach(model, [optimizer], how), optimizer


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


def in_pieces(model, optimizer, step: int) -> None:
    """A step whose rows come in two pieces, only the last of which is synchronised."""
    x, y = mine(step)
    half = ROWS // 2
    with model.no_sync() if hasattr(model, "no_sync") else torch.enable_grad():
        (loss(model, (x[:half], y[:half])) / 2).backward()
    (loss(model, (x[half:], y[half:])) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


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
    told["buckets"] = len(model._get_ddp_logging_data()["bucket_sizes"].split(","))
    told["spread"], told["to serial"] = spread(model), gap(vector(model), serial(5, ranks, start))

    def run(steps: range) -> None:
        train(whole, other, steps)

    whole, other = attached(algorithm)
    train(whole, other, range(2))  # after the first step DDP sorts its buckets anew
    told["bytes"] = bytes_a_step(run)
    told["bytes in pieces"] = bytes_a_step(lambda steps: [in_pieces(whole, other, step) for step in steps] and None)
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


def weights(told: dict, mode: str, rank: int, ranks: int) -> None:
    """Decentralized: the average of what the weights were, then the local gradient, taken at those."""
    model, optimizer = attached(algorithm := Decentralized(mode))
    told["spread at the start"] = spread(model)
    reference = mlp()
    averaged = []
    optimizer.register_step_pre_hook(lambda *_: averaged.append(vector(model)))  # after the algorithm's own
    for step in range(4):
        before = vector(model)
        train(model, optimizer, range(step, step + 1))
        others = everywhere(before)
        partner = [[1, 0], [1, 0]][step % 2][rank] if ranks == 2 else [[2, 3, 0, 1], [3, 2, 1, 0]][step % 2][rank]
        expected = others.mean(0) if mode == "all" else (before + others[partner]) / 2
        told[f"average {step}"] = gap(averaged[-1], expected)
        told[f"mean {step}"] = gap(everywhere(averaged[-1]).mean(0), others.mean(0))
        local = expected - LR * gradient(reference, mine(step), at=before)
        told[f"step {step}"] = gap(vector(model), local)
    told["spread while it trains"] = spread(model)
    told["exchanges"] = algorithm.exchanges
    before, count = vector(model), algorithm.exchanges
    with torch.no_grad():
        model(mine(0)[0])
    told["validation"] = algorithm.exchanges - count
    in_pieces(model, optimizer, 7)
    told["exchanges in pieces"] = algorithm.exchanges - count
    told["pieces"] = gap(vector(model), averaged[-1] - LR * gradient(reference, mine(7), at=before))
    loss(model, mine(8)).backward()
    if rank:  # rank 0 gives this step up, as a GradScaler would
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(9, 11))
    told["exchanges after giving up"] = everywhere(torch.tensor(algorithm.exchanges - count)).tolist()
    told["bytes"] = bytes_a_step(lambda steps: train(model, optimizer, steps))
    loss(model, mine(8)).backward()
    algorithm.close()
    told["hooks left"] = len(model._forward_pre_hooks) + len(optimizer._optimizer_step_pre_hooks) - 1

    still, idle = attached(Decentralized(mode, communication_interval=3), lr=0.0)
    with torch.no_grad():
        for p in still.parameters():
            p += torch.randn(p.shape)  # the ranks' own
    told["spreads"] = []
    for step in range(7):
        train(still, idle, range(step, step + 1))
        told["spreads"].append(spread(still))


def low(told: dict, rank: int, ranks: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(vector(model)))  # before the algorithm's own
    algorithm = LowPrecisionDecentralized()
    algorithm.attach(model, [optimizer], wrap)
    told["spread at the start"] = spread(model)
    told["drift"] = []
    for step in range(6):
        left, right, own = algorithm.left[0].clone(), algorithm.right[0].clone(), algorithm.own[0].clone()
        train(model, optimizer, range(step, step + 1))
        d = stepped[-1] + (left + right) / 3 - 5 * own / 3
        bound = everywhere(d.max() - d.min()).mean() / 510
        told["drift"].append((gap(everywhere(vector(model)).mean(0), everywhere(stepped[-1]).mean(0)), bound.item()))
        told[f"rounding {step}"] = gap(vector(model), own + d), (d.max() - d.min()).item() / 510
    all_own = everywhere(algorithm.own[0])
    told["beliefs"] = [
        torch.equal(algorithm.left[0], all_own[(rank - 1) % ranks]),
        torch.equal(algorithm.right[0], all_own[(rank + 1) % ranks]),
        torch.equal(vector(model), all_own[rank]),
    ]
    loss(model, mine(8)).backward()
    if rank:
        optimizer.step()
    optimizer.zero_grad()
    told["bytes"] = bytes_a_step(lambda steps: train(model, optimizer, steps))  # not stuck: rank 0 has kept pace
    told["bytes in pieces"] = bytes_a_step(lambda steps: [in_pieces(model, optimizer, step) for step in steps] and None)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape)
    optimizer.param_groups[0]["lr"] = 0.0
    told["spreads"] = [spread(model)]
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        told["spreads"].append(spread(model))
    algorithm.close()
    told["hooks left"] = len(model._forward_pre_hooks)


def experiments() -> dict:
    rank, ranks = meet()
    told = {name: {} for name in ("gradient_allreduce", "bytegrad", "mean", "all", "shift_one", "low")}
    norm = nn.BatchNorm1d(3)
    norm.running_mean += rank
    norm.num_batches_tracked += rank
    norm.weight.data += rank
    same_start(norm)
    told["start"] = [norm.running_mean.sum().item(), norm.num_batches_tracked.item(), norm.weight.sum().item()]
    gradients(told["gradient_allreduce"], GradientAllReduce(), ranks)
    gradients(told["bytegrad"], ByteGrad(), ranks)
    bytes_mean(told["mean"], rank, ranks)
    weights(told["all"], "all", rank, ranks)
    weights(told["shift_one"], "shift_one", rank, ranks)
    low(told["low"], rank, ranks)
    if ranks == 4:
        three = dist.new_group([0, 1, 2])
        if rank < 3:
            told["odd"] = refused(lambda: Decentralized("shift_one").attach(mlp(), [], wrap, three))
    dist.destroy_process_group()
    return told


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    """What each rank tells of the experiments."""
    return launch.call(experiments, request.param)


def test_all_start_from_rank_0s_weights_and_buffers(ranks):
    for told in ranks:
        assert told["start"] == [0.0, 0, 3.0]
        for name in ("gradient_allreduce", "bytegrad", "all", "shift_one", "low"):
            assert told[name]["spread at the start"] == 0


def test_gradient_allreduce_is_the_full_batch(ranks):
    for told in (told["gradient_allreduce"] for told in ranks):
        assert told["gradient"] < 1e-7 and told["to serial"] < 1e-6 and told["pieces to serial"] < 1e-6
        assert told["spread"] == 0 and told["buckets"] > 1


# Tolerances of the bytes: gloo puts a header of about 50 bytes before each message, and nothing else comes on top.
def test_gradient_allreduce_sends_what_a_ring_sends(ranks):
    n = len(ranks)
    for told in (told["gradient_allreduce"] for told in ranks):
        assert told["bytes"] == pytest.approx(8 * NUMBERS * (n - 1) / n, rel=0.01)
        assert told["bytes in pieces"] == pytest.approx(told["bytes"], rel=0.01)


@pytest.mark.parametrize("what", ["1000 numbers", "1001 numbers, above 100", "3 numbers", "1 number"])
def test_a_mean_by_bytes_is_within_its_bound_and_the_same_everywhere(ranks, what):
    for told in ranks:
        error, bound, apart, length = told["mean"][what]
        assert error <= bound * 1.001 + 2e-5 and apart == 0
        assert error > 0 or what == "1 number"  # or nothing was quantised
        assert length == int(what.split()[0])


def test_a_mean_by_bytes_of_equal_numbers_is_exact_and_hides_no_nan(ranks):
    for told in ranks:
        assert told["mean"]["constant"][0] < 1e-7 and told["mean"]["empty"] == 0
        assert told["mean"]["NaN comes back"] == 100 / len(ranks)  # the chunk that it is in


def test_bytegrad_keeps_its_bound_and_the_ranks_the_same(ranks):
    for told in (told["bytegrad"] for told in ranks):
        assert 0 < told["gradient"] <= told["bound"] and told["spread"] == 0 and told["buckets"] > 1
        assert 1e-7 < told["to serial"] < 5 * LR * told["bound"] * 1.5
        assert told["pieces to serial"] < LR * told["bound"]


def test_bytegrad_sends_a_quarter(ranks):
    n = len(ranks)
    for told in ranks:
        expected = 2 * (n - 1) * (NUMBERS / n + 8)
        assert told["bytegrad"]["bytes"] == pytest.approx(expected, rel=0.02)
        assert told["bytegrad"]["bytes in pieces"] == pytest.approx(expected, rel=0.02)
        assert told["gradient_allreduce"]["bytes"] / told["bytegrad"]["bytes"] == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_weights_are_averaged_and_local_gradients_applied(ranks, mode):
    for told in (told[mode] for told in ranks):
        for step in range(4):
            assert told[f"average {step}"] < 1e-7 and told[f"mean {step}"] < 2e-7 and told[f"step {step}"] < 1e-6
        assert told["spread while it trains"] > 1e-4
        assert told["pieces"] < 1e-6


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_one_exchange_a_step_whatever_happens_in_it(ranks, mode):
    for told in (told[mode] for told in ranks):
        assert told["exchanges"] == 4 and told["validation"] == 0 and told["exchanges in pieces"] == 1
        assert told["exchanges after giving up"] == [4] * len(ranks)
        assert told["hooks left"] == 0


def test_weights_averaged_send_what_the_table_says(ranks):
    n = len(ranks)
    for told in ranks:
        assert told["all"]["bytes"] == pytest.approx(8 * NUMBERS * (n - 1) / n, rel=0.01)
        assert told["shift_one"]["bytes"] == pytest.approx(4 * NUMBERS, rel=0.01)


def test_the_spread_falls_at_every_third_step(ranks):
    for told in ranks:
        spreads = told["all"]["spreads"]
        assert max(spreads) < 1e-6  # from the first step on
        spreads = told["shift_one"]["spreads"]
        if len(ranks) == 2:
            assert max(spreads) == 0
        else:  # two pairs, then the two others: then all are the same
            assert spreads[0] == spreads[2] > 1 and max(spreads[3:]) < 1e-6


def test_peers_swap_and_each_meets_the_whole_other_half():
    for size in (2, 4, 6, 8):
        for exchange in range(5):
            assert all(peer(peer(rank, exchange, size), exchange, size) == rank for rank in range(size))
        assert {peer(0, exchange, size) for exchange in range(size // 2)} == set(range(size // 2, size))
    assert [peer(rank, 0, 4) for rank in range(4)] == [2, 3, 0, 1]
    assert [peer(rank, 1, 4) for rank in range(4)] == [3, 2, 1, 0]


def test_neighbours_know_each_other_bit_for_bit(ranks):
    for told in ranks:
        assert told["low"]["beliefs"] == [True, True, True]


def test_low_precision_moves_the_mean_by_its_rounding_only(ranks):
    for told in (told["low"] for told in ranks):
        for drift, bound in told["drift"]:
            assert drift <= bound + 1e-7
        for step in range(6):
            off, bound = told[f"rounding {step}"]
            assert 1e-8 < off <= bound + 1e-7
        first, *_, last = told["spreads"]
        assert first > 1 and last < 0.1 * first
        assert told["hooks left"] == 0


def test_low_precision_sends_two_messages(ranks):
    for told in ranks:
        assert told["low"]["bytes"] == pytest.approx(2 * (NUMBERS + 8), rel=0.01)
        assert told["low"]["bytes in pieces"] == pytest.approx(2 * (NUMBERS + 8), rel=0.01)


def test_an_odd_number_of_ranks_has_no_pairs(ranks):
    if len(ranks) == 4:
        assert all("start 2 or 4 ranks" in told["odd"] for told in ranks[:3])


def test_what_there_is_not_is_refused():
    assert "'all' and 'shift_one'" in refused(lambda: Decentralized("ring"))
    assert "communication_interval is 0" in refused(lambda: Decentralized(communication_interval=0))
    assert "hierarchical" in refused(lambda: ByteGrad(hierarchical=True))
    assert compress(torch.ones(1)).shape == (9,)


@pytest.mark.parametrize("algorithm", [Decentralized(), Decentralized("shift_one"), LowPrecisionDecentralized()])
def test_one_process_alone_just_trains(algorithm):
    model, optimizer = attached(algorithm)
    before = vector(model)
    expected = before - LR * gradient(model, batch(0))
    loss(model, batch(0)).backward()
    optimizer.step()
    algorithm.close()
    assert gap(vector(model), expected) < 1e-7
