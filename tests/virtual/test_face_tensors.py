"""Tensors of virtual GPUs look like those of CUDA, however a program makes and moves them."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from multigpu.errors import UserError
from multigpu.virtual import left_out
from multigpu.virtual.face import kernels
from multigpu.virtual.ops import dispatch, op_info

MAKERS = {
    "ones": lambda device: torch.ones(2, device=device),
    "randn": lambda device: torch.randn(2, device=device),
    "tensor": lambda device: torch.tensor([1.0, 2.0], device=device),
    "asarray": lambda device: torch.asarray([1.0, 2.0], device=device),
    "sparse": lambda device: torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], device=device),
    "zeros_like": lambda device: torch.zeros_like(torch.ones(2), device=device),
    "new_zeros": lambda device: torch.ones(2).new_zeros(2, device=device),
    "to": lambda device: torch.ones(2).to(device),
    "to device=": lambda device: torch.ones(2).to(device=device, dtype=torch.float64),
    "cuda": lambda device: torch.ones(2).cuda(device),
    "from the other GPU": lambda device: torch.ones(2, device="cuda:0").to(device),
    "module": lambda device: nn.Linear(2, 2).to(device).weight,
    "tril_indices": lambda device: torch.tril_indices(2, 2, device=device),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("device", ["cuda:1", torch.device("cuda", 1), "cuda", 1])
def test_a_device_is_taken_and_shown(cuda, maker, device):
    torch.cuda.set_device(1)
    made = MAKERS[maker](device)
    assert made.device == torch.device("cuda:1") and made.is_cuda and made.get_device() == 1
    assert made.layout is not torch.strided or "device='cuda:1'" in repr(made)


def test_devices_are_torchs_own(cuda):
    device = torch.device("cuda:1")
    assert isinstance(device, torch.device) and pickle.loads(pickle.dumps(device)) == device
    assert issubclass(type(device), torch.device)
    assert torch.device(type="cuda", index=1) == device


def test_cuda_refuses_the_cpu(cuda):
    with pytest.raises(RuntimeError, match="Invalid device, must be cuda device"):
        torch.ones(2).cuda("cpu")


def test_names_of_types(cuda):
    tensor = torch.ones(2, device="cuda")
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.long().type() == "torch.cuda.LongTensor"
    assert torch.ones(2).type() == "torch.FloatTensor"
    for wanted in (torch.cuda.HalfTensor, "torch.cuda.HalfTensor"):
        half = torch.ones(2).type(wanted)
        assert half.is_cuda and half.dtype == torch.half
    assert torch.ones(2).type(torch.float64).dtype == torch.float64
    made = torch.cuda.FloatTensor([1.0, 2.0])
    assert made.is_cuda and isinstance(made, torch.cuda.FloatTensor)
    assert not isinstance(made.cpu(), torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor(3).shape == (3,)


def test_the_default_device(cuda):
    torch.set_default_device("cuda")
    try:
        tensors = [torch.randn(2), torch.tensor([1]), nn.Linear(2, 2).weight, torch.arange(3)]
        assert all(tensor.is_cuda for tensor in tensors)
        assert torch.tensor([1], device="cpu").device.type == "cpu"
        assert torch.get_default_device() == torch.device("cuda:0")
        torch.cuda.set_device(1)
        assert torch.tensor([1]).device == torch.randn(1).device == torch.device("cuda:1")
    finally:
        torch.set_default_device(None)
    with torch.device("cuda:1"):
        assert torch.tensor([1]).device == torch.device("cuda:1")
    assert torch.tensor([1]).device.type == "cpu"


@pytest.mark.filterwarnings("ignore:.*set_default_tensor_type")
def test_the_default_tensor_type(cuda):
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    try:
        assert torch.zeros(2).is_cuda
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")
    assert not torch.zeros(2).is_cuda


def test_other_wrappers_show_the_device(cuda):
    both = TwoTensor(torch.ones(2, device="cuda:1"), torch.ones(2, device="cuda:1"))
    assert both.device == torch.device("cuda:1") and both.is_cuda
    both.requires_grad_()
    (both * 2).sum().backward()
    assert type(both.grad) is TwoTensor and both.grad.device == torch.device("cuda:1")


def test_a_nested_tensor_goes_through_a_layer(cuda):
    """Autograd asked for CUDA's device guard here, and the process aborted."""
    rows = [torch.randn(2, 3), torch.randn(4, 3)]
    layer = nn.Linear(3, 2)
    expected = layer(torch.cat(rows))
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda:1")
    out = layer.cuda(1)(nested)
    assert out.device == torch.device("cuda:1")
    assert torch.equal(out.values().cpu(), expected)
    out.values().sum().backward()
    assert layer.bias.grad.tolist() == [6, 6]


def test_torch_jit_is_left_out(cuda, capsys):
    @torch.jit.script
    def place(x):
        return x.is_cuda, x.cuda().device

    left_out.notes.clear()
    assert place(torch.ones(1, device="cuda:1")) == (True, cuda[0])
    assert capsys.readouterr().err == ""
    layer = nn.Linear(2, 1)
    assert torch.jit.script(layer) is layer
    assert torch.jit.trace(layer, torch.ones(1, 2)) is layer
    assert capsys.readouterr().err.count("torch.jit is left out") == 1
    with pytest.raises(UserError, match="without virtual GPUs, from a state_dict"):
        torch.jit.save(layer, io.BytesIO())
    row = torch.ones(1, 2, device="cuda")
    _, tangent = torch.func.jvp(layer.cuda(), (row,), (row,))
    assert tangent.device == cuda[0], "torch compiles derivatives for itself"


def test_files_have_cudas_devices(cuda):
    file = io.BytesIO()
    torch.save({"weight": torch.ones(2, device="cuda:1")}, file)
    for location, device in (
        (None, "cuda:1"),
        ("cpu", "cpu"),
        ("cuda:0", "cuda:0"),
        ({"cuda:1": "cuda:0"}, "cuda:0"),
        (lambda storage, location: storage, "cpu"),
        (lambda storage, location: storage.cuda(0), "cuda:0"),
        (lambda storage, location: storage.cuda(), "cuda:0"),
    ):
        file.seek(0)
        loaded = torch.load(file, map_location=location)["weight"]
        assert str(loaded.device) == device and loaded.tolist() == [1, 1]
    assert copy.deepcopy(nn.Linear(2, 2).cuda(1)).weight.device == torch.device("cuda:1")


def changed_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    return y.add_(1).sum()


ERRORS = {
    "two devices": (
        lambda x: x + torch.ones(2, device="cuda:1"),
        "at least two devices, cuda:0 and cuda:1!",
    ),
    "matrix": (lambda x: F.linear(torch.ones(1, 2), x[None]), "in method wrapper_CUDA_"),
    "no such GPU": (
        lambda x: torch.ones(2, device="cuda:9"),
        "CUDA error: invalid device ordinal",
    ),
    "no GPU for a storage": (
        lambda x: torch.ones(2).untyped_storage().cuda(9),
        "CUDA error: invalid device ordinal",
    ),
    "a set_device": (lambda x: torch.cuda.set_device(7), "--gpus 8"),
    "numpy": (lambda x: x.numpy(), "can't convert cuda:0 device type tensor to numpy"),
    "generator": (
        lambda x: torch.rand(2, device="cuda", generator=torch.Generator()),
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "a generator of a GPU": (
        lambda x: torch.randperm(2, generator=torch.Generator(device="cuda")),
        "Expected a 'cpu' device type for generator but found 'cuda'",
    ),
    "a change in place": (
        lambda x: changed_in_place(x.requires_grad_()).backward(),
        "[torch.cuda.FloatTensor [2]], which is output 0 of Exp",
    ),
    "to_dlpack": (lambda x: torch.utils.dlpack.to_dlpack(x), "cuda:0 is a virtual GPU"),
    "from_dlpack": (torch.from_dlpack, "copy the tensor to the CPU first"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_cudas(cuda, name):
    call, message = ERRORS[name]
    with pytest.raises((RuntimeError, TypeError, BufferError)) as error:
        call(torch.ones(2, device="cuda"))
    assert message in str(error.value)


def test_fake_tensors_are_copied_without_cudas_guard(cuda):
    """DTensor finds the shapes of its operations on such tensors."""
    with FakeTensorMode():
        drawn = torch.empty(2, device="cuda:1").uniform_(-1.0, 1.0)
        assert drawn.copy_(torch.ones(2, device="cuda:1")).device == torch.device("cuda:1")


def test_fake_tensors_have_gradients(cuda):
    """Autograd asked for CUDA's device guard here, and the process aborted."""
    with FakeTensorMode():
        rows = torch.ones(2, 3).to("cuda:1")
        weight = torch.ones(3, device="cuda:1", requires_grad=True)
        (rows * weight).sum().backward()
    assert rows.device == weight.grad.device == torch.device("cuda:1")


def test_a_model_is_exported(cuda):
    """As torch.distributed.pipelining's `pipeline` does it."""
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).cuda()
    rows = torch.randn(4, 3, device="cuda")
    exported = torch.export.export(model, (rows,)).module()
    assert torch.equal(exported(rows), model(rows))
    graph = make_fx(lambda x: torch.autograd.grad((x * x).sum(), x)[0], tracing_mode="fake")
    assert torch.equal(graph(rows.requires_grad_())(rows), rows * 2)


def test_a_recurrent_layer_on_another_device_than_its_rows(cuda):
    rows = torch.ones(2, 1, 4)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        layer = kind(4, 3).to("cuda:1")
        with pytest.raises(RuntimeError, match=r"found input tensor at cpu .* at cuda:1$"):
            layer(rows)
        with pytest.raises(RuntimeError, match=r"found input tensor at cuda:0 .* at cuda:1$"):
            layer(rows.cuda())


def test_operations_for_which_a_cuda_build_has_its_own_kernels(cuda, monkeypatch):
    """On a CUDA build of torch these kernels are replaced: here as if this was one."""
    monkeypatch.setattr(dispatch, "_infos", {})
    undo = kernels._own_kernels()
    try:
        rows = torch.ones(2, 2, device="cuda")
        assert (rows @ rows).sum().item() == 8
        assert torch.tril_indices(2, 2, device="cuda").device == cuda[0]
    finally:
        undo()
        op_info.DISPATCHING_KERNELS.clear()
