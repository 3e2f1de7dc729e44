"""The course's Horovod: the full batch's step whatever order autograd takes, and Horovod's interface. 2 and 4 ranks."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from ranked import (
    LR,
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
    train,
    user_error,
    vector,
)
from torch import nn

from multigpu import launch
from multigpu.strategies import horovod as hvd


def new(
    seed: int | None = 0, momentum: float = 0.9, **keywords
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp(seed)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=momentum)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **keywords)


def serial(steps: int, clip: float | None = None) -> list[torch.Tensor]:
    """torch's SGD with the whole batch: the weights after each step."""
    model, report = mlp(0), []
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, batch(step, ranks=hvd.size())).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        report.append(vector(model))
    return report


def equal_to_serial(report: dict) -> None:
    report["steps"] = []
    model, optimizer = new()
    for step, expected in enumerate(serial(5)):
        train(model, optimizer, range(step, step + 1))
        report["steps"].append(max_difference(vector(model), expected))
    report["difference"] = rank_difference(model)
    short, optimizer = new(compression=hvd.Compression.fp16)
    train(short, optimizer, range(5))
    report["fp16"], report["fp16's difference"] = (
        max_difference(vector(short), vector(model)),
        rank_difference(short),
    )

    model, optimizer = new(backward_passes_per_step=2)
    half = ROWS // 2
    for step in range(3):
        x, y = local_batch(step)
        (loss(model, (x[:half], y[:half])) / 2).backward()
        (loss(model, (x[half:], y[half:])) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    report["two passes"] = max_difference(vector(model), serial(3)[-1])
    loss(model, local_batch(3)).backward()  # the epoch ends with a step of one piece
    optimizer.step()
    report["one pass of two"] = max_difference(vector(model), serial(4)[-1])

    model, optimizer = new()
    for step in range(3):
        loss(model, local_batch(step)).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    report["clipped"] = max_difference(vector(model), serial(3, clip=0.01)[-1])


class Branches(nn.Module):
    """Its layers are used in an order of the caller's, so that autograd's order differs; the last may be left out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(100, 20) for _ in range(4))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for turn, number in enumerate(order):
            x = (
                torch.tanh(self.layers[number](x))
                if turn == 0
                else x + self.layers[number](x.repeat(1, 5))
            )
        return x


def orders(report: dict, rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    model, twin = Branches(), Branches()
    twin.load_state_dict(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), LR))
    own = [[0, 1, 2], [3, 2, 1], [2, 0, 1, 3], [1, 0]]
    for _ in range(3):
        model(local_batch(0)[0], own[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = torch.optim.SGD(twin.parameters(), LR)
    for _ in range(3):
        plain.zero_grad()
        for other in range(ranks):  # the mean over ranks, zeros where a rank has no gradient
            x, _ = batch(0, slice(ROWS * other, ROWS * (other + 1)), ranks)
            (twin(x, own[other]).square().mean() / ranks).backward()
        plain.step()
    report["orders"] = max_difference(vector(model), vector(twin))


def state(report: dict, rank: int) -> None:
    torch.manual_seed(rank)
    model, optimizer = new(seed=None)
    if rank == 0:  # as one that has read a checkpoint
        optimizer.state.update(
            {p: {"momentum_buffer": torch.full_like(p, 0.5)} for p in model.parameters()}
        )
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.zero_grad()
    report["difference before"] = rank_difference(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    report["difference after"] = rank_difference(model)
    report["momentum"] = {
        b["momentum_buffer"].unique().item() for b in optimizer.state.values()
    }
    report["lr"] = optimizer.param_groups[0]["lr"]
    with torch.no_grad():
        model[0].weight += rank
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    report["from rank 1"] = rank_difference(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, range(1))
    scheduler.step()
    report["scheduled"] = (
        optimizer.param_groups[0]["lr"],
        isinstance(optimizer, torch.optim.SGD),
        type(optimizer).__name__,
    )
    again, other = new()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors
    again.load_state_dict(model.state_dict())
    for each, its in ((model, optimizer), (again, other)):
        train(each, its, range(1, 3))
    report["loaded"] = max_difference(vector(model), vector(again))


def collectives(report: dict, rank: int) -> None:
    report["place"] = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
    own = torch.tensor([1.0, float(rank)])
    report["mean"], report["sum"] = (
        hvd.allreduce(own).tolist(),
        hvd.allreduce(own, average=False).tolist(),
    )
    report["gathered"] = hvd.allgather(torch.full((rank, 2), rank)).tolist()
    report["broadcast"], report["untouched"] = hvd.broadcast(own, 1).tolist(), own.tolist()
    report["integers"] = user_error(lambda: hvd.allreduce(torch.tensor([1])))


def mistakes(report: dict) -> None:
    model, optimizer = new()
    report["twice"] = user_error(lambda: hvd.DistributedOptimizer(optimizer))
    loss(model, local_batch(0)).backward()
    report["zero_grad"] = user_error(optimizer.zero_grad)
    report["second backward"] = user_error(lambda: loss(model, local_batch(0)).backward())
    optimizer.synchronize()  # the other ranks are report the same: all go on with a new model
    model, optimizer = new()
    loss(model, local_batch(0)).backward()
    with optimizer.skip_synchronize():
        report["skip"] = user_error(optimizer.step)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    report["again"] = [str(warning.message) for warning in caught]
    report["difference"] = rank_difference(model)
    layer = nn.Embedding(3, 2, sparse=True)
    sparse = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), LR))
    report["sparse"] = user_error(lambda: layer(torch.tensor([1])).sum().backward())
    del sparse


def experiments() -> dict:
    report = {
        "before init": user_error(hvd.size),
        "optimizer before init": user_error(lambda: new()),
    }
    hvd.init()
    hvd.init()  # nothing more to do
    torch.set_num_threads(1)
    rank, ranks = hvd.rank(), hvd.size()
    torch.manual_seed(rank)
    collectives(report, rank)
    equal_to_serial(report)
    orders(report, rank, ranks)
    state(report, rank)
    model, optimizer = new()
    report["bytes"] = bytes_per_step(lambda steps: train(model, optimizer, steps), 3)
    short, other = new(compression=hvd.Compression.fp16)
    report["fp16 bytes"] = bytes_per_step(lambda steps: train(short, other, steps), 3)
    report["mistakes"] = {}
    mistakes(report["mistakes"])
    loss(model, local_batch(0)).backward()
    expected = gather_ranks(gradient(model, local_batch(0))).mean(0)
    optimizer.synchronize()
    report["gradient"] = max_difference(
        torch.cat([p.grad.reshape(-1) for p in model.parameters()]), expected
    )
    hvd.shutdown()
    report["ended"] = dist.is_initialized()
    return report


@pytest.fixture(scope="module", params=[2, 4])
def reports(request):
    """What each rank tells of the experiments."""
    return launch.call(experiments, request.param)


def test_each_step_is_the_full_batchs(reports):
    for report in reports:
        assert (
            len(report["steps"]) == 5
            and max(report["steps"]) < 1e-6
            and report["difference"] == 0
        )
        assert report["gradient"] < 1e-7


def test_pieces_and_clipping_are_the_full_batchs_too(reports):
    for report in reports:
        assert (
            report["two passes"] < 1e-6
            and report["one pass of two"] < 1e-6
            and report["clipped"] < 1e-6
        )


def test_16_bits_are_nearly_it(reports):
    for report in reports:
        assert 0 < report["fp16"] < 1e-4 and report["fp16's difference"] == 0


def test_the_order_of_backward_may_differ_between_ranks(reports):
    for report in reports:
        assert report["orders"] < 1e-6


def test_it_sends_what_ddp_sends_and_half_of_it_in_16_bits(reports):
    n = len(reports)
    # Each of the 4 parameters is an all-reduce, on which gloo puts headers: 576 bytes with 2 reports, 1,682 with 4.
    for report in reports:
        assert report["bytes"] == pytest.approx(8 * NUMBERS * (n - 1) / n, abs=4 * 2000)
        assert report["fp16 bytes"] == pytest.approx(4 * NUMBERS * (n - 1) / n, abs=4 * 2000)


def test_one_rank_tells_the_others_its_weights_and_its_optimizers_state(reports):
    for report in reports:
        assert (
            report["difference before"] > 0
            and report["difference after"] == 0
            and report["from rank 1"] == 0
        )
        assert report["momentum"] == {0.5} and report["lr"] == 0.25


def test_it_still_is_the_users_optimizer(reports):
    for report in reports:
        assert report["scheduled"] == (0.125, True, "SGD") and report["loaded"] == 0


def test_collectives(reports):
    n = len(reports)
    for rank, report in enumerate(reports):
        assert tuple(report["place"]) == (rank, n, rank, n) and not report["ended"]
        assert report["mean"] == [1.0, (n - 1) / 2] and report["sum"] == [n, n * (n - 1) / 2]
        assert report["gathered"] == [[r, r] for r in range(n) for _ in range(r)]
        assert report["broadcast"] == [1.0, 1.0] and report["untouched"] == [1.0, rank]


def test_mistakes_are_told(reports):
    for report in reports:
        assert (
            "init()" in report["before init"] and "init()" in report["optimizer before init"]
        )
        assert "average=False" in report["integers"]
        mistaken = report["mistakes"]
        assert "already" in mistaken["twice"]
        assert "on their way" in mistaken["zero_grad"] and "own gradients" in mistaken["skip"]
        assert (
            "backward_passes_per_step" in mistaken["second backward"]
            and "sparse=False" in mistaken["sparse"]
        )
        assert (
            len(mistaken["again"]) == 1
            and "skip_synchronize" in mistaken["again"][0]
            and mistaken["difference"] == 0
        )


def test_one_process_alone_and_names_that_are_wrong(monkeypatch):
    monkeypatch.setattr(hvd, "_place", None)
    hvd.init()
    try:
        model, optimizer = new()
        train(model, optimizer, range(2))
        assert max_difference(vector(model), serial(2)[-1]) < 1e-7
        plain = torch.optim.SGD(model.parameters(), LR)
        named = list(model.named_parameters())
        assert "'0.weight' twice" in user_error(
            lambda: hvd.DistributedOptimizer(plain, [named[0], *named])
        )
        assert "leaves out 3" in user_error(lambda: hvd.DistributedOptimizer(plain, named[:1]))
        assert "it is 1 or more" in user_error(
            lambda: hvd.DistributedOptimizer(plain, backward_passes_per_step=0)
        )
    finally:
        hvd.shutdown()
