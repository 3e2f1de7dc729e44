"""QAdam is Adam while it warms up; then momenta travel as bytes, and the variance stays. With 2 and with 4 ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranked import (
    NUMBERS,
    ROWS,
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
    step_in_micro_batches,
    train,
    user_error,
    vector,
    wrap,
)
from torch import nn

from multigpu import launch
from multigpu.strategies.bagua.qadam import QAdam, QAdamOptimizer

# In float64: Adam divides by the root of the variance, which makes much of float32's last digit where a gradient is small.
F64 = torch.float64
WARMUP, DECAY = 4, 0.01


def new(warmup: int = WARMUP, dtype: torch.dtype = F64, how=wrap) -> tuple:
    model = mlp(0, dtype)
    optimizer = QAdamOptimizer(
        model.parameters(), lr=1e-3, weight_decay=DECAY, warmup_steps=warmup
    )
    return QAdam().attach(model, [optimizer], how), optimizer


def of(optimizer: QAdamOptimizer, name: str) -> torch.Tensor:
    return torch.cat(
        [optimizer.state[p][name].reshape(-1) for p in optimizer.param_groups[0]["params"]]
    )


def adam(steps: int, ranks: int) -> list[torch.Tensor]:
    """torch's own, one process with the whole batch: the weights after each step, and the variances at the end."""
    model = mlp(0, F64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=DECAY)
    report = []
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, batch(step, ranks=ranks, dtype=F64)).backward()
        optimizer.step()
        report.append(vector(model))
    return [*report, of(optimizer, "exp_avg_sq")]


def after_the_warmup(report: dict) -> None:
    """Each step against what the definition says, from this rank's state, and all ranks' gradients."""
    model, optimizer = new(how=small_buckets)
    train(model, optimizer, range(WARMUP), F64)
    variance, reference, report["later"] = of(optimizer, "exp_avg_sq").clone(), mlp(0, F64), []
    denominator = variance.sqrt() / (1 - 0.999**WARMUP) ** 0.5 + 1e-8
    for step in range(WARMUP, WARMUP + 6):
        before, old = vector(model), of(optimizer, "exp_avg").clone()
        wanted = 0.9 * old + 0.1 * (
            gradient(reference, local_batch(step, F64), at=before) + DECAY * before
        )
        whole = gather_ranks(wanted)
        mean = whole.mean(0)
        train(model, optimizer, range(step, step + 1), F64)
        momentum = of(optimizer, "exp_avg")
        report["later"].append(
            {
                "momentum": max_difference(momentum, mean),
                "bound": (
                    (whole.amax(1) - whole.amin(1)).mean() + mean.max() - mean.min()
                ).item()
                / 510,
                "variance": max_difference(of(optimizer, "exp_avg_sq"), variance),
                "step": max_difference(
                    vector(model),
                    before - 1e-3 * momentum / (1 - 0.9 ** (step + 1)) / denominator,
                ),
                "difference": rank_difference(model),
            }
        )


def resumed(report: dict) -> None:
    """Interrupted after 2 and after 6 steps, and taken up by a new optimizer."""
    model, optimizer = new()
    kept = {}
    for step in range(8):
        if step in (2, 6):
            kept[step] = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
        train(model, optimizer, range(step, step + 1), F64)
    for at, (weights, state) in kept.items():
        again, other = new(
            warmup=50
        )  # the settings come with the state, as torch's optimizers do it
        # DDP sorts its buckets anew after its first step, and a chunk of other neighbours is rounded differently: a run that
        # goes on is the same to the bit only with the same buckets.
        train(again, other, range(1), F64)
        again.module.load_state_dict(weights)
        other.load_state_dict(state)
        train(again, other, range(at, 8), F64)
        report[f"resumed after {at}"] = max_difference(vector(model), vector(again))


def pieces(report: dict, ranks: int) -> None:
    """Two backwards a step, through the end of the warm-up, with and without."""
    whole, one = new()
    cut, two = new()
    for step in range(WARMUP + 2):
        train(whole, one, range(step, step + 1), F64)
        x, y = local_batch(step, F64)
        with cut.no_sync():
            (loss(cut, (x[: ROWS // 2], y[: ROWS // 2])) / 2).backward()
        (loss(cut, (x[ROWS // 2 :], y[ROWS // 2 :])) / 2).backward()
        two.step()
        two.zero_grad()
    report["pieces"] = max_difference(vector(whole), vector(cut))
    report["steps"] = two.param_groups[0]["steps"]
    loss(cut, local_batch(0, F64)).backward()
    two.zero_grad()  # a step given up
    loss(cut, local_batch(0, F64)).backward()
    report["twice"] = user_error(lambda: loss(cut, local_batch(0, F64)).backward())


def experiments() -> dict:
    _, ranks = start_gloo()
    report = {}
    model, optimizer = new()
    *expected, variance = adam(WARMUP, ranks)
    report["to Adam"] = []
    for step in range(WARMUP):
        train(model, optimizer, range(step, step + 1), F64)
        report["to Adam"].append(max_difference(vector(model), expected[step]))
    report["variance to Adam"] = (
        max_difference(of(optimizer, "exp_avg_sq"), variance) / variance.max().item()
    )
    resumed(report)
    pieces(report, ranks)
    for name, warmup in (("warm-up", 10**6), ("bytes", 2)):
        model, optimizer = new(warmup, torch.float32)
        train(model, optimizer, range(3))
        report[name] = bytes_per_step(
            lambda steps, m=model, o=optimizer: train(m, o, steps), 3
        )
    report["bytes in pieces"] = bytes_per_step(
        lambda steps: (
            [step_in_micro_batches(model, optimizer, step) for step in steps] and None
        ),
        3,
    )
    after_the_warmup(report)
    dist.destroy_process_group()
    return report


@pytest.fixture(scope="module", params=[2, 4])
def reports(request):
    """What each rank tells of the experiments."""
    return launch.call(experiments, request.param)


def test_it_is_adam_up_to_and_with_the_last_step_of_the_warmup(reports):
    for report in reports:
        assert len(report["to Adam"]) == WARMUP and max(report["to Adam"]) < 1e-7
        assert report["variance to Adam"] < 1e-7  # step W's gradient is in it


def test_then_the_variance_and_its_correction_stay(reports):
    for report in reports:
        for later in report["later"]:
            assert later["variance"] == 0 and later["step"] < 1e-12


def test_the_momentum_is_the_mean_of_the_ranks_own(reports):
    for report in reports:
        for later in report["later"]:
            # float64's numbers, and a header in float32: a little on top of the bound
            assert 0 < later["momentum"] <= later["bound"] * 1.001 and later["difference"] == 0


def test_it_goes_on_where_it_stopped(reports):
    for report in reports:
        assert report["resumed after 2"] == report["resumed after 6"] == 0


def test_pieces_are_one_step(reports):
    for report in reports:
        # one level of the bytes can flip with the last digit of a sum: 1e-3, the step, times a 255th of the momentum
        assert report["pieces"] < 1e-4 and report["steps"] == WARMUP + 2
        assert "no_sync" in report["twice"]


def test_it_sends_floats_then_bytes(reports):
    n = len(reports)
    for report in reports:
        assert report["warm-up"] == pytest.approx(8 * NUMBERS * (n - 1) / n, rel=0.01)
        expected = 2 * (n - 1) * (NUMBERS / n + 8)
        assert report["bytes"] == pytest.approx(expected, rel=0.02)
        assert report["bytes in pieces"] == pytest.approx(expected, rel=0.02)


def test_alone_it_needs_no_ranks():
    model = mlp(0)
    optimizer = QAdamOptimizer(model.parameters(), warmup_steps=2)
    assert sum(p.numel() for p in model.parameters()) == NUMBERS
    for step in range(4):
        loss(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            kept = of(optimizer, "exp_avg_sq").clone()
    assert torch.equal(of(optimizer, "exp_avg_sq"), kept)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_one_rank_alone_sends_nothing_and_rounds_nothing():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, optimizer = new(warmup=1)
        train(model, optimizer, range(3), F64)
        plain = mlp(0, F64)
        other = QAdamOptimizer(plain.parameters(), lr=1e-3, weight_decay=DECAY, warmup_steps=1)
        train(plain, other, range(3), F64)
        assert max_difference(vector(model), vector(plain)) < 1e-12
    finally:
        dist.destroy_process_group()


def test_mistakes_are_told():
    model = nn.Linear(2, 2)
    own, sgd = QAdamOptimizer(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
    assert "was given: SGD" in user_error(lambda: QAdam().attach(model, [sgd], wrap))
    assert "QAdamOptimizer, QAdamOptimizer" in user_error(
        lambda: QAdam().attach(model, [own, own], wrap)
    )
    assert "none" in user_error(lambda: QAdam().attach(model, [], wrap))
    assert "at least one step" in user_error(
        lambda: QAdamOptimizer(model.parameters(), warmup_steps=0)
    )
    assert "betas" in user_error(lambda: QAdamOptimizer(model.parameters(), betas=(0.9, 1.0)))
    groups = [{"params": [model.weight]}, {"params": [model.bias], "warmup_steps": 3}]
    assert "[3, 100]" in user_error(lambda: QAdamOptimizer(groups).step())


def test_a_scaler_is_refused_and_so_is_a_parameter_that_comes_late():
    model = nn.Linear(2, 2)
    optimizer = QAdamOptimizer(model.parameters(), warmup_steps=1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    assert "bfloat16" in user_error(lambda: scaler.step(optimizer))
    optimizer = QAdamOptimizer(model.parameters(), warmup_steps=1)
    model.bias.grad = None
    optimizer.step()
    model(torch.ones(1, 2)).sum().backward()
    assert "first gradient after the warm-up" in user_error(optimizer.step)
