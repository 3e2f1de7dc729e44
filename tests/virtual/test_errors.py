"""A virtual GPU raises the errors of a GPU, in CUDA's words; and the errors of its start."""

import re
import threading

import pytest
import torch
from torch.nn import functional as F

from multigpu.errors import UserError
from multigpu.virtual import control
from multigpu.virtual.patches.backend import check_version

MISMATCH = "Expected all tensors to be on the same device"
TWO_DEVICES = MISMATCH + ", but found at least two devices, {} and {}!"


class Doubled(torch.autograd.Function):
    """Multiplies by a factor; the input's gradient is on the device `grad_device`."""

    grad_device: torch.device

    @staticmethod
    def forward(ctx, factor, x):
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return None, (2 * grad).to(Doubled.grad_device)


def test_a_gradient_on_another_device(two):
    x = torch.ones(3, device=two[0], requires_grad=True)
    for place in (two[1], torch.device("cpu")):
        Doubled.grad_device = place
        words = f"invalid gradient at index 0 - expected device {two[0]} but got {place}"
        with pytest.raises(
            RuntimeError, match=f"Function DoubledBackward returned an {words}"
        ):
            Doubled.apply(2, x).sum().backward()
        with pytest.raises(RuntimeError, match=f"^{words}"):
            (x * 2).backward(torch.ones(3, device=place))
    plain = torch.ones(3, requires_grad=True)
    Doubled.grad_device = two[0]
    with pytest.raises(RuntimeError, match="expected device cpu but got vgpu:0"):
        Doubled.apply(2, plain).sum().backward()
    assert x.grad is None
    assert plain.grad is None
    one = torch.ones((), device=two[1], requires_grad=True)
    # torch moves a gradient that is one number.
    Doubled.apply(2, one).backward()
    assert one.grad.device == two[1]
    assert one.grad.item() == 2
    Doubled.grad_device = two[1]
    Doubled.apply(2, x.to(two[1])).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b: torch.zeros(()).add_(torch.ones((), device=a)),
        lambda a, b: torch.add(torch.ones((), device=a), 1, out=torch.zeros(())),
        lambda a, b: torch.stack([torch.ones((), device=a), torch.zeros(())]),
        lambda a, b: F.embedding(torch.tensor(1), torch.ones(3, 2, device=a)),
        lambda a, b: torch.ones(4, device=a).index_put_(
            (torch.tensor([0, 1]),), torch.zeros(2)
        ),
        lambda a, b: torch._foreach_add([torch.ones(2, device=a)], [torch.ones(2, device=b)]),
        lambda a, b: torch._foreach_add_([torch.ones(2, device=a)], [torch.ones(2)]),
    ],
)
def test_tensors_of_two_devices(two, wrong):
    with pytest.raises(RuntimeError, match=MISMATCH):
        wrong(*two)


ON_GPU = "(torch.vgpu.FloatTensor)"
ON_HOST = "(torch.FloatTensor)"


@pytest.mark.parametrize(
    ("images", "weight", "bias", "words"),
    [
        ("vgpu:0", "cpu", "cpu", f"{ON_GPU} and weight type {ON_HOST}"),
        ("cpu", "vgpu:0", "vgpu:0", f"{ON_HOST} and weight type {ON_GPU}"),
        ("vgpu:0", "vgpu:0", "cpu", f"{ON_GPU} and bias type {ON_HOST}"),
    ],
)
def test_a_convolution_with_tensors_of_the_host(two, images, weight, bias, words):
    rows = torch.ones(1, 3, 8, 8, device=images)
    tensors = torch.ones(4, 3, 3, 3, device=weight), torch.ones(4, device=bias)
    message = f"Input type {words} should be the same"
    if images == "cpu":
        message += " or input should be a MKLDNN tensor and weight is a dense tensor"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        F.conv2d(rows, *tensors)


def test_a_convolution_of_two_dtypes(two):
    rows = torch.ones(1, 3, 8, 8, device=two[0], dtype=torch.float16)
    words = "Input type (torch.vgpu.HalfTensor) and weight type (torch.vgpu.FloatTensor)"
    with pytest.raises(RuntimeError, match=re.escape(words)):
        F.conv2d(rows, torch.ones(4, 3, 3, 3, device=two[0]))


def test_indices_of_a_device_for_a_tensor_of_the_host(two):
    words = "indices should be either on cpu or on the same device"
    with pytest.raises(RuntimeError, match=words):
        torch.arange(5.0)[torch.tensor([1, 2], device=two[0])]


def test_numbers_of_the_host_are_accepted(two):
    x = torch.ones(3, device=two[1])
    assert x[torch.tensor([1, 2])].tolist() == [1, 1], "indices of the host"
    assert (x * torch.tensor(2.0) + torch.tensor(1)).tolist() == [3, 3, 3]
    assert x.masked_fill(x > 0, torch.tensor(5.0)).tolist() == [5, 5, 5]
    assert x.fill_(torch.tensor(4.0)).tolist() == [4, 4, 4]


def test_each_thread_gets_its_own_exception(two):
    caught = []

    def work(number: int) -> None:
        def hook(_):
            raise ZeroDivisionError(number)

        x = torch.ones(3, device=two[0], requires_grad=True)
        y = x * 2
        y.register_hook(hook)
        try:
            y.sum().backward()
        except ZeroDivisionError as error:
            caught.append((number, error.args[0]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(caught) == [(i, i) for i in range(4)]


@pytest.mark.parametrize(
    ("call", "argument", "place", "kernel"),
    [
        (lambda x, w: w @ x, "mat2", 0, "mm"),
        (lambda x, w: F.linear(x, w, w[0]), "mat1", 0, "addmm"),
        (lambda x, w: torch.cat([x, w]), "tensors", 1, "cat"),
        (lambda x, w: torch.stack([x, w]), "tensors", 1, "cat"),
        (lambda x, w: F.layer_norm(x, (3,), w[0]), "weight", 1, "_native_layer_norm"),
        (lambda x, w: F.embedding(x[0].long(), w), "index", 0, "_index_select"),
        (lambda x, w: F.cross_entropy(x, w[0].long()), "target", 1, "nll_loss_forward"),
        (lambda x, w: torch.mm(x, x, out=w), "out", 1, "mm_out_out"),
        (lambda x, w: x.scatter_(0, w.long(), 1.0), "index", 1, "scatter__value"),
    ],
)
def test_the_argument_on_another_device_is_named(two, call, argument, place, kernel):
    # As an H100 with torch 2.11 says it: benchmarks/gpu.
    x, w = (torch.ones(3, 3, device=device) for device in two)
    words = f"{MISMATCH}, but got {argument} is on {two[place]}, different from other tensors "
    words += f"on {two[1 - place]} (when checking argument in method wrapper_VGPU_{kernel})"
    with pytest.raises(RuntimeError, match=f"^{re.escape(words)}$"):
        call(x, w)


def attention(x: torch.Tensor, w: torch.Tensor, **mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None], **mask)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (attention, "query.device: vgpu:0 key.device: {} and value.device: {} instead."),
        (lambda x, w: attention(x, x, attn_mask=w > 0), "attn_bias is on {}, different from"),
        (lambda x, w: x.masked_fill(w > 0, 0.0), "got mask on {} and self on vgpu:0"),
        (lambda x, w: w.masked_fill_(x > 0, 0.0), "got mask on vgpu:0 and self on {}"),
        (lambda x, w: torch.cholesky_solve(w, x), "found b on {} and A on vgpu:0 instead."),
        (torch.allclose, "found at least two devices, vgpu:0 and {}!"),
        (torch.equal, "other is on {}, different from other tensors on vgpu:0"),
    ],
)
def test_sentences_of_one_operation_for_two_devices(two, call, words):
    """PyTorch 2.13's source: attention.cpp, cuda/Indexing.cu, LinearAlgebraUtils.h."""
    for place in (two[1], torch.device("cpu")):
        x, w = torch.ones(3, 3, device=two[0]), torch.ones(3, 3, device=place)
        with pytest.raises(RuntimeError, match=re.escape(words.format(place, place))):
            call(x, w)


def test_sentences_for_two_gpus(two):
    images = torch.ones(1, 1, 4, 4, device=two[0])
    near, apart = (torch.ones(1, 1, 2, 2, device=device) for device in two)
    words = "but got weight is on vgpu:1, different from other tensors on vgpu:0"
    for convolve, kernel in (
        (F.conv2d, "_cudnn_convolution"),
        (F.conv_transpose2d, "_cudnn_convolution_transpose"),
    ):
        with pytest.raises(RuntimeError, match=rf"{words} .*wrapper_VGPU_{kernel}\)$"):
            convolve(images, apart)
        with pytest.raises(RuntimeError, match="^" + TWO_DEVICES.format(*two)):
            convolve(images, near, torch.ones(1, device=two[1]))
    with pytest.raises(RuntimeError, match=r"^indices should be either on cpu or on"):
        images[torch.zeros(1, dtype=torch.long, device=two[1])]
    lengths = torch.ones(4, dtype=torch.long, device=two[1])
    with pytest.raises(RuntimeError, match=r"got 1D vgpu:1 Long tensor$"):
        torch.nn.utils.rnn.pack_padded_sequence(images[0], lengths)
    with pytest.raises(RuntimeError, match=r"^masked_fill_: Expected inputs"):
        torch.ones(2).masked_fill(torch.ones(2) > 0, torch.ones((), device=two[0]))


def test_an_exception_in_backward_reaches_the_program(two):
    """It passes through autograd's engine; without patches/engine.py the process aborts."""
    weight = torch.ones(3, device=two[1], requires_grad=True)

    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("forgotten")

    with pytest.raises(KeyError, match="forgotten"):
        (Raising.apply(weight) * 3).sum().backward()
    out = weight * 2

    def hook(grad):
        raise KeyboardInterrupt

    out.register_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        (out * 3).sum().backward()
    (weight * 3).sum().backward()
    assert weight.grad.tolist() == [3, 3, 3]


def test_an_operation_without_a_kernel(two):
    library = torch.library.Library("vgputest", "DEF")
    library.define("no_kernel(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match=r"Virtual GPUs.*no_kernel"):
        torch.ops.vgputest.no_kernel(torch.ones(2, device=two[0]))


def test_starting_twice_and_stopping():
    # Without running virtual GPUs, stop does nothing.
    control.stop()
    with pytest.raises(UserError, match=r"no virtual GPUs are running"):
        control.elapsed()
    control.start(count=1)
    try:
        with pytest.raises(UserError, match=r"1 virtual GPU.*control\.stop\(\)"):
            control.start(count=2)
        x = torch.ones(2, device="vgpu:0")
    finally:
        control.stop()
    assert torch.vgpu.device_count() == 0
    assert not torch.vgpu.is_available()
    for use in (
        lambda: torch.ones(2, device="vgpu:0"),
        lambda: torch.nn.Linear(2, 2).to("vgpu:0"),
        control.elapsed,
    ):
        # Of both kinds: a notebook shows a UserError as one sentence.
        with pytest.raises(RuntimeError, match=r"multigpu\.gpus\(2\)") as error:
            use()
        assert isinstance(error.value, UserError)
    with control.running(count=1):
        for use in (
            lambda: x + 1,
            lambda: x.cpu(),
            lambda: x.view(2, 1),
            lambda: x[0].item(),
            lambda: x.add_(1),
        ):
            with pytest.raises(RuntimeError, match=r"vgpu:0.*stopped.*create it again"):
                use()
        assert repr(x) == "tensor(..., size=(2,), device='vgpu:0')"
        assert torch.vgpu.memory_allocated(0) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"count": 0}, "count.* 0.* 1 to 128"),
        ({"gpu": "V1000"}, 'GPU "V1000".*V100-16GB, .*A100-40GB.*Gpu'),
        ({"count": 3, "gpu": ["T4", "A10"]}, "2 GPUs are named: give one name for all, or 3"),
        ({"link": "NVLink9"}, 'link "NVLink9".*PCIe3.*NVLink4.*Link'),
        ({"between_nodes": "HDR200"}, "link between nodes.*gpus_per_node"),
        ({"gpus_per_node": 1}, "gpus_per_node.*between_nodes.*HDR200.*Ethernet10.*Link"),
        ({"gpus_per_node": 0, "between_nodes": "HDR200"}, "gpus_per_node is 0.*from 1 up"),
        ({"gpus_per_node": "2", "between_nodes": "HDR200"}, "gpus_per_node is '2'"),
        (
            {"count": 4, "gpus_per_node": 3, "between_nodes": "HDR200"},
            "4 GPUs.*nodes of 3.*divides count",
        ),
        (
            {"gpus_per_node": 1, "between_nodes": "NVLink4"},
            'network "NVLink4".*HDR200.*Ethernet10.*Link',
        ),
        ({"memory": "64 MB"}, "memory.*'64 MB'.*\"64MiB\""),
        ({"memory": -1}, "memory.* -1.*64MiB"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(UserError, match=words):
        control.start(**arguments)
    assert torch.cuda.is_available() or not control.devices()


def test_an_unsupported_torch():
    for version in ("2.10.1", "2.14.0", "3.0.0"):
        words = rf"2\.11 to 2\.13.* {version}.*pip install"
        with pytest.raises(UserError, match=words):
            check_version(version)
    for version in ("2.11.0", "2.12.1+cu128", "2.13.0+cpu"):
        check_version(version)
