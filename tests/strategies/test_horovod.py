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
    bytes_a_step,
    everywhere,
    gap,
    gradient,
    loss,
    mine,
    mlp,
    refused,
    spread,
    train,
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
    model, told = mlp(0), []
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, batch(step, ranks=hvd.size())).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        told.append(vector(model))
    return told


def equal_to_serial(told: dict) -> None:
    told["steps"] = []
    model, optimizer = new()
    for step, expected in enumerate(serial(5)):
        train(model, optimizer, range(step, step + 1))
        told["steps"].append(gap(vector(model), expected))
    told["spread"] = spread(model)
    short, optimizer = new(compression=hvd.Compression.fp16)
    train(short, optimizer, range(5))
    told["fp16"], told["fp16's spread"] = gap(vector(short), vector(model)), spread(short)

    model, optimizer = new(backward_passes_per_step=2)
    half = ROWS // 2
    for step in range(3):
        x, y = mine(step)
        (loss(model, (x[:half], y[:half])) / 2).backward()
        (loss(model, (x[half:], y[half:])) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    told["two passes"] = gap(vector(model), serial(3)[-1])
    loss(model, mine(3)).backward()  # the epoch ends with a step of one piece
    optimizer.step()
    told["one pass of two"] = gap(vector(model), serial(4)[-1])

    model, optimizer = new()
    for step in range(3):
        loss(model, mine(step)).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    told["clipped"] = gap(vector(model), serial(3, clip=0.01)[-1])


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


def orders(told: dict, rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    model, twin = Branches(), Branches()
    twin.load_state_dict(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), LR))
    mine_ = [[0, 1, 2], [3, 2, 1], [2, 0, 1, 3], [1, 0]]
    for _ in range(3):
        model(mine(0)[0], mine_[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = torch.optim.SGD(twin.parameters(), LR)
    for _ in range(3):
        plain.zero_grad()
        for other in range(ranks):  # the mean over ranks, zeros where a rank has no gradient
            x, _ = batch(0, slice(ROWS * other, ROWS * (other + 1)), ranks)
            (twin(x, mine_[other]).square().mean() / ranks).backward()
        plain.step()
    told["orders"] = gap(vector(model), vector(twin))


def state(told: dict, rank: int) -> None:
    torch.manual_seed(rank)
    model, optimizer = new(seed=None)
    if rank == 0:  # as one that has read a checkpoint
        optimizer.state.update(
            {p: {"momentum_buffer": torch.full_like(p, 0.5)} for p in model.parameters()}
        )
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.zero_grad()
    told["spread before"] = spread(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    told["spread after"] = spread(model)
    told["momentum"] = {b["momentum_buffer"].unique().item() for b in optimizer.state.values()}
    told["lr"] = optimizer.param_groups[0]["lr"]
    with torch.no_grad():
        model[0].weight += rank
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    told["from rank 1"] = spread(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, range(1))
    scheduler.step()
    told["scheduled"] = (
        optimizer.param_groups[0]["lr"],
        isinstance(optimizer, torch.optim.SGD),
        type(optimizer).__name__,
    )
    again, other = new()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors
    again.load_state_dict(model.state_dict())
    for each, its in ((model, optimizer), (again, other)):
        train(each, its, range(1, 3))
    told["loaded"] = gap(vector(model), vector(again))


def collectives(told: dict, rank: int) -> None:
    told["place"] = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
    own = torch.tensor([1.0, float(rank)])
    told["mean"], told["sum"] = (
        hvd.allreduce(own).tolist(),
        hvd.allreduce(own, average=False).tolist(),
    )
    told["gathered"] = hvd.allgather(torch.full((rank, 2), rank)).tolist()
    told["broadcast"], told["untouched"] = hvd.broadcast(own, 1).tolist(), own.tolist()
    told["integers"] = refused(lambda: hvd.allreduce(torch.tensor([1])))


def mistakes(told: dict) -> None:
    model, optimizer = new()
    told["twice"] = refused(lambda: hvd.DistributedOptimizer(optimizer))
    loss(model, mine(0)).backward()
    told["zero_grad"] = refused(optimizer.zero_grad)
    told["second backward"] = refused(lambda: loss(model, mine(0)).backward())
    optimizer.synchronize()  # the other ranks are told the same: all go on with a new model
    model, optimizer = new()
    loss(model, mine(0)).backward()
    with optimizer.skip_synchronize():
        told["skip"] = refused(optimizer.step)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    told["again"] = [str(warning.message) for warning in caught]
    told["spread"] = spread(model)
    layer = nn.Embedding(3, 2, sparse=True)
    sparse = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), LR))
    told["sparse"] = refused(lambda: layer(torch.tensor([1])).sum().backward())
    del sparse


def experiments() -> dict:
    told = {"before init": refused(hvd.size), "optimizer before init": refused(lambda: new())}
    hvd.init()
    hvd.init()  # nothing more to do
    torch.set_num_threads(1)
    rank, ranks = hvd.rank(), hvd.size()
    torch.manual_seed(rank)
    collectives(told, rank)
    equal_to_serial(told)
    orders(told, rank, ranks)
    state(told, rank)
    model, optimizer = new()
    told["bytes"] = bytes_a_step(lambda steps: train(model, optimizer, steps), 3)
    short, other = new(compression=hvd.Compression.fp16)
    told["fp16 bytes"] = bytes_a_step(lambda steps: train(short, other, steps), 3)
    told["mistakes"] = {}
    mistakes(told["mistakes"])
    loss(model, mine(0)).backward()
    expected = everywhere(gradient(model, mine(0))).mean(0)
    optimizer.synchronize()
    told["gradient"] = gap(
        torch.cat([p.grad.reshape(-1) for p in model.parameters()]), expected
    )
    hvd.shutdown()
    told["ended"] = dist.is_initialized()
    return told


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    """What each rank tells of the experiments."""
    return launch.call(experiments, request.param)


def test_each_step_is_the_full_batchs(ranks):
    for told in ranks:
        assert len(told["steps"]) == 5 and max(told["steps"]) < 1e-6 and told["spread"] == 0
        assert told["gradient"] < 1e-7


def test_pieces_and_clipping_are_the_full_batchs_too(ranks):
    for told in ranks:
        assert (
            told["two passes"] < 1e-6
            and told["one pass of two"] < 1e-6
            and told["clipped"] < 1e-6
        )


def test_16_bits_are_nearly_it(ranks):
    for told in ranks:
        assert 0 < told["fp16"] < 1e-4 and told["fp16's spread"] == 0


def test_the_order_of_backward_may_differ_between_ranks(ranks):
    for told in ranks:
        assert told["orders"] < 1e-6


def test_it_sends_what_ddp_sends_and_half_of_it_in_16_bits(ranks):
    n = len(ranks)
    # Each of the 4 parameters is an all-reduce, on which gloo puts headers: 576 bytes with 2 ranks, 1,682 with 4.
    for told in ranks:
        assert told["bytes"] == pytest.approx(8 * NUMBERS * (n - 1) / n, abs=4 * 2000)
        assert told["fp16 bytes"] == pytest.approx(4 * NUMBERS * (n - 1) / n, abs=4 * 2000)


def test_one_rank_tells_the_others_its_weights_and_its_optimizers_state(ranks):
    for told in ranks:
        assert (
            told["spread before"] > 0
            and told["spread after"] == 0
            and told["from rank 1"] == 0
        )
        assert told["momentum"] == {0.5} and told["lr"] == 0.25


def test_it_still_is_the_users_optimizer(ranks):
    for told in ranks:
        assert told["scheduled"] == (0.125, True, "SGD") and told["loaded"] == 0


def test_collectives(ranks):
    n = len(ranks)
    for rank, told in enumerate(ranks):
        assert tuple(told["place"]) == (rank, n, rank, n) and not told["ended"]
        assert told["mean"] == [1.0, (n - 1) / 2] and told["sum"] == [n, n * (n - 1) / 2]
        assert told["gathered"] == [[r, r] for r in range(n) for _ in range(r)]
        assert told["broadcast"] == [1.0, 1.0] and told["untouched"] == [1.0, rank]


def test_mistakes_are_told(ranks):
    for told in ranks:
        assert "init()" in told["before init"] and "init()" in told["optimizer before init"]
        assert "average=False" in told["integers"]
        mistaken = told["mistakes"]
        assert "already" in mistaken["twice"]
        assert "on their way" in mistaken["zero_grad"] and "own gradients" in mistaken["skip"]
        assert (
            "backward_passes_per_step" in mistaken["second backward"]
            and "sparse=False" in mistaken["sparse"]
        )
        assert (
            len(mistaken["again"]) == 1
            and "skip_synchronize" in mistaken["again"][0]
            and mistaken["spread"] == 0
        )


def test_one_process_alone_and_names_that_are_wrong(monkeypatch):
    monkeypatch.setattr(hvd, "_place", None)
    hvd.init()
    try:
        model, optimizer = new()
        train(model, optimizer, range(2))
        assert gap(vector(model), serial(2)[-1]) < 1e-7
        plain = torch.optim.SGD(model.parameters(), LR)
        named = list(model.named_parameters())
        assert "'0.weight' twice" in refused(
            lambda: hvd.DistributedOptimizer(plain, [named[0], *named])
        )
        assert "leaves out 3" in refused(lambda: hvd.DistributedOptimizer(plain, named[:1]))
        assert "it is 1 or more" in refused(
            lambda: hvd.DistributedOptimizer(plain, backward_passes_per_step=0)
        )
    finally:
        hvd.shutdown()
