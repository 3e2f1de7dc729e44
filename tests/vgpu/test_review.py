"""What a reviewer broke: marks on payloads, tensors of the host that pass unseen, layers that hand lengths or masks."""

import os
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from multigpu import vgpu

MISMATCH = "Expected all tensors to be on the same device"


def beside(function, *inputs: torch.Tensor, device) -> None:
    """The same outputs and gradients on the CPU and on the device."""
    told = []
    for place in ("cpu", device):
        leaves = [x.detach().to(place).requires_grad_() for x in inputs]
        out = function(*leaves)
        (out.abs() if out.is_complex() else out).sum().backward()
        told.append([out.detach().cpu(), *[leaf.grad.cpu() for leaf in leaves]])
    for mine, other in zip(*told, strict=True):
        assert torch.allclose(mine.resolve_conj(), other.resolve_conj(), atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.conj(),
        lambda x: (x * x).abs(),
        lambda x: x.conj() + 1,
        lambda x: x.conj().imag,
        lambda x: torch.cat([x.conj(), x]),
        lambda x: x.sgn(),
        lambda x: torch.outer(x, x).mH @ x,
        lambda x: torch.fft.fft(x.real).abs().square(),
    ],
)
def test_complex_numbers(two, function):
    beside(
        function,
        torch.randn(5, dtype=torch.cfloat, generator=torch.Generator().manual_seed(0)),
        device=two[1],
    )


def test_forward_mode_over_backward(two):
    assert torch.equal(
        torch.func.hessian(lambda x: (x**3).sum())(torch.ones(2, device=two[0])).cpu(),
        6 * torch.eye(2),
    )


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_packed_sequences(two, kind):
    torch.manual_seed(0)
    layer, rows, lengths = (
        kind(4, 3, batch_first=True),
        torch.randn(3, 5, 4),
        torch.tensor([5, 3, 2]),
    )
    outputs = []
    for place in ("cpu", two[1]):
        packed = pack_padded_sequence(rows.to(place), lengths, batch_first=True)
        output = pad_packed_sequence(layer.to(place)(packed)[0], batch_first=True)[0]
        output.square().sum().backward()
        outputs.append(
            torch.cat(
                [output.detach().cpu().flatten(), layer.weight_hh_l0.grad.cpu().flatten()]
            )
        )
        layer.zero_grad()
        del output
    assert torch.allclose(*outputs, atol=1e-6)
    with pytest.raises(RuntimeError, match="lengths"):
        pack_padded_sequence(rows.to(two[0]), lengths.to(two[0]), batch_first=True)


def test_a_transformer_with_its_defaults_and_a_padding_mask(two):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1
    ).eval()
    rows, padding = (
        torch.randn(2, 4, 8),
        torch.tensor([[False] * 4, [False, False, True, True]]),
    )
    with torch.no_grad():
        expected = model(rows, src_key_padding_mask=padding)
        found = model.to(two[1])(
            rows.to(two[1]), src_key_padding_mask=padding.to(two[1])
        ).cpu()
    assert torch.allclose(found[~padding], expected[~padding], atol=1e-5)


def test_a_mask_that_learns(two):
    rows = torch.randn(4, 1, 2, 4, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    mask = torch.zeros(2, 4, 4)
    beside(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        *rows[:3],
        mask,
        device=two[0],
    )


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
def test_what_passed_unseen(two, wrong):
    with pytest.raises(RuntimeError, match=MISMATCH):
        wrong(*two)


def test_indices_of_a_device_for_a_tensor_of_the_host(two):
    with pytest.raises(
        RuntimeError, match="indices should be either on cpu or on the same device"
    ):
        torch.arange(5.0)[torch.tensor([1, 2], device=two[0])]
    assert torch.arange(5.0, device=two[0])[torch.tensor([1, 2])].tolist() == [1, 2], (
        "the other way is allowed"
    )


def test_numbers_of_the_host_are_taken(two):
    x = torch.ones(3, device=two[1])
    assert (x * torch.tensor(2.0) + torch.tensor(1)).tolist() == [3, 3, 3]
    assert x.masked_fill(x > 0, torch.tensor(5.0)).fill_(torch.tensor(4.0)).tolist() == [
        4,
        4,
        4,
    ]


def test_a_foreach_result_lies_where_its_argument_does(two):
    lists = [torch.ones(2, device=device) for device in two]
    assert [out.device for out in torch._foreach_mul(lists, 2.0)] == list(two)
    assert lists[1].new_tensor([1, 2]).device == two[1]


def test_an_expanded_tensor_costs_less_than_a_dense_one(two):
    def seconds(x):
        began = vgpu.elapsed()
        x.sum()
        return vgpu.elapsed() - began

    expanded = seconds(torch.ones(1, 1, 1, device=two[0]).expand(64, 1024, 1024))
    assert expanded < 0.1 * seconds(torch.ones(64, 1024, 1024, device=two[0]))


def test_a_worker_that_was_forked_is_refused(two):
    rows = TensorDataset(torch.ones(4, 2, device=two[0]))
    with pytest.raises(RuntimeError, match="spawn"):
        list(DataLoader(rows, 2, num_workers=1, multiprocessing_context="fork"))
    if (child := os.fork()) == 0:
        try:
            rows.tensors[0] + 1
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_each_thread_gets_its_own_exception(two):
    caught = []

    def work(number: int) -> None:
        def hook(_):
            raise ZeroDivisionError(number)

        x = torch.ones(3, device=two[0], requires_grad=True)
        (y := x * 2).register_hook(hook)
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


def test_more_than_the_host_has_is_out_of_memory(two):
    x = torch.ones(1_000_000, device=two[0])
    with pytest.raises(torch.OutOfMemoryError):
        x[:, None] * x[None, :]
