"""Weights averaged instead of gradients: what each rank keeps, and what an exchange preserves.

With 2 and with 4 ranks.
"""

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
    start_gloo,
    train,
    train_in_micro_batches,
    vector,
    wrap,
)
from refusals import user_error
from torch import nn

from multigpu import launch
from multigpu.strategies.bagua import decentralized as decentralized_module
from multigpu.strategies.bagua.decentralized import Decentralized, peer
from multigpu.strategies.bagua.low_precision import LowPrecisionDecentralized
from multigpu.strategies.bagua.weights import broadcast_model

pytestmark = pytest.mark.slow

# PEERS[number of ranks][exchange % 2][rank]
PEERS = {2: [[1, 0], [1, 0]], 4: [[2, 3, 0, 1], [3, 2, 1, 0]]}


def decentralized(report: dict, mode: str, rank: int, ranks: int) -> None:
    """The weights are averaged; then the local gradient, taken before, is applied."""
    algorithm = Decentralized(peer_selection_mode=mode)
    model, optimizer = attached(algorithm)
    report["difference at the start"] = rank_difference(model)
    reference = mlp()
    averages = []
    # This hook runs after the algorithm's own.
    optimizer.register_step_pre_hook(lambda *_: averages.append(vector(model)))
    for step in range(4):
        before = vector(model)
        train(model, optimizer, range(step, step + 1))
        others = gather_ranks(before)
        expected = others.mean(0)
        if mode == "shift_one":
            expected = (before + others[PEERS[ranks][step % 2][rank]]) / 2
        average = averages[-1]
        mean = gather_ranks(average).mean(0)
        report[f"average {step}"] = max_difference(average, expected)
        report[f"mean {step}"] = max_difference(mean, others.mean(0))
        stepped = expected - LR * gradient(reference, local_batch(step), at=before)
        report[f"step {step}"] = max_difference(vector(model), stepped)
    report["difference while it trains"] = rank_difference(model)
    report["exchanges"] = algorithm.exchanges

    before = vector(model)
    count = algorithm.exchanges
    with torch.no_grad():
        model(local_batch(0)[0])
    report["exchanges in validation"] = algorithm.exchanges - count
    train_in_micro_batches(model, optimizer, range(7, 8))
    report["exchanges in micro-batches"] = algorithm.exchanges - count
    expected = averages[-1] - LR * gradient(reference, local_batch(7), at=before)
    report["micro-batches"] = max_difference(vector(model), expected)

    loss(model, local_batch(8)).backward()
    # Rank 0 skips this step, as a GradScaler would.
    if rank:
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(9, 11))
    exchanges = torch.tensor(algorithm.exchanges - count)
    report["exchanges after a skipped step"] = gather_ranks(exchanges).tolist()
    report["bytes"] = bytes_per_step(lambda steps: train(model, optimizer, steps))
    loss(model, local_batch(8)).backward()
    algorithm.close()
    own_hook = 1
    report["hooks left"] = (
        len(model._forward_pre_hooks) + len(optimizer._optimizer_step_pre_hooks) - own_hook
    )

    model, optimizer = attached(Decentralized(peer_selection_mode=mode), lr=0.0)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape)
    report["differences"] = []
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        report["differences"].append(rank_difference(model))


def low_precision(report: dict, rank: int, ranks: int) -> None:
    """Each rank's knowledge of its neighbours, the rounding, and the bytes."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    stepped = []
    # This hook runs before the algorithm's own.
    optimizer.register_step_post_hook(lambda *_: stepped.append(vector(model)))
    algorithm = LowPrecisionDecentralized()
    algorithm.attach(model, [optimizer], wrap)
    report["difference at the start"] = rank_difference(model)
    report["drift"] = []
    for step in range(6):
        left = algorithm.left[0].clone()
        right = algorithm.right[0].clone()
        own = algorithm.own[0].clone()
        train(model, optimizer, range(step, step + 1))
        d = stepped[-1] + (left + right) / 3 - 5 * own / 3
        span = d.max() - d.min()
        mean = gather_ranks(vector(model)).mean(0)
        drift = max_difference(mean, gather_ranks(stepped[-1]).mean(0))
        report["drift"].append((drift, gather_ranks(span).mean().item() / 510))
        rounding = max_difference(vector(model), own + d)
        report[f"rounding {step}"] = (rounding, span.item() / 510)
    all_own = gather_ranks(algorithm.own[0])
    report["left is known"] = torch.equal(algorithm.left[0], all_own[(rank - 1) % ranks])
    report["right is known"] = torch.equal(algorithm.right[0], all_own[(rank + 1) % ranks])
    report["own is the model"] = torch.equal(vector(model), all_own[rank])

    loss(model, local_batch(8)).backward()
    # Rank 0 skips this step; it must still take part in the exchange, or the others hang.
    if rank:
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(9, 11))
    report["bytes"] = bytes_per_step(lambda steps: train(model, optimizer, steps))
    report["bytes in micro-batches"] = bytes_per_step(
        lambda steps: train_in_micro_batches(model, optimizer, steps)
    )
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape)
    optimizer.param_groups[0]["lr"] = 0.0
    report["differences"] = [rank_difference(model)]
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        report["differences"].append(rank_difference(model))
    algorithm.close()
    report["hooks left"] = len(model._forward_pre_hooks)


def experiments() -> dict:
    rank, ranks = start_gloo()
    report = {name: {} for name in ("all", "shift_one", "low precision")}
    norm = nn.BatchNorm1d(3)
    norm.running_mean += rank
    norm.num_batches_tracked += rank
    norm.weight.data += rank
    broadcast_model(norm)
    report["broadcast"] = [
        norm.running_mean.sum().item(),
        norm.num_batches_tracked.item(),
        norm.weight.sum().item(),
    ]
    decentralized(report["all"], "all", rank, ranks)
    decentralized(report["shift_one"], "shift_one", rank, ranks)
    low_precision(report["low precision"], rank, ranks)
    dist.destroy_process_group()
    return report


@pytest.fixture(scope="module", params=[2, 4])
def reports(request):
    """Each rank's report of the experiments."""
    return launch.call(experiments, request.param)


def test_all_start_from_rank_0s_weights_and_buffers(reports):
    for report in reports:
        assert report["broadcast"] == [0.0, 0, 3.0]
        for name in ("all", "shift_one", "low precision"):
            assert report[name]["difference at the start"] == 0


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_weights_are_averaged_and_local_gradients_applied(reports, mode):
    for report in (report[mode] for report in reports):
        for step in range(4):
            assert report[f"average {step}"] < 1e-7
            assert report[f"mean {step}"] < 2e-7
            assert report[f"step {step}"] < 1e-6
        assert report["difference while it trains"] > 1e-4
        assert report["micro-batches"] < 1e-6


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_there_is_one_exchange_per_step(reports, mode):
    for report in (report[mode] for report in reports):
        assert report["exchanges"] == 4
        assert report["exchanges in validation"] == 0
        assert report["exchanges in micro-batches"] == 1
        assert report["exchanges after a skipped step"] == [4] * len(reports)
        assert report["hooks left"] == 0


def test_averaged_weights_send_what_the_formulas_say(reports):
    n = len(reports)
    for report in reports:
        assert report["all"]["bytes"] == pytest.approx(8 * NUMBERS * (n - 1) / n, rel=0.01)
        assert report["shift_one"]["bytes"] == pytest.approx(4 * NUMBERS, rel=0.01)


def test_exchanges_make_the_ranks_equal(reports):
    for report in reports:
        assert max(report["all"]["differences"]) < 1e-6
        first, second = report["shift_one"]["differences"]
        # Of four ranks two pairs exchange, then the two other pairs: then all are equal.
        assert (first == 0 if len(reports) == 2 else first > 1) and second < 1e-6


def test_each_rank_exchanges_with_the_whole_other_half():
    for size in (2, 4, 6, 8):
        for exchange in range(5):
            for rank in range(size):
                assert peer(peer(rank, exchange, size), exchange, size) == rank
        other_half = set(range(size // 2, size))
        assert {peer(0, exchange, size) for exchange in range(size // 2)} == other_half
    for exchange in (0, 1):
        assert [peer(rank, exchange, 4) for rank in range(4)] == PEERS[4][exchange]


def test_neighbours_know_each_others_weights_bit_for_bit(reports):
    for report in (report["low precision"] for report in reports):
        assert report["left is known"] and report["right is known"]
        assert report["own is the model"]


def test_low_precision_moves_the_mean_by_its_rounding_only(reports):
    for report in (report["low precision"] for report in reports):
        for drift, bound in report["drift"]:
            assert drift <= bound + 1e-7
        for step in range(6):
            rounding, bound = report[f"rounding {step}"]
            assert 1e-8 < rounding <= bound + 1e-7
        first, *_, last = report["differences"]
        assert first > 1 and last < 0.1 * first
        assert report["hooks left"] == 0


def test_low_precision_sends_two_messages(reports):
    expected = 2 * (NUMBERS + 8)
    for report in (report["low precision"] for report in reports):
        assert report["bytes"] == pytest.approx(expected, rel=0.01)
        assert report["bytes in micro-batches"] == pytest.approx(expected, rel=0.01)


def test_shift_one_refuses_an_odd_number_of_ranks(monkeypatch):
    monkeypatch.setattr(decentralized_module, "num_ranks", lambda: 3)
    algorithm = Decentralized(peer_selection_mode="shift_one")
    assert "start 2 or 4 ranks" in user_error(lambda: algorithm.attach(mlp(), [], wrap))


@pytest.mark.parametrize(
    "algorithm",
    [
        Decentralized(),
        Decentralized(peer_selection_mode="shift_one"),
        LowPrecisionDecentralized(),
    ],
)
def test_one_process_alone_trains_as_without_it(algorithm):
    model, optimizer = attached(algorithm)
    before = vector(model)
    expected = before - LR * gradient(model, batch(0))
    loss(model, batch(0)).backward()
    optimizer.step()
    algorithm.close()
    assert max_difference(vector(model), expected) < 1e-7


def test_unknown_arguments_are_refused():
    message = user_error(lambda: Decentralized(peer_selection_mode="ring"))
    assert "'ring'" in message and "'all'" in message and "'shift_one'" in message
