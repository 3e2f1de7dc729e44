"""A thread averages while training goes on: the mean and local steps stay, the thread ends."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranked import (
    NUMBERS,
    batch,
    gather_ranks,
    gradient,
    local_batch,
    loss,
    max_difference,
    mlp,
    rank_difference,
    start_gloo,
    vector,
    wrap,
)
from refusals import user_error
from torch import nn

from multigpu import launch
from multigpu.strategies.bagua.async_average import AsyncModelAverage

LR = 0.1
STEPS = 40


class Slow(torch.optim.SGD):
    """It reads the weights, waits, and writes one half, then the other.

    A round in between would tear the weights apart, or be overwritten.
    """

    def step(self, closure=None):
        old = [p.detach().clone() for p in self.param_groups[0]["params"]]
        time.sleep(0.01)
        for p, kept in zip(self.param_groups[0]["params"], old, strict=True):
            half = len(p) // 2
            new = kept - self.param_groups[0]["lr"] * p.grad
            p.data[:half] = new[:half]
            time.sleep(0.005)
            p.data[half:] = new[half:]


def wait_for(algorithm: AsyncModelAverage, rounds: int) -> None:
    """Wait until each rank has counted as many further rounds; no rank goes on before."""
    until = algorithm.averaging_rounds + rounds
    deadline = time.monotonic() + 60
    while algorithm.averaging_rounds < until and time.monotonic() < deadline:
        time.sleep(0.002)
    dist.barrier()


def standing_still(report: dict) -> None:
    """No rank trains: a round makes all ranks equal, and keeps the mean."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = AsyncModelAverage(sync_interval_ms=5)
    algorithm.attach(model, [optimizer], wrap)
    report["difference at the start"] = rank_difference(model)
    with algorithm.weights_lock, torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape)
        before = gather_ranks(vector(model))
    wait_for(algorithm, 3)
    with algorithm.weights_lock:
        after = vector(model)
    report["mean"] = max_difference(gather_ranks(after).mean(0), before.mean(0))
    report["difference before"] = max_difference(before[0], before[1])
    report["difference after"] = rank_difference(model)
    with algorithm.round_lock:
        count = algorithm.averaging_rounds
        time.sleep(0.05)
        report["rounds while the lock is held"] = algorithm.averaging_rounds - count
    report["bytes"] = AsyncModelAverage.bytes_per_round(algorithm)
    wait_for(algorithm, 1)
    algorithm.close()
    algorithm.close()
    report["threads"] = [t.name for t in threading.enumerate() if t.name == "model average"]
    report["hooks left"] = len(optimizer._optimizer_step_pre_hooks)


def moving(report: dict, rank: int) -> None:
    """Each rank makes known steps at its own speed: the final mean contains all of them."""
    weights = nn.Parameter(torch.zeros(1000, dtype=torch.float64))
    model = nn.ParameterList([weights])
    optimizer = Slow([weights], lr=1.0)
    algorithm = AsyncModelAverage(sync_interval_ms=1)
    algorithm.attach(model, [optimizer], wrap)
    copy = algorithm.weights.copy
    report["torn"] = 0.0

    def checked_copy() -> list[torch.Tensor]:
        # All weights are the same number before and after each step.
        (snapshot,) = copy()
        report["torn"] = max(report["torn"], (snapshot.max() - snapshot.min()).item())
        return [snapshot]

    algorithm.weights.copy = checked_copy
    for _ in range(STEPS):
        weights.grad = torch.full_like(weights, -1.0 - rank)
        optimizer.step()
        time.sleep(0.001 * rank)
    report["rounds"] = algorithm.averaging_rounds
    wait_for(algorithm, 2)
    algorithm.close()
    whole = gather_ranks(weights.detach())
    expected = torch.full_like(whole[0], STEPS * (1 + (len(whole) - 1) / 2))
    report["local steps"] = max_difference(whole.mean(0), expected)
    report["difference at the end"] = (whole.amax(0) - whole.amin(0)).max().item()


def between_forward_and_backward(report: dict) -> None:
    """The ranks' weights differ, and rounds are due: none comes in before the backward."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = AsyncModelAverage(sync_interval_ms=1)
    algorithm.attach(model, [optimizer], wrap)
    dist.barrier()
    error = loss(model, local_batch(0))
    with torch.no_grad():
        for p in model.parameters():
            p.data += torch.randn(p.shape)  # outside autograd, as a round would
    before = vector(model)
    rounds = algorithm.averaging_rounds
    time.sleep(0.1)
    report["changed before the backward"] = max_difference(vector(model), before)
    report["rounds before the backward"] = algorithm.averaging_rounds - rounds
    error.backward()
    wait_for(algorithm, 2)
    report["changed after it"] = max_difference(vector(model), before)
    algorithm.close()


def failing(report: dict) -> None:
    """An error in the thread is raised; after an error in a step the rounds go on."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = AsyncModelAverage(sync_interval_ms=1)
    algorithm._average = lambda: 1 / 0
    algorithm.attach(model, [optimizer], wrap)
    algorithm.thread.join()
    for function in (optimizer.step, algorithm.close):
        try:
            function()
        except RuntimeError as error:
            report[function.__name__] = repr(error.__cause__)
    del algorithm._average
    algorithm.attach(model, [optimizer], wrap)
    optimizer.step()
    wait_for(algorithm, 1)
    report["rounds of the next run"] = algorithm.averaging_rounds
    algorithm.close()

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = AsyncModelAverage(sync_interval_ms=1)
    algorithm.attach(model, [optimizer], wrap)
    loss(model, local_batch(0)).backward()
    gradient_of_weight = model[0].weight.grad
    right = gradient_of_weight.data
    # A gradient of the wrong shape: the step raises an error.
    gradient_of_weight.data = torch.zeros(3)
    try:
        optimizer.step()
    except RuntimeError:
        report["raised"] = True
    gradient_of_weight.data = right
    optimizer.step()
    wait_for(algorithm, 2)
    report["rounds after a step that raised"] = algorithm.averaging_rounds
    algorithm.close()


def experiments() -> dict:
    rank, _ = start_gloo()
    report = {}
    standing_still(report)
    moving(report, rank)
    between_forward_and_backward(report)
    failing(report)
    dist.destroy_process_group()
    return report


@pytest.fixture(scope="module", params=[2, 4])
def reports(request):
    """Each rank's report of the experiments."""
    return launch.call(experiments, request.param)


def test_a_round_keeps_the_mean_and_makes_the_ranks_equal(reports):
    for report in reports:
        assert report["difference at the start"] == 0
        assert report["difference before"] > 1
        # Weights up to 5, a few rounds: float32's last digits.
        assert report["mean"] < 5e-7 and report["difference after"] < 2e-6


def test_local_steps_are_kept_whenever_a_round_comes(reports):
    for report in reports:
        assert report["rounds"] > 2 and report["local steps"] < 1e-9 and report["torn"] == 0
        # The ranks' own steps differ by at least 40.
        assert report["difference at the end"] < 1e-9


def test_the_weights_do_not_change_between_a_forward_and_its_backward(reports):
    for report in reports:
        assert report["changed before the backward"] == 0
        assert report["rounds before the backward"] <= 1  # which began before the forward
        assert report["changed after it"] > 0.1


def test_a_round_sends_what_a_ring_sends(reports):
    n = len(reports)
    for report in reports:
        # The vote is included.
        assert report["bytes"] == pytest.approx(8 * NUMBERS * (n - 1) / n, rel=0.02)


def test_no_round_runs_while_the_round_lock_is_held(reports):
    for report in reports:
        assert report["rounds while the lock is held"] == 0


def test_a_count_that_begins_within_a_round_contains_whole_rounds():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        accepted, _ = server.accept()
        within_round = threading.Event()
        algorithm = SimpleNamespace(averaging_rounds=0, round_lock=threading.Lock())

        def rounds():
            for _ in range(10):
                with algorithm.round_lock:
                    for _ in range(2):
                        client.sendall(bytes(500))
                        within_round.set()
                        time.sleep(0.02)
                    algorithm.averaging_rounds += 1
                time.sleep(0.005)

        algorithm.thread = threading.Thread(target=rounds)
        algorithm.thread.start()
        within_round.wait()
        assert AsyncModelAverage.bytes_per_round(algorithm) == 1000
        algorithm.thread.join()
        accepted.close()


def test_the_thread_and_the_hooks_end(reports):
    for report in reports:
        assert report["threads"] == [] and report["hooks left"] == 0


def test_a_failed_thread_is_reported_and_a_failed_step_blocks_no_rank(reports):
    """The next run with the same algorithm does not report the earlier failure."""
    for report in reports:
        assert "ZeroDivisionError" in report["step"] and "ZeroDivisionError" in report["close"]
        assert report["rounds of the next run"] >= 1
        assert report["raised"] and report["rounds after a step that raised"] >= 2


def test_an_interval_that_never_averages_is_refused():
    assert "sync_interval_ms is 0" in user_error(lambda: AsyncModelAverage(0))


def test_one_process_alone_trains_as_without_it():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = AsyncModelAverage()
    assert algorithm.attach(model, [optimizer], wrap) is model
    before = vector(model)
    expected = before - LR * gradient(model, batch(0))
    loss(model, batch(0)).backward()
    optimizer.step()
    algorithm.close()
    assert max_difference(vector(model), expected) < 1e-7 and algorithm.thread is None
