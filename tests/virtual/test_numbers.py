"""The numbers of a virtual GPU are the CPU's, for all kinds of models and layers."""

from collections.abc import Callable

import pytest
import torch
from compare_devices import encoder, sequences, train
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from multigpu.models import CNN


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(12, 6)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(12, 30), nn.Dropout(0.3), nn.Tanh(), nn.Linear(30, 12)
        )
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)


# {name: (make the model, make its input)}. The kernels are the CPU's, so the bits are equal.
SAME_KERNELS = {
    "the course's CNN": (CNN, lambda: torch.randn(8, 1, 8, 8)),
    "transformer encoder": (lambda: encoder(0.0), sequences),
}
# A GPU adds, or draws random numbers, in another order than the CPU: the last bits may differ.
OTHER_KERNELS = {
    "dropout": (
        lambda: nn.Sequential(nn.Linear(12, 50), nn.Dropout(0.5), nn.Linear(50, 3)),
        sequences,
    ),
    "transformer encoder with dropout": (lambda: encoder(0.1), sequences),
    "RNN": (lambda: nn.RNN(12, 6, 2, batch_first=True, bidirectional=True), sequences),
    "GRU": (lambda: nn.GRU(12, 6, 2, batch_first=True, bidirectional=True), sequences),
    "LSTM with a projection": (lambda: nn.LSTM(12, 6, proj_size=3), sequences),
    "LSTM without bias": (lambda: nn.LSTM(12, 6, bias=False), sequences),
    "GRU without bias": (lambda: nn.GRU(12, 6, bias=False), sequences),
    "LSTM cells": (Cells, sequences),
    "checkpoint": (lambda: Checkpointed(False), sequences),
    "checkpoint, re-entrant": (lambda: Checkpointed(True), sequences),
}


@pytest.mark.parametrize("name", SAME_KERNELS)
def test_equal_to_the_bit(two, name):
    make, data = SAME_KERNELS[name]
    assert train(make, data(), device=two[1]) == 0


@pytest.mark.parametrize("name", OTHER_KERNELS)
def test_equal_except_for_the_last_bits(two, name):
    make, data = OTHER_KERNELS[name]
    assert train(make, data(), device=two[1]) <= 1e-6


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_ctc_loss_takes_lengths_from_the_host_and_from_the_device(two, mode):
    rows = torch.randn(5, 2, 4).log_softmax(2)
    words = torch.tensor([[1, 2], [1, 3]])
    lengths = (torch.tensor([5, 4]), torch.tensor([2, 2]))
    with mode():
        on_cpu = F.ctc_loss(rows, words, *lengths)
        batch = (rows.to(two[1]), words.to(two[1]))
        on_device = [
            F.ctc_loss(*batch, *lengths),
            F.ctc_loss(*batch, *(tensor.to(two[1]) for tensor in lengths)),
            F.ctc_loss(*batch, (5, 4), (2, 2)),
        ]
    assert [loss.item() for loss in on_device] == [on_cpu.item()] * 3
    assert on_device[0].device == two[1]
    if mode is torch.enable_grad:
        leaf = rows.to(two[1]).requires_grad_()
        F.ctc_loss(leaf, words.to(two[1]), *lengths).backward()
        assert leaf.grad.abs().sum() > 0


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [{}, {"num_classes": 5}])
def test_one_hot(two, mode, options):
    classes = torch.tensor([[0, 2], [1, 1]])
    with mode():
        on_device = F.one_hot(classes.to(two[1]), **options)
        assert on_device.device == two[1]
        assert torch.equal(on_device.cpu(), F.one_hot(classes, **options))
        with pytest.raises(RuntimeError, match="index 2 is out of bounds"):
            F.one_hot(classes.to(two[1]), 2)
        for device in ("cpu", two[0]):
            with pytest.raises(RuntimeError, match="only applicable to index tensor"):
                F.one_hot(classes.int().to(device))
            with pytest.raises(RuntimeError, match="Can not infer total number of classes"):
                F.one_hot(classes[:0].to(device))
            assert F.one_hot(classes[:0].to(device), 5).shape == (0, 2, 5)


def assert_same_as_on_the_cpu(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor, device: torch.device
) -> None:
    """Outputs and gradients are the same on the CPU and on the device."""
    results = []
    for place in ("cpu", device):
        leaves = [x.detach().to(place).requires_grad_() for x in inputs]
        out = function(*leaves)
        (out.abs() if out.is_complex() else out).sum().backward()
        results.append([out.detach().cpu(), *[leaf.grad.cpu() for leaf in leaves]])
    for expected, actual in zip(*results, strict=True):
        assert torch.allclose(actual.resolve_conj(), expected.resolve_conj(), atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.conj(),
        lambda x: x.conj().imag,
        lambda x: torch.cat([x.conj(), x]),
        lambda x: x.sgn(),
    ],
)
def test_complex_numbers(two, function):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, dtype=torch.cfloat, generator=generator)
    assert_same_as_on_the_cpu(function, x, device=two[1])


@pytest.mark.parametrize("activation", [F.silu, F.mish])
def test_the_gradient_of_an_activation_is_rounded_once(two, activation):
    """As by CUDA's kernel. In bfloat16, each of several operations would round."""
    values = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    gradients = []
    for place in ("cpu", two[0]):
        leaf = values.clone().to(place).requires_grad_()
        activation(leaf).backward(values.to(place))
        gradients.append(leaf.grad.cpu())
    assert torch.equal(*gradients)


def test_integers_are_counted_as_on_cuda(two):
    """torchtitan counts so the tokens of each expert; the CPU has no such kernel."""
    experts = torch.tensor([[0, 3], [3, 1], [3, 0]], device=two[0])
    counts = torch.histc(experts, bins=4, min=0, max=4)
    assert counts.tolist() == [2, 1, 0, 3] and counts.dtype is torch.int64


@pytest.mark.parametrize(("dims", "with_weight"), [(1, True), (3, False)])
def test_rms_norm(two, dims, with_weight):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 3, 4, generator=generator)
    shape = rows.shape[3 - dims :]
    inputs = [rows, torch.randn(shape, generator=generator)][: 1 + with_weight]
    assert_same_as_on_the_cpu(
        lambda x, *weight: F.rms_norm(x, shape, *weight).sin(), *inputs, device=two[1]
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.addmm(x, torch.ones(2, 3).to(x.device), torch.ones(3, 2).to(x.device)),
        lambda x: torch.softmax(x, 0),
        lambda x: torch.log_softmax(x, -1),
    ],
)
def test_numbers_in_the_place_of_matrices(two, function):
    assert_same_as_on_the_cpu(function, torch.tensor(1.5), device=two[1])


def test_a_traced_function_computes_with_its_arguments(two):
    """Not with those of the call that was traced."""
    x = torch.linspace(-1, 1, 5)
    on_device = x.to(two[0])
    traced_with = torch.zeros(5, device=two[0])
    graph = make_fx(lambda value: (value + on_device) * on_device.sin())(traced_with)
    assert torch.equal(graph(on_device * 2).cpu(), 3 * x * x.sin())
    _, derivative = torch.func.linearize(torch.sin, on_device)
    assert torch.equal(derivative(on_device).cpu(), x.cos() * x)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_packed_sequences(two, kind):
    torch.manual_seed(0)
    layer = kind(4, 3, batch_first=True)
    rows = torch.randn(3, 5, 4)
    lengths = torch.tensor([5, 3, 2])
    outputs = []
    for place in ("cpu", two[1]):
        packed = pack_padded_sequence(rows.to(place), lengths, batch_first=True)
        output = pad_packed_sequence(layer.to(place)(packed)[0], batch_first=True)[0]
        output.square().sum().backward()
        gradient = layer.weight_hh_l0.grad
        outputs.append(torch.cat([output.detach().cpu().flatten(), gradient.cpu().flatten()]))
        layer.zero_grad()
        del output
    assert torch.allclose(*outputs, atol=1e-6)
    with pytest.raises(RuntimeError, match="lengths"):
        pack_padded_sequence(rows.to(two[0]), lengths.to(two[0]), batch_first=True)


def test_a_transformer_with_its_defaults_and_a_padding_mask(two):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    rows = torch.randn(2, 4, 8)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        expected = model(rows, src_key_padding_mask=padding)
        model.to(two[1])
        actual = model(rows.to(two[1]), src_key_padding_mask=padding.to(two[1])).cpu()
    assert torch.allclose(actual[~padding], expected[~padding], atol=1e-5)


def test_attention_with_a_mask_that_needs_a_gradient(two):
    rows = torch.randn(4, 1, 2, 4, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    mask = torch.zeros(2, 4, 4)
    assert_same_as_on_the_cpu(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        *rows[:3],
        mask,
        device=two[0],
    )
