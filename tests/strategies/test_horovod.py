"""The course's Horovod: full-batch steps in any order of autograd, and Horovod's interface.

With 2 and with 4 ranks.
"""

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
    vector,
)
from refusals import user_error
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
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    weights = []
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, batch(step, ranks=hvd.size())).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        weights.append(vector(model))
    return weights


def equal_to_serial(report: dict) -> None:
    report["steps"] = []
    model, optimizer = new()
    for step, expected in enumerate(serial(5)):
        train(model, optimizer, range(step, step + 1))
        report["steps"].append(max_difference(vector(model), expected))
    report["difference"] = rank_difference(model)
    short, optimizer = new(compression=hvd.Compression.fp16)
    train(short, optimizer, range(5))
    report["fp16"] = max_difference(vector(short), vector(model))
    report["fp16's difference"] = rank_difference(short)

    model, optimizer = new(backward_passes_per_step=2)
    half = ROWS // 2
    for step in range(3):
        x, y = local_batch(step)
        (loss(model, (x[:half], y[:half])) / 2).backward()
        (loss(model, (x[half:], y[half:])) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    report["two passes"] = max_difference(vector(model), serial(3)[-1])
    # The last step of an epoch may have one micro-batch.
    loss(model, local_batch(3)).backward()
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
    """The caller chooses the order of the layers, and so autograd's; some may be left out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(100, 20) for _ in range(4))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        first, *others = order
        x = torch.tanh(self.layers[first](x))
        for index in others:
            x = x + self.layers[index](x.repeat(1, 5))
        return x


def orders(report: dict, rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    model = Branches()
    twin = Branches()
    twin.load_state_dict(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), LR))
    order_of_rank = [[0, 1, 2], [3, 2, 1], [2, 0, 1, 3], [1, 0]]
    for _ in range(3):
        model(local_batch(0)[0], order_of_rank[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = torch.optim.SGD(twin.parameters(), LR)
    for _ in range(3):
        plain.zero_grad()
        # The mean over ranks, where a missing gradient counts as zeros.
        for other, order in enumerate(order_of_rank[:ranks]):
            x, _ = batch(0, slice(ROWS * other, ROWS * (other + 1)), ranks)
            (twin(x, order).square().mean() / ranks).backward()
        plain.step()
    report["orders"] = max_difference(vector(model), vector(twin))


def state(report: dict, rank: int) -> None:
    torch.manual_seed(rank)
    model, optimizer = new(seed=None)
    # Rank 0 has a state, as after loading a checkpoint.
    if rank == 0:
        for p in model.parameters():
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 0.5)
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
    # Copied, because load_state_dict keeps the tensors that it gets.
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.load_state_dict(model.state_dict())
    train(model, optimizer, range(1, 3))
    train(again, other, range(1, 3))
    report["loaded"] = max_difference(vector(model), vector(again))


def collectives(report: dict, rank: int) -> None:
    report["ranks"] = (hvd.rank(), hvd.size(), hvd.local_rank())
    tensor = torch.tensor([1.0, float(rank)])
    report["mean"] = hvd.allreduce(tensor, name="t").tolist()
    report["fp16 type"] = hvd.allreduce(tensor, compression=hvd.Compression.fp16).dtype
    columns = torch.full((3, 2), float(rank)).T  # not contiguous
    hvd.broadcast_(columns, root_rank=1)
    report["broadcast_"] = columns.unique().tolist()
    report["objects"] = hvd.broadcast_object({"rank": rank}, root_rank=1, name="o")
    report["untouched"] = tensor.tolist()
    report["integers"] = user_error(lambda: hvd.allreduce(torch.tensor([1])))


def mistakes(report: dict) -> None:
    model, optimizer = new()
    report["twice"] = user_error(lambda: hvd.DistributedOptimizer(optimizer))
    loss(model, local_batch(0)).backward()
    report["zero_grad"] = user_error(optimizer.zero_grad)
    report["second backward"] = user_error(lambda: loss(model, local_batch(0)).backward())
    # All ranks have had the same errors; they go on with a new model.
    optimizer.synchronize()
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
    # A second call does nothing.
    hvd.init()
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
    averaged = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    report["gradient"] = max_difference(averaged, expected)
    hvd.shutdown()
    report["ended"] = dist.is_initialized()
    return report


@pytest.fixture(scope="module", params=[2, 4])
def reports(request):
    """Each rank's report of the experiments."""
    return launch.call(experiments, request.param)


def test_each_step_is_the_full_batchs(reports):
    for report in reports:
        assert len(report["steps"]) == 5 and max(report["steps"]) < 1e-6
        assert report["difference"] == 0
        assert report["gradient"] < 1e-7


def test_micro_batches_and_clipping_are_the_full_batchs_too(reports):
    for report in reports:
        assert report["two passes"] < 1e-6
        assert report["one pass of two"] < 1e-6
        assert report["clipped"] < 1e-6


def test_fp16_compression_is_close(reports):
    for report in reports:
        assert 0 < report["fp16"] < 1e-4 and report["fp16's difference"] == 0


def test_the_order_of_backward_may_differ_between_ranks(reports):
    for report in reports:
        assert report["orders"] < 1e-6


def test_it_sends_what_ddp_sends_and_half_of_it_in_16_bits(reports):
    n = len(reports)
    # There is one all-reduce for each of the 4 parameters. gloo's headers for each: 576 bytes
    # with 2 ranks, 1,682 with 4.
    for report in reports:
        assert report["bytes"] == pytest.approx(8 * NUMBERS * (n - 1) / n, abs=4 * 2000)
        assert report["fp16 bytes"] == pytest.approx(4 * NUMBERS * (n - 1) / n, abs=4 * 2000)


def test_weights_and_the_optimizers_state_are_broadcast(reports):
    for report in reports:
        assert report["difference before"] > 0 and report["difference after"] == 0
        assert report["from rank 1"] == 0
        assert report["momentum"] == {0.5} and report["lr"] == 0.25


def test_schedulers_and_checkpoints_work_with_the_wrapped_optimizer(reports):
    for report in reports:
        assert report["scheduled"] == (0.125, True, "SGD") and report["loaded"] == 0


def test_collectives(reports):
    n = len(reports)
    for rank, report in enumerate(reports):
        assert tuple(report["ranks"]) == (rank, n, rank) and not report["ended"]
        assert report["mean"] == [1.0, (n - 1) / 2] and report["untouched"] == [1.0, rank]
        assert report["fp16 type"] == torch.float32
        assert report["broadcast_"] == [1] and report["objects"] == {"rank": 1}


def test_names_that_only_horovod_has_say_what_does_the_same():
    with pytest.raises(AttributeError, match="torchrun"):
        _ = hvd.elastic
    with pytest.raises(ImportError):
        from multigpu.strategies.horovod import join  # noqa: F401
    assert not hasattr(hvd, "SyncBatchNorm")
    with pytest.raises(AttributeError, match="learning rate"):
        _ = hvd.Adasum
    with pytest.raises(AttributeError, match="horovodrun"):
        _ = hvd.run


def test_mistakes_raise_errors_that_name_the_remedy(reports):
    for report in reports:
        assert "init()" in report["before init"]
        assert "init()" in report["optimizer before init"]
        assert "floating-point" in report["integers"]
        mistaken = report["mistakes"]
        assert "already" in mistaken["twice"]
        assert "zero_grad()" in mistaken["zero_grad"] and "step()" in mistaken["zero_grad"]
        assert "skip_synchronize()" in mistaken["skip"]
        assert "call synchronize()" in mistaken["skip"]
        assert "backward_passes_per_step" in mistaken["second backward"]
        assert "sparse=False" in mistaken["sparse"]
        assert len(mistaken["again"]) == 1 and "skip_synchronize" in mistaken["again"][0]
        assert mistaken["difference"] == 0


def test_shutdown_leaves_a_process_group_that_it_did_not_start():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    hvd.init()
    hvd.shutdown()
    assert dist.is_initialized()
    dist.destroy_process_group()
    hvd.init()
    hvd.shutdown()
    assert not dist.is_initialized()


def test_one_process_alone_and_wrong_names():
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
        assert "backward_passes_per_step is 0" in user_error(
            lambda: hvd.DistributedOptimizer(plain, backward_passes_per_step=0)
        )
    finally:
        hvd.shutdown()
