"""A thread averages while the training goes on: the mean stays, local steps are kept, and the thread ends."""

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
    everywhere,
    gap,
    gradient,
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
from multigpu.comparison import of_a_sync
from multigpu.strategies.bagua.async_average import AsyncModelAverage

LR, STEPS = 0.1, 40


class Slow(torch.optim.SGD):
    """It reads the weights, takes its time, and writes one half, then the other: nothing must come in between."""

    def step(self, closure=None):
        old = [p.detach().clone() for p in self.param_groups[0]["params"]]
        time.sleep(0.01)
        for p, kept in zip(self.param_groups[0]["params"], old, strict=True):
            half, new = len(p) // 2, kept - self.param_groups[0]["lr"] * p.grad
            p.data[:half] = new[:half]
            time.sleep(0.005)
            p.data[half:] = new[half:]


def wait_for(algorithm: AsyncModelAverage, syncs: int) -> None:
    """All ranks wait until each has seen so many: none closes while another still counts."""
    until, deadline = algorithm.syncs + syncs, time.monotonic() + 60
    while algorithm.syncs < until and time.monotonic() < deadline:
        time.sleep(0.002)
    dist.barrier()


def standing(told: dict) -> None:
    """Nobody trains: a sync makes all the same, and keeps the mean."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = AsyncModelAverage(sync_interval_ms=5)
    algorithm.attach(model, [optimizer], wrap)
    told["spread at the start"] = spread(model)
    with algorithm.lock, torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape)
        before = everywhere(vector(model))
    wait_for(algorithm, 3)
    with algorithm.lock:
        after = vector(model)
    told["mean"], told["spreads"] = (
        gap(everywhere(after).mean(0), before.mean(0)),
        (gap(before[0], before[1]), spread(model)),
    )
    with algorithm.syncing:
        before = algorithm.syncs
        time.sleep(0.05)
        told["syncs while another has the place between two"] = algorithm.syncs - before
    told["bytes"] = of_a_sync(algorithm)
    wait_for(algorithm, 1)
    algorithm.close()
    algorithm.close()
    told["threads"] = [t.name for t in threading.enumerate() if t.name == "model average"]
    told["hooks left"] = len(optimizer._optimizer_step_pre_hooks)


def moving(told: dict, rank: int) -> None:
    """Each rank makes steps of a known length, at its own speed: all of them are in the mean in the end."""
    weights = nn.Parameter(torch.zeros(1000, dtype=torch.float64))
    model = nn.ParameterList([weights])
    optimizer = Slow([weights], lr=1.0)
    algorithm = AsyncModelAverage(sync_interval_ms=1)
    algorithm.attach(model, [optimizer], wrap)
    copy, told["torn"] = algorithm.weights.copy, 0.0

    def watched() -> list[
        torch.Tensor
    ]:  # all weights are the same number, before and after each step
        (snapshot,) = copy()
        told["torn"] = max(told["torn"], (snapshot.max() - snapshot.min()).item())
        return [snapshot]

    algorithm.weights.copy = watched
    for _ in range(STEPS):
        weights.grad = torch.full_like(weights, -1.0 - rank)
        optimizer.step()
        time.sleep(0.001 * rank)
    told["syncs"] = algorithm.syncs
    wait_for(algorithm, 2)
    algorithm.close()
    whole = everywhere(weights.detach())
    told["local steps"] = gap(
        whole.mean(0), torch.full_like(whole[0], STEPS * (1 + (len(whole) - 1) / 2))
    )
    told["spread when it ends"] = (whole.amax(0) - whole.amin(0)).max().item()


def warming_up(told: dict, ranks: int) -> None:
    """Three steps as DDP; after them DDP sends nothing."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = AsyncModelAverage(sync_interval_ms=10**6, warmup_steps=3)
    whole = algorithm.attach(model, [optimizer], wrap)
    reference = vector(model)
    for step in range(3):
        told["started too early"] = algorithm.thread is not None
        reference = reference - LR * gradient(mlp(), batch(step, ranks=ranks), at=reference)
        train(whole, optimizer, range(step, step + 1))
    told["warm-up"], told["warm-up's spread"] = gap(vector(model), reference), spread(model)
    own = vector(model)
    dist.barrier()
    train(whole, optimizer, range(3, 4))
    told["own step"] = gap(vector(model), own - LR * gradient(mlp(), mine(3), at=own))
    algorithm.interval = 0
    algorithm.close()


def failing(told: dict) -> None:
    """What goes wrong in the thread, and in a step, is not lost."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = AsyncModelAverage(sync_interval_ms=1)
    algorithm._sync = lambda: 1 / 0
    algorithm.attach(model, [optimizer], wrap)
    algorithm.thread.join()
    for what in (optimizer.step, algorithm.close):
        try:
            what()
        except RuntimeError as error:
            told[what.__name__] = repr(error.__cause__)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = AsyncModelAverage(sync_interval_ms=1)
    algorithm.attach(model, [optimizer], wrap)
    loss(model, mine(0)).backward()
    kept, model[0].weight.grad.data = (
        model[0].weight.grad.data,
        torch.zeros(3),
    )  # of the wrong shape: the step raises
    try:
        optimizer.step()
    except RuntimeError:
        told["raised"] = True
    model[0].weight.grad.data = kept
    optimizer.step()
    wait_for(algorithm, 2)
    told["syncs after a step that raised"] = algorithm.syncs
    algorithm.close()


def experiments() -> dict:
    rank, ranks = meet()
    told = {}
    standing(told)
    moving(told, rank)
    warming_up(told, ranks)
    failing(told)
    dist.destroy_process_group()
    return told


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    """What each rank tells of the experiments."""
    return launch.call(experiments, request.param)


def test_a_sync_keeps_the_mean_and_takes_the_spread(ranks):
    for told in ranks:
        assert told["spread at the start"] == 0
        before, after = told["spreads"]
        assert (
            told["mean"] < 5e-7 and before > 1 and after < 2e-6
        )  # weights up to 5: float32's digits, some syncs


def test_local_steps_are_kept_whenever_a_sync_comes(ranks):
    for told in ranks:
        assert told["syncs"] > 2 and told["local steps"] < 1e-9 and told["torn"] == 0
        assert (
            told["spread when it ends"] < 1e-9
        )  # of steps that differ by 40 between ranks and more


def test_a_sync_sends_what_a_ring_sends(ranks):
    n = len(ranks)
    for told in ranks:  # the vote is in it
        assert told["bytes"] == pytest.approx(8 * NUMBERS * (n - 1) / n, rel=0.02)


def test_who_takes_syncing_stands_between_two_syncs(ranks):
    for told in ranks:
        assert told["syncs while another has the place between two"] == 0


def test_a_count_that_is_asked_for_within_a_sync_has_no_half_of_it():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
    ):
        there, _ = server.accept()
        within, sending = threading.Event(), SimpleNamespace(syncs=0, syncing=threading.Lock())

        def syncs():
            for _ in range(10):
                with sending.syncing:
                    for _ in range(2):
                        here.sendall(bytes(500))
                        within.set()
                        time.sleep(0.02)
                    sending.syncs += 1
                time.sleep(0.005)

        sending.thread = threading.Thread(target=syncs)
        sending.thread.start()
        within.wait()
        assert of_a_sync(sending) == 1000
        sending.thread.join()
        there.close()


def test_it_ends(ranks):
    for told in ranks:
        assert told["threads"] == [] and told["hooks left"] == 0


def test_it_warms_up_as_ddp_and_then_each_is_on_its_own(ranks):
    for told in ranks:
        assert (
            told["warm-up"] < 1e-6
            and told["warm-up's spread"] == 0
            and not told["started too early"]
        )
        assert told["own step"] < 1e-6


def test_a_thread_that_fails_is_heard_and_a_step_that_raises_blocks_nobody(ranks):
    for told in ranks:
        assert "ZeroDivisionError" in told["step"] and "ZeroDivisionError" in told["close"]
        assert told["raised"] and told["syncs after a step that raised"] >= 2


def test_mistakes_are_told():
    assert "sync_interval_ms=-1" in refused(lambda: AsyncModelAverage(-1))


def test_one_process_alone_just_trains():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    algorithm = AsyncModelAverage()
    assert algorithm.attach(model, [optimizer], wrap) is model
    before = vector(model)
    expected = before - LR * gradient(model, batch(0))
    loss(model, batch(0)).backward()
    optimizer.step()
    algorithm.close()
    assert gap(vector(model), expected) < 1e-7 and algorithm.thread is None
