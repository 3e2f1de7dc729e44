"""QAdam is Adam in the warm-up; then momenta are sent as bytes, and the variance is frozen.

With 2 and with 4 ranks.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from ranked import (
    NUMBERS,
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
    wrap,
)
from refusals import user_error
from torch import nn

from multigpu import launch
from multigpu.strategies.bagua.qadam import QAdam, QAdamOptimizer

pytestmark = pytest.mark.slow

# In float64: Adam divides by the root of the variance, which magnifies float32's rounding
# where a gradient is small.
F64 = torch.float64
WARMUP = 4
DECAY = 0.01


def new(warmup: int = WARMUP, dtype: torch.dtype = F64, how=wrap) -> tuple:
    model = mlp(0, dtype)
    optimizer = QAdamOptimizer(
        model.parameters(), lr=1e-3, weight_decay=DECAY, warmup_steps=warmup
    )
    return QAdam().attach(model, [optimizer], how), optimizer


def state_vector(optimizer: torch.optim.Optimizer, name: str) -> torch.Tensor:
    """One entry of the optimizer's state, of all parameters, as one vector."""
    parameters = optimizer.param_groups[0]["params"]
    return torch.cat([optimizer.state[p][name].reshape(-1) for p in parameters])


def adam(steps: int, ranks: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """torch's Adam with the whole batch: the weights after each step, and the variance."""
    model = mlp(0, F64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=DECAY)
    weights = []
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, batch(step, ranks=ranks, dtype=F64)).backward()
        optimizer.step()
        weights.append(vector(model))
    return weights, state_vector(optimizer, "exp_avg_sq")


def warming_up(report: dict, ranks: int) -> None:
    """Against torch's Adam, in each step."""
    model, optimizer = new()
    expected, variance = adam(WARMUP, ranks)
    report["to Adam"] = []
    for step in range(WARMUP):
        train(model, optimizer, range(step, step + 1), F64)
        report["to Adam"].append(max_difference(vector(model), expected[step]))
    difference = max_difference(state_vector(optimizer, "exp_avg_sq"), variance)
    report["variance to Adam"] = difference / variance.max().item()


def after_the_warmup(report: dict) -> None:
    """Each step against the definition, from this rank's state and all ranks' gradients."""
    model, optimizer = new(how=small_buckets)
    train(model, optimizer, range(WARMUP), F64)
    variance = state_vector(optimizer, "exp_avg_sq").clone()
    reference = mlp(0, F64)
    report["later"] = []
    denominator = variance.sqrt() / (1 - 0.999**WARMUP) ** 0.5 + 1e-8
    for step in range(WARMUP, WARMUP + 6):
        before = vector(model)
        old = state_vector(optimizer, "exp_avg").clone()
        decayed = gradient(reference, local_batch(step, F64), at=before) + DECAY * before
        whole = gather_ranks(0.9 * old + 0.1 * decayed)
        mean = whole.mean(0)
        ranges = whole.amax(1) - whole.amin(1)
        train(model, optimizer, range(step, step + 1), F64)
        momentum = state_vector(optimizer, "exp_avg")
        expected = before - 1e-3 * momentum / (1 - 0.9 ** (step + 1)) / denominator
        new_variance = state_vector(optimizer, "exp_avg_sq")
        report["later"].append(
            {
                "momentum": max_difference(momentum, mean),
                "bound": (ranges.mean() + mean.max() - mean.min()).item() / 510,
                "variance": max_difference(new_variance, variance),
                "step": max_difference(vector(model), expected),
                "difference": rank_difference(model),
            }
        )


def resumed(report: dict) -> None:
    """Interrupted after 2 and after 6 steps, and continued by a new optimizer."""
    model, optimizer = new()
    saved = {}
    for step in range(8):
        if step in (2, 6):
            saved[step] = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
        train(model, optimizer, range(step, step + 1), F64)
    for step, (weights, state) in saved.items():
        # The settings are loaded with the state, as by torch's optimizers.
        again, other = new(warmup=50)
        # DDP sorts its buckets anew after its first step, and the rounding of a number depends
        # on its neighbours in the chunk: only equal buckets give equal bits.
        train(again, other, range(1), F64)
        again.module.load_state_dict(weights)
        other.load_state_dict(state)
        train(again, other, range(step, 8), F64)
        report[f"resumed after {step}"] = max_difference(vector(model), vector(again))


def micro_batches(report: dict) -> None:
    """Two backwards per step or one, through the end of the warm-up."""
    whole, one = new()
    cut, two = new()
    for step in range(WARMUP + 2):
        train(whole, one, range(step, step + 1), F64)
        train_in_micro_batches(cut, two, range(step, step + 1), F64)
    report["micro-batches"] = max_difference(vector(whole), vector(cut))
    report["steps"] = two.param_groups[0]["steps"]
    loss(cut, local_batch(0, F64)).backward()
    # The step is skipped.
    two.zero_grad()
    loss(cut, local_batch(0, F64)).backward()
    report["second backward"] = user_error(lambda: loss(cut, local_batch(0, F64)).backward())


def sent_bytes(report: dict) -> None:
    for name, warmup in (("bytes in the warm-up", 10**6), ("bytes", 2)):
        model, optimizer = new(warmup, torch.float32)
        train(model, optimizer, range(3))
        report[name] = bytes_per_step(
            lambda steps, m=model, o=optimizer: train(m, o, steps), 3
        )
    report["bytes in micro-batches"] = bytes_per_step(
        lambda steps: train_in_micro_batches(model, optimizer, steps), 3
    )


def experiments() -> dict:
    _, ranks = start_gloo()
    report = {}
    warming_up(report, ranks)
    resumed(report)
    micro_batches(report)
    sent_bytes(report)
    after_the_warmup(report)
    dist.destroy_process_group()
    return report


@pytest.fixture(scope="module", params=[2, 4])
def reports(request):
    """Each rank's report of the experiments."""
    return launch.call(experiments, request.param)


def test_it_is_adam_through_the_last_step_of_the_warmup(reports):
    for report in reports:
        assert len(report["to Adam"]) == WARMUP and max(report["to Adam"]) < 1e-7
        # Step W's gradient is included.
        assert report["variance to Adam"] < 1e-7


def test_after_it_the_variance_and_its_correction_stay(reports):
    for report in reports:
        for later in report["later"]:
            assert later["variance"] == 0 and later["step"] < 1e-12


def test_the_momentum_is_the_mean_of_the_ranks_own(reports):
    for report in reports:
        for later in report["later"]:
            # The numbers are float64, the message's header float32: slightly above the bound.
            assert 0 < later["momentum"] <= later["bound"] * 1.001 and later["difference"] == 0


def test_a_resumed_run_gives_the_same_bits(reports):
    for report in reports:
        assert report["resumed after 2"] == report["resumed after 6"] == 0


def test_micro_batches_are_one_step(reports):
    for report in reports:
        # A sum's last digit can change one level of a byte: by lr times a 255th of the
        # momentum.
        assert report["micro-batches"] < 1e-4 and report["steps"] == WARMUP + 2
        assert "no_sync" in report["second backward"]


def test_it_sends_floats_then_bytes(reports):
    n = len(reports)
    for report in reports:
        assert report["bytes in the warm-up"] == pytest.approx(
            8 * NUMBERS * (n - 1) / n, rel=0.01
        )
        expected = 2 * (n - 1) * (NUMBERS / n + 8)
        assert report["bytes"] == pytest.approx(expected, rel=0.02)
        assert report["bytes in micro-batches"] == pytest.approx(expected, rel=0.02)


def test_the_optimizer_needs_no_ranks():
    model = mlp(0)
    optimizer = QAdamOptimizer(model.parameters(), warmup_steps=2)
    assert sum(p.numel() for p in model.parameters()) == NUMBERS
    for step in range(4):
        loss(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            kept = state_vector(optimizer, "exp_avg_sq").clone()
    assert torch.equal(state_vector(optimizer, "exp_avg_sq"), kept)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_one_rank_alone_rounds_nothing():
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


def test_wrong_arguments_are_refused():
    model = nn.Linear(2, 2)
    own = QAdamOptimizer(model.parameters())
    sgd = torch.optim.SGD(model.parameters(), 0.1)
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


def test_a_gradient_scaler_and_a_late_parameter_are_refused():
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
