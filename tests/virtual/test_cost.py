"""What share of a GPU's peak an operation reaches, and what the host spends on it."""

from dataclasses import replace

import pytest
import torch
from compare_devices import last
from torch import nn
from torch.nn import functional as F

from multigpu import GPUS
from multigpu.errors import UserError
from multigpu.virtual import control
from multigpu.virtual.sim.gemm import ODD_ROWS, Product, product_seconds
from multigpu.virtual.sim.host import LAYER, SIMPLE, host_seconds
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD

A100 = GPUS["A100-80GB"]
HALF = torch.float16


@pytest.fixture
def a100():
    with control.running(count=1, gpu=A100, compute=False) as (device,):
        yield device


def seconds() -> float:
    """The time of the last kernel, without the kernel's overhead."""
    return last().end - last().start - KERNEL_OVERHEAD


def product(*sizes: int) -> float:
    """The time of a product in fp16 on an A100, without its operands' traffic."""
    return product_seconds(Product(*sizes), A100, A100.fp16, "tensor")


def test_a_tile_more_than_the_waves_hold_takes_another_wave():
    """Tiles of 256 × 128 on 108 SMs: 12 × 9 of them are one wave, 12 × 10 are two."""
    full = product(12 * 256, 9 * 128, 1024)
    flops = 2 * 12 * 256 * 9 * 128 * 1024
    assert flops / full == pytest.approx(A100.fp16 * A100.shares.tensor)
    more = product(12 * 256, 10 * 128, 1024)
    assert more / full > 1.3 * 10 / 9, "more than in proportion to the arithmetic"


def test_an_output_slightly_larger_than_a_tile_takes_another_row_of_tiles():
    even = product(256 * 27, 1024, 1024)
    edge = product(256 * 27 + 8, 1024, 1024)
    assert edge > 1.1 * even
    assert product(8, 8, 8) == product(32, 32, 32), "the smallest tile is 32 × 32"
    # 100 tiles of 128 × 128 are one wave of 108; one more row makes 200 tiles.
    assert product(129, 12_800, 1024) > 1.5 * product(128, 12_800, 1024)


def test_a_deep_product_with_few_tiles_is_split():
    """128 × 128 over k = 2**20 would be one tile on one SM; the sum is divided among SMs."""
    one_sm = 2 * 128 * 128 * 2**20 / (A100.fp16 / A100.shares.sms)
    assert product(128, 128, 2**20) < one_sm / 20


def test_odd_sizes_are_slower_on_tensor_cores(a100):
    x = torch.empty(4096, 4096, dtype=HALF, device=a100)
    times = {}
    for columns in (50_256, 50_257, 50_258, 50_260):
        x @ torch.empty(4096, columns, dtype=HALF, device=a100)
        times[columns] = seconds()
    assert times[50_257] > times[50_258] > times[50_260] > times[50_256]
    assert times[50_257] / times[50_256] == pytest.approx(1 / ODD_ROWS, rel=0.05)
    x32 = x.float()
    took = []
    for columns in (50_256, 50_257):
        x32 @ torch.empty(4096, columns, device=a100)
        took.append(seconds())
    assert took[1] == pytest.approx(took[0], rel=0.01), "CUDA cores do not mind"


def test_a_transposed_operand_has_the_alignment_of_its_rows(a100):
    """gradient.T @ x of a vocabulary of 50,257: its rows are the gradient's, which are odd."""
    x = torch.empty(4096, 1024, dtype=HALF, device=a100)
    torch.empty(4096, 50_257, dtype=HALF, device=a100).t() @ x
    odd = seconds()
    torch.empty(50_257, 4096, dtype=HALF, device=a100) @ x
    assert odd > 2 * seconds(), "the same shapes, with even rows"


def convolve(device, dtype=torch.float32, layout=torch.contiguous_format, taps=3, inputs=128):
    x = torch.empty(64, inputs, 56, 56, dtype=dtype, device=device)
    x = x.contiguous(memory_format=layout)
    layer = nn.Conv2d(inputs, 128, taps, padding=taps // 2, bias=False, device=device)
    with torch.no_grad():
        layer.to(dtype).to(memory_format=layout)(x)
    return seconds()


def test_tensor_cores_want_the_channels_last(a100):
    first = convolve(a100, HALF)
    last_ = convolve(a100, HALF, torch.channels_last)
    images = 2 * 2 * 64 * 128 * 56 * 56
    # The input and the output are read and written once more.
    moved = 2 * images / (A100.bandwidth * A100.shares.memory)
    assert first - last_ == pytest.approx(moved, rel=0.05)


def test_convolutions_in_float32_use_tf32_or_winograd(a100):
    flops = 2 * 64 * 56 * 56 * 128 * 128 * 9
    tf32 = flops / convolve(a100, layout=torch.channels_last)
    assert A100.fp32 < tf32 <= A100.tf32 * A100.shares.tf32 * A100.shares.convolution
    control.stop()
    with control.running(count=1, gpu="V100-16GB", compute=False) as (device,):
        three = 2 * 64 * 56 * 56 * 128 * 128 * 9 / convolve(device, taps=3)
        five = 2 * 64 * 56 * 56 * 128 * 128 * 25 / convolve(device, taps=5)
    assert three == pytest.approx(36 / 16 * five, rel=0.1), "Winograd's algorithm"


def square_product(device):
    x = torch.empty(4096, 4096, device=device)
    x @ x
    return seconds()


def test_products_in_float32_use_tf32_if_the_program_allows_it(a100):
    """The switches count from the next operation on, also for shapes that were seen before."""
    exact = square_product(a100)
    torch.set_float32_matmul_precision("high")
    ratio = exact / square_product(a100)
    shares = A100.shares
    assert ratio == pytest.approx(
        A100.tf32 * shares.tf32 / (A100.fp32 * shares.simt), rel=0.05
    )
    torch.backends.cuda.matmul.allow_tf32 = False
    assert square_product(a100) == pytest.approx(exact)


def test_convolutions_use_tf32_unless_the_program_forbids_it(a100):
    usual = convolve(a100, taps=5)
    torch.backends.cudnn.allow_tf32 = False
    assert convolve(a100, taps=5) > 2 * usual
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    assert convolve(a100, taps=5) == pytest.approx(usual)


@pytest.mark.parametrize("function", [F.silu, F.mish, lambda x: F.rms_norm(x, x.shape[-1:])])
def test_forward_and_backward_are_one_kernel_each(a100, function):
    x = torch.empty(8192, 8192, dtype=HALF, device=a100, requires_grad=True)
    began = control.elapsed()
    out = function(x)
    forward = control.elapsed() - began
    grad = torch.empty_like(out)
    torch.autograd.grad(out, x, grad)
    backward = control.elapsed() - began - forward
    once = x.numel() * x.element_size() / (A100.bandwidth * A100.shares.memory)
    # Forward reads the input and writes the output; backward also reads a gradient.
    assert forward == pytest.approx(2 * once, rel=0.1)
    assert backward == pytest.approx(3 * once, rel=0.1)


# Pairs of calls with the same shapes, whose kernels take different times.
SAME_SHAPES = {
    "dilation": [
        lambda x, weight: F.conv2d(x, weight, padding=1),
        lambda x, weight: F.conv2d(x, weight, padding=2, dilation=2),
    ],
    "stride": [
        lambda x, weight: F.conv2d(x.view(-1, 128, 3, 3), weight, padding=1),
        lambda x, weight: F.conv2d(x.view(-1, 128, 3, 3), weight, padding=2, stride=2),
    ],
    "dimension of a softmax": [
        lambda x, weight: x.view(-1, 512).softmax(0),
        lambda x, weight: x.view(-1, 512).softmax(1),
    ],
}


@pytest.mark.parametrize("name", SAME_SHAPES)
@pytest.mark.parametrize("backward", [False, True])
def test_a_calls_time_does_not_depend_on_the_calls_before_it(name, backward):
    def times(calls: list) -> list[float]:
        with control.running(count=1, gpu="V100-16GB", compute=False) as (device,):
            x = torch.empty(64, 128, 24, 24, device=device, requires_grad=backward)
            weight = torch.empty(128, 128, 3, 3, device=device)
            found = []
            for call in calls:
                result = call(x, weight)
                began = control.elapsed()
                if backward:
                    torch.autograd.grad(result, x, torch.empty_like(result))
                    found.append(control.elapsed() - began)
                else:
                    found.append(seconds())
        return found

    calls = SAME_SHAPES[name]
    alone = [times([call])[0] for call in calls]
    assert alone[0] != pytest.approx(alone[1], rel=0.05)
    assert times(calls)[1] == pytest.approx(alone[1], rel=1e-3)
    assert times(calls[::-1])[1] == pytest.approx(alone[0], rel=1e-3)


def attend(device, causal: bool, heads: int = 64, requires_grad: bool = False):
    q, k, v = (
        torch.empty(
            8, heads, 2048, 128, dtype=HALF, device=device, requires_grad=requires_grad
        )
        for _ in range(3)
    )
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def test_causal_attention_costs_half_forward_and_backward(a100):
    forward = {}
    backward = {}
    for causal in (False, True):
        out = attend(a100, causal, requires_grad=True)
        forward[causal] = seconds()
        out.backward(torch.empty_like(out))
        event = next(e for e in control.timeline().events[::-1] if "attention" in e.name)
        backward[causal] = event.end - event.start - KERNEL_OVERHEAD
    flops = 4 * 8 * 64 * 2048**2 * 128
    assert forward[False] == pytest.approx(
        flops / (A100.fp16 * A100.shares.attention), rel=0.06
    )
    assert forward[True] == pytest.approx(forward[False] / 2, rel=0.01)
    assert backward[True] == pytest.approx(backward[False] / 2, rel=0.01)
    ratio = 2.5 * A100.shares.attention / A100.shares.attention_backward
    assert backward[False] / forward[False] == pytest.approx(ratio)


def moved(bytes_: float) -> float:
    """The seconds of a kernel that is bound by memory traffic."""
    return A100.shares.ramp + bytes_ / (A100.bandwidth * A100.shares.memory)


def test_out_is_written_and_not_read(a100):
    x = torch.empty(2**26, device=a100)
    y = torch.empty(2**26, device=a100)
    out = torch.empty(2**26, device=a100)
    torch.add(x, y, out=out)
    assert seconds() == pytest.approx(moved(3 * x.nbytes))
    torch.cat([x, y], out=torch.empty(2**27, device=a100))
    assert seconds() == pytest.approx(moved(4 * x.nbytes))


def test_a_list_of_tensors_is_overwritten_without_being_read(a100):
    """FSDP2's copies into the buffer of an all-gather, and zero_grad(set_to_none=False)."""
    x, y, a, b = (torch.empty(2**26, device=a100) for _ in range(4))
    torch._foreach_copy_([a, b], [x, y])
    assert seconds() == pytest.approx(moved(4 * x.nbytes))
    torch._foreach_zero_([a, b])
    assert seconds() == pytest.approx(moved(2 * x.nbytes))


def test_empty_tensors_are_free(a100):
    x = torch.empty(1024, 1024, device=a100)
    before = control.elapsed()
    made = [x.new_empty(1024, 1024), torch.empty_like(x), x.new_empty_strided((2, 2), (2, 1))]
    assert len(made) == 3
    assert control.elapsed() == before


def test_a_small_tensor_reaches_a_part_of_the_bandwidth(a100):
    reached = []
    for size in (2**14, 2**20, 2**28):
        x = torch.empty(size, device=a100)
        x.add_(1)
        reached.append(2 * x.nbytes / seconds() / A100.bandwidth)
    assert reached[0] < 0.1 < reached[1] < reached[2] <= A100.shares.memory
    assert reached[2] == pytest.approx(A100.shares.memory, rel=0.01)


def normalise(device, layout, training: bool, width: int = 56) -> tuple[int, float]:
    x = torch.empty(64, 256, width, width, device=device).contiguous(memory_format=layout)
    norm = nn.BatchNorm2d(256, device=device).train(training)
    with torch.no_grad():
        norm(x)
    return x.nbytes, seconds()


def test_batch_norm_reads_a_batch_twice_unless_the_sms_keep_it(a100):
    size, took = normalise(a100, torch.contiguous_format, training=True)
    assert took == pytest.approx(moved(3 * size), rel=0.01)
    size, took = normalise(a100, torch.channels_last, training=True, width=14)
    assert took == pytest.approx(moved(2 * size), rel=0.01)
    size, took = normalise(a100, torch.channels_last, training=True)
    # 108 SMs keep 120 KiB each of the 49 MiB of 64 channels.
    kept = 108 * 120 * 1024 / (64 * 64 * 56 * 56 * 4)
    assert took == pytest.approx(moved((3 - kept) * size), rel=0.01)
    size, took = normalise(a100, torch.contiguous_format, training=False)
    assert took == pytest.approx(moved(2 * size), rel=0.01)


def test_a_product_without_beta_does_not_read_its_first_argument(a100):
    a = torch.empty(512, 1024, 16, dtype=HALF, device=a100)
    b = torch.empty(512, 16, 1024, dtype=HALF, device=a100)
    scores = torch.empty(512, 1024, 1024, dtype=HALF, device=a100)
    torch.baddbmm(scores, a, b)
    adding = seconds()
    torch.baddbmm(scores, a, b, beta=0)
    expected = (2 * scores.nbytes + 2 * a.nbytes) / (scores.nbytes + 2 * a.nbytes)
    assert adding / seconds() == pytest.approx(expected, rel=0.01)


def test_what_the_host_spends_on_an_operation():
    with control.running(count=1, gpu=A100, compute=False) as (device,):
        x = torch.empty(16, 16, device=device)
        start = control.elapsed()
        for _ in range(100):
            x.add_(1)
        simple = control.elapsed() - start
        for _ in range(100):
            x @ x
        layers = control.elapsed() - start - simple
    assert simple == pytest.approx(100 * SIMPLE, rel=0.05)
    assert layers == pytest.approx(100 * LAYER, rel=0.1)


def test_functions_whose_names_have_two_m_are_simple():
    aten = torch.ops.aten
    for name in ("lgamma", "digamma", "polygamma", "igamma", "cummax", "cummin"):
        assert host_seconds(getattr(aten, name).default) == SIMPLE, name
    for name in ("mm", "bmm", "addmm", "baddbmm", "_addmm_activation", "_scaled_mm"):
        assert host_seconds(getattr(aten, name).default) == LAYER, name


def test_a_slower_host_makes_small_operations_slower_and_large_ones_not():
    took = {}
    for factor in (1, 3):
        with control.running(count=1, gpu=A100, compute=False, host_factor=factor) as (
            device,
        ):
            for size in (16, 2**27):
                x = torch.empty(size, device=device)
                start = control.elapsed()
                for _ in range(50):
                    x.add_(1)
                took[factor, size] = control.elapsed() - start
    assert took[3, 16] == pytest.approx(3 * took[1, 16], rel=0.05)
    assert took[3, 2**27] == pytest.approx(took[1, 2**27], rel=0.05)


@pytest.mark.parametrize("factor", [0, -1, float("inf"), float("nan"), "2"])
def test_a_host_factor_that_is_no_positive_number_is_refused(factor):
    with pytest.raises(UserError, match="host_factor"):
        control.start(1, host_factor=factor)
    assert control.devices() == []


@pytest.mark.parametrize("name", GPUS)
def test_nothing_is_faster_than_its_peak(name):
    """Matrix products, additions and attention do not exceed the data sheet."""
    gpu = GPUS[name]
    with control.running(count=1, gpu=gpu, compute=False, memory="900GiB") as (device,):
        for n in (1, 7, 100, 1024, 5000):
            x = torch.empty(n, n, dtype=HALF, device=device)
            x @ x
            assert 2 * n**3 / seconds() <= gpu.fp16
            x.add_(1)
            assert 2 * x.nbytes / seconds() <= gpu.bandwidth
        q = torch.empty(8, 64, 4096, 128, dtype=HALF, device=device)
        F.scaled_dot_product_attention(q, q, q)
        assert 4 * 8 * 64 * 4096**2 * 128 / seconds() <= gpu.fp16


@pytest.mark.parametrize("field", ["sms", "ramp", "tensor"])
def test_a_share_outside_of_its_range_is_refused(field):
    wrong = {"sms": 0, "ramp": -1.0}.get(field, 1.01)
    with pytest.raises(UserError, match=field):
        replace(A100.shares, **{field: wrong})


def matmul_seconds(gpu: str, dtype: torch.dtype) -> float:
    with control.running(count=1, gpu=gpu, compute=False) as (device,):
        x = torch.empty(4096, 4096, dtype=dtype, device=device)
        x @ x
        return seconds()


@pytest.mark.parametrize("gpu", ["V100-16GB", "T4"])
def test_without_bfloat16_units_a_product_in_it_is_no_faster_than_in_float32(gpu):
    """cuBLAS has no tensor cores for it there."""
    bfloat16 = matmul_seconds(gpu, torch.bfloat16)
    assert bfloat16 == pytest.approx(matmul_seconds(gpu, torch.float32), rel=1e-3)
    assert bfloat16 > 5 * matmul_seconds(gpu, torch.float16)
    assert matmul_seconds("A100-40GB", torch.bfloat16) == matmul_seconds(
        "A100-40GB", torch.float16
    )


def test_each_device_has_the_times_of_its_model():
    with control.running(gpu=["A100-80GB", "T4"], compute=False) as devices:
        took = []
        for device in devices:
            x = torch.empty(4096, 4096, dtype=HALF, device=device)
            x @ x
            took.append(seconds())
            # Into pinned memory: into pageable memory the host's core is the limit.
            x.to("cpu", non_blocking=True)
        assert took[1] > 4 * took[0], "a T4 has a fifth of an A100's peak"
        copies = [event for event in control.timeline().events if event.kind == "transfer"]
        fast, slow = (copy.end - copy.start for copy in copies)
        assert slow == pytest.approx(2 * fast, rel=0.01), "PCIe 4 and PCIe 3"
