"""The prediction of a data-parallel step: buckets, overlap, the slowest rank, what is lost."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from multigpu import GPUS, Link, launch
from multigpu.models import CNN
from multigpu.models.resnet import resnet
from multigpu.models.vgg import vgg16
from multigpu.scaling import Loader, Measured, laws, predict
from multigpu.scaling.buckets import buckets
from multigpu.scaling.compute import Compute, Gradient, profile
from multigpu.scaling.layers import profile_any
from multigpu.scaling.prediction import INPUT, INSIDE, LATENCY, SMALL, STRAGGLERS
from multigpu.scaling.step import ddp_step
from multigpu.scaling.stragglers import slowest
from multigpu.scaling.workloads import WIDE, find
from multigpu.virtual import control

V100 = GPUS["V100-16GB"]
A100 = GPUS["A100-80GB"]
CLUSTER = {"link": "NVLink3", "between_nodes": "HDR200"}


# ---- buckets --------------------------------------------------------------------------------


def test_the_buckets_of_the_wide_cnn_are_those_of_ddp():
    """DDP hands each bucket to its communication hook, in the order of the all-reduces."""
    seen: list[list[str]] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DDP(CNN(**WIDE))
        names = {weight: name for name, weight in model.module.named_parameters()}

        def record(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            seen.append([names[weight] for weight in bucket.parameters()])
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, record)
        images = torch.zeros(4, 1, 28, 28)
        for _ in range(2):  # after the first backward DDP makes its buckets again
            seen.clear()
            model(images).sum().backward()
        del model
    finally:
        dist.destroy_process_group()
    ((step,),) = profile(find("cnn:wide"), V100, [4]).values()
    found = buckets(gradient.nbytes for gradient in step.gradients)
    order = [[step.gradients[number].name for number in bucket] for bucket in found]
    assert order == seen
    assert len(seen) == 2


# ---- one GPU --------------------------------------------------------------------------------


def test_a_step_alone_is_the_step_without_ddp():
    """profile() copies gradients into buckets; `alone` is without that."""
    ((step,),) = profile(find("cnn:wide"), V100, [256]).values()
    with control.running(1, gpu=V100, compute=False) as (device,):
        model = CNN(**WIDE).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            began = control.elapsed()
            images = torch.empty(256, 1, 28, 28, device=device)
            labels = torch.empty(256, dtype=torch.long, device=device)
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = control.elapsed() - began
    assert step.alone == pytest.approx(seconds, rel=0.01)
    assert step.copies > 0


def test_gradients_come_from_the_last_layer_to_the_first():
    ((step,),) = profile(find("cnn:wide"), V100, [256]).values()
    layers = [gradient.name.split(".")[0] for gradient in step.gradients]
    assert list(dict.fromkeys(layers)) == ["fc2", "fc1", "conv2", "conv1"]
    times = [gradient.ready for gradient in step.gradients]
    assert times == sorted(times) and times[-1] == pytest.approx(step.backward)
    assert sum(g.nbytes for g in step.gradients) == 4 * sum(
        weight.numel() for weight in CNN(**WIDE).parameters()
    )


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.4])
def test_a_measured_step_of_one_gpu_is_what_is_predicted_for_one_gpu(factor):
    """Also where the host launches too late, so that kernels alone do not give the time."""
    for name, samples in (("cnn:wide", 4096), ("cnn", 64)):
        (slow,) = predict(
            name, "V100-16GB", "PCIe3", gpus=(1,), per_gpu=samples, times=(factor,)
        ).rows
        step = Measured(slow.estimates[0].seconds, samples)
        found = predict(
            name, "V100-16GB", "PCIe3", gpus=(1, 2), per_gpu=samples, measured=step
        )
        assert found.rows[0].estimates[0].seconds == pytest.approx(step.seconds, rel=1e-3)
        assert len(found.factors) == 1


@pytest.mark.parametrize(
    ("name", "samples", "precision"),
    [("gpt:8x768x12", 8, "bf16"), ("bert:8x768x12", 8, "fp32"), ("gpt:8x768x12", 1, "fp32")],
)
def test_repeated_layers_equal_a_model_that_runs_whole(name, samples, precision):
    workload = find(name)
    ((whole,),) = profile(workload, A100, [samples], precision).values()
    ((repeated,),) = profile_any(workload, A100, [samples], precision).values()
    assert [g.name for g in repeated.gradients] == [g.name for g in whole.gradients]
    for field in ("forward", "backward", "update", "copies_in", "memory"):
        assert getattr(repeated, field) == pytest.approx(getattr(whole, field), rel=1e-6)
    for found, expected in zip(repeated.gradients, whole.gradients, strict=True):
        assert found.nbytes == expected.nbytes
        assert found.ready == pytest.approx(expected.ready, rel=1e-6)


def test_models_have_the_published_numbers_of_weights():
    def weights(model: torch.nn.Module) -> int:
        return sum(weight.numel() for weight in model.parameters())

    with torch.device("meta"):
        assert weights(resnet(101)) == 44_549_160
        assert weights(resnet(152)) == 60_192_808
        assert weights(vgg16()) == 138_357_544
        # GPT-2: 124,439,808 with a vocabulary of 50,257.
        added = (51_200 - 50_257) * 768
        assert weights(find("gpt:12x768x12").build(None)) == 124_439_808 + added


# ---- a step of DDP --------------------------------------------------------------------------

MIB = 2**20


def by_hand(ready: tuple[float, ...], sizes: tuple[int, ...], copy_out: float = 0) -> Compute:
    gradients = tuple(
        Gradient(f"w{number}", size * MIB, when, copy_out)
        for number, (when, size) in enumerate(zip(ready, sizes, strict=True))
    )
    return Compute(1, 2.0, ready[-1], 1.0, 0.0, gradients, memory=0)


def seconds_per_mib(seconds: float):
    return lambda nbytes: seconds * nbytes / MIB


def test_an_all_reduce_starts_when_its_bucket_is_full():
    """Forward 2 s, backward 4 s, update 1 s. The first bucket (1 MiB) is full after 1 s."""
    step = ddp_step(by_hand((1, 4), (1, 25)), seconds_per_mib(0.1))
    # The first all-reduce is hidden. The second one runs from 6 to 8.5.
    assert step.seconds == pytest.approx(9.5)
    assert step.network == pytest.approx(2.6)
    assert step.seconds - step.compute == pytest.approx(2.5)


def test_all_reduces_follow_each_other():
    """The second bucket is full at 4 s, while the first all-reduce runs until 13 s."""
    step = ddp_step(by_hand((1, 4), (10, 25)), seconds_per_mib(1))
    assert step.seconds == pytest.approx(2 + 1 + 10 + 25 + 1)


def test_averages_are_copied_out_while_the_next_bucket_is_sent():
    step = ddp_step(by_hand((1, 4), (1, 25), copy_out=0.5), seconds_per_mib(0.1))
    # Copying the first bucket from 6 to 6.5 is hidden, copying the second one is not.
    assert step.seconds == pytest.approx(8.5 + 0.5 + 1)


def ddp_seconds(batch: int, link: str) -> float:
    """This rank's third step with DDP on a virtual GPU, from the clock of the simulation."""
    with control.running(1, gpu="V100-16GB", link=link, compute=False) as (device,):
        dist.init_process_group("vgpu")
        model = DDP(CNN(**WIDE).to(device))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            dist.barrier()
            began = control.elapsed()
            images = torch.empty(batch, 1, 28, 28, device=device)
            labels = torch.empty(batch, dtype=torch.long, device=device)
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = control.elapsed() - began
        del model
        dist.destroy_process_group()
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("batch", [256, 4096])
def test_two_gpus_take_as_long_as_ddp_on_two_virtual_gpus(batch):
    by_rank = launch.call(ddp_seconds, 2, batch, "PCIe3")
    found = predict("cnn:wide", "V100-16GB", "PCIe3", gpus=(2,), per_gpu=batch, spread=0)
    assert found.rows[0].estimates[0].seconds == pytest.approx(max(by_rank), rel=0.05)


# ---- many GPUs ------------------------------------------------------------------------------


def test_the_causes_are_named():
    def worst(**arguments) -> str:
        (row,) = predict(**arguments).rows
        losses = row.estimates[0].losses
        return max(losses, key=losses.get)

    v100 = {"gpu": "V100-16GB", "link": "NVLink2", "between_nodes": "Ethernet10"}
    assert worst(model="vgg16", **v100, gpus=(64,)) == "bandwidth between nodes"
    node = {"gpu": "A100-80GB", "link": "PCIe3"}
    assert worst(model="vgg16", **node, gpus=(8,), per_gpu=16) == "bandwidth inside a node"
    # Eight NDR400 adapters of a node have together more bandwidth than NVLink4's ring.
    h100 = {"gpu": "H100-80GB", "link": "NVLink4", "between_nodes": "NDR400"}
    assert worst(model="vgg16", **h100, gpus=(64,), per_gpu=1, precision="bf16") == INSIDE
    far = Link("far", bandwidth=1e15, latency=1e-3, adapter="gpu")
    assert worst(model="cnn", **{**v100, "between_nodes": far}, gpus=(1024,)) == LATENCY
    fast = {"gpu": "V100-16GB", "link": "NVLink2"}
    assert worst(model="cnn:wide", **fast, gpus=(8,), global_batch=64) == SMALL
    assert worst(model="cnn:wide", **fast, gpus=(4,), per_gpu=8192) == STRAGGLERS
    slow = Loader(workers=1, rate=100)
    assert worst(model="resnet50", **fast, gpus=(1,), loader=slow) == INPUT


def test_the_memory_is_that_of_the_virtual_gpu():
    (row,) = predict("cnn:wide", "V100-16GB", "PCIe3", gpus=(1,), per_gpu=4096).rows
    # The activations of the convolutions alone: 16 × 28² and 32 × 14² numbers an image.
    assert row.memory > 4096 * 4 * (16 * 28**2 + 32 * 14**2)
    tight = replace(V100, memory=2**20)
    (row,) = predict("cnn:wide", tight, "PCIe3", gpus=(1,), per_gpu=4096).rows
    assert row.memory > tight.memory


def test_sixteen_bit_is_faster_and_sends_gradients_of_32_bit():
    single, half = (
        predict("gpt:2x512x8x128", "A100-80GB", **CLUSTER, gpus=(8,), precision=precision)
        for precision in ("fp32", "bf16")
    )
    assert half.rows[0].estimates[0].seconds < single.rows[0].estimates[0].seconds
    assert half.gradients == single.gradients


# ---- stragglers, loader, laws ---------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 1024])
def test_the_slowest_rank_is_that_of_drawn_ranks(ranks):
    drawn = torch.randn(2000, ranks, generator=torch.Generator().manual_seed(0))
    expected = drawn.max(dim=1).values.mean().item()
    assert slowest(ranks, 1.0) - 1 == pytest.approx(expected, abs=0.06)
    assert slowest(ranks, 0) == 1


def test_a_loader_with_enough_workers_costs_nothing():
    assert Loader(workers=4, rate=100).step_seconds(40, seconds=1.0) == 1.0
    assert Loader(workers=1, rate=20).step_seconds(40, seconds=1.0) == 2.0
    assert Loader(workers=0, rate=40).step_seconds(40, seconds=1.0) == 2.0


def test_the_laws_and_their_fits():
    gpus = (1, 2, 4, 16, 1024)
    assert laws.amdahl(0.05, 1024) == pytest.approx(1 / (0.05 + 0.95 / 1024))
    assert laws.gustafson(0.05, 1024) == pytest.approx(0.05 + 0.95 * 1024)
    for share in (0.0, 0.03, 0.4):
        strong = [laws.amdahl(share, n) for n in gpus]
        assert laws.fit_amdahl(gpus, strong) == pytest.approx(share, abs=1e-12)
    assert laws.efficiency(3, 4) == 0.75
    assert math.isclose(laws.amdahl(1, 1024), 1)
    with pytest.raises(ValueError, match="more than one GPU"):
        laws.fit_amdahl([1], [1.0])
