"""Weights averaged instead of gradients: what each rank keeps, and what the exchange does not change. 2 and 4 ranks."""

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
    spread,
    train,
    vector,
    wrap,
)
from torch import nn

from multigpu import launch
from multigpu.strategies.bagua.decentralized import Decentralized, peer
from multigpu.strategies.bagua.low_precision import LowPrecisionDecentralized
from multigpu.strategies.weights import same_start


def weights(told: dict, mode: str, rank: int, ranks: int) -> None:
    """Decentralized: the average of what the weights were, then the local gradient, taken at those."""
    model, optimizer = attached(algorithm := Decentralized(mode))
    told["spread at the start"] = spread(model)
    reference = mlp()
    averaged = []
    optimizer.register_step_pre_hook(
        lambda *_: averaged.append(vector(model))
    )  # after the algorithm's own
    for step in range(4):
        before = vector(model)
        train(model, optimizer, range(step, step + 1))
        others = everywhere(before)
        partner = (
            [[1, 0], [1, 0]][step % 2][rank]
            if ranks == 2
            else [[2, 3, 0, 1], [3, 2, 1, 0]][step % 2][rank]
        )
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
    told["pieces"] = gap(
        vector(model), averaged[-1] - LR * gradient(reference, mine(7), at=before)
    )
    loss(model, mine(8)).backward()
    if rank:  # rank 0 gives this step up, as a GradScaler would
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(9, 11))
    told["exchanges after giving up"] = everywhere(
        torch.tensor(algorithm.exchanges - count)
    ).tolist()
    told["bytes"] = bytes_a_step(lambda steps: train(model, optimizer, steps))
    loss(model, mine(8)).backward()
    algorithm.close()
    told["hooks left"] = (
        len(model._forward_pre_hooks) + len(optimizer._optimizer_step_pre_hooks) - 1
    )

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
    optimizer.register_step_post_hook(
        lambda *_: stepped.append(vector(model))
    )  # before the algorithm's own
    algorithm = LowPrecisionDecentralized()
    algorithm.attach(model, [optimizer], wrap)
    told["spread at the start"] = spread(model)
    told["drift"] = []
    for step in range(6):
        left, right, own = (
            algorithm.left[0].clone(),
            algorithm.right[0].clone(),
            algorithm.own[0].clone(),
        )
        train(model, optimizer, range(step, step + 1))
        d = stepped[-1] + (left + right) / 3 - 5 * own / 3
        bound = everywhere(d.max() - d.min()).mean() / 510
        told["drift"].append(
            (
                gap(everywhere(vector(model)).mean(0), everywhere(stepped[-1]).mean(0)),
                bound.item(),
            )
        )
        told[f"rounding {step}"] = (
            gap(vector(model), own + d),
            (d.max() - d.min()).item() / 510,
        )
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
    train(model, optimizer, range(9, 11))  # not stuck: rank 0 has kept pace
    told["bytes"] = bytes_a_step(lambda steps: train(model, optimizer, steps))
    told["bytes in pieces"] = bytes_a_step(
        lambda steps: [in_pieces(model, optimizer, step) for step in steps] and None
    )
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
    told = {name: {} for name in ("all", "shift_one", "low")}
    norm = nn.BatchNorm1d(3)
    norm.running_mean += rank
    norm.num_batches_tracked += rank
    norm.weight.data += rank
    same_start(norm)
    told["start"] = [
        norm.running_mean.sum().item(),
        norm.num_batches_tracked.item(),
        norm.weight.sum().item(),
    ]
    weights(told["all"], "all", rank, ranks)
    weights(told["shift_one"], "shift_one", rank, ranks)
    low(told["low"], rank, ranks)
    if ranks == 4:
        three = dist.new_group([0, 1, 2])
        if rank < 3:
            told["odd"] = refused(
                lambda: Decentralized("shift_one").attach(mlp(), [], wrap, three)
            )
    dist.destroy_process_group()
    return told


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    """What each rank tells of the experiments."""
    return launch.call(experiments, request.param)


def test_all_start_from_rank_0s_weights_and_buffers(ranks):
    for told in ranks:
        assert told["start"] == [0.0, 0, 3.0]
        for name in ("all", "shift_one", "low"):
            assert told[name]["spread at the start"] == 0


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_weights_are_averaged_and_local_gradients_applied(ranks, mode):
    for told in (told[mode] for told in ranks):
        for step in range(4):
            assert (
                told[f"average {step}"] < 1e-7
                and told[f"mean {step}"] < 2e-7
                and told[f"step {step}"] < 1e-6
            )
        assert told["spread while it trains"] > 1e-4
        assert told["pieces"] < 1e-6


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_one_exchange_a_step_whatever_happens_in_it(ranks, mode):
    for told in (told[mode] for told in ranks):
        assert (
            told["exchanges"] == 4
            and told["validation"] == 0
            and told["exchanges in pieces"] == 1
        )
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
            assert all(
                peer(peer(rank, exchange, size), exchange, size) == rank
                for rank in range(size)
            )
        assert {peer(0, exchange, size) for exchange in range(size // 2)} == set(
            range(size // 2, size)
        )
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


@pytest.mark.parametrize(
    "algorithm", [Decentralized(), Decentralized("shift_one"), LowPrecisionDecentralized()]
)
def test_one_process_alone_just_trains(algorithm):
    model, optimizer = attached(algorithm)
    before = vector(model)
    expected = before - LR * gradient(model, batch(0))
    loss(model, batch(0)).backward()
    optimizer.step()
    algorithm.close()
    assert gap(vector(model), expected) < 1e-7


def test_what_there_is_not_is_refused():
    assert "'all' and 'shift_one'" in refused(lambda: Decentralized("ring"))
    assert "communication_interval is 0" in refused(
        lambda: Decentralized(communication_interval=0)
    )
