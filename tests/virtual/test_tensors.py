"""Tensors and modules on a virtual GPU have the methods and properties that they have on a
GPU."""

import importlib
import re

import pytest
import torch
from torch import nn

from multigpu.virtual import control


def test_new_is_on_the_device_of_its_tensor(two):
    x = torch.ones(2, dtype=torch.double, device=two[1])
    for made, shape in (
        (x.new(3), (3,)),
        (x.new(2, 3), (2, 3)),
        (x.new(torch.Size([2])), (2,)),
        (x.new(), (0,)),
    ):
        assert made.shape == shape
        assert made.dtype is torch.double
        assert made.device == two[1]
    assert x.new([1, 2]).tolist() == [1, 2]
    assert x.new((1, 2)).device == two[1]
    assert x.new(2, device=two[0]).is_vgpu


def test_code_that_compares_torchs_functions_by_identity(two):
    """TorchScript and the default device find torch's functions, although some are
    replaced."""
    # It scripts functions when it is imported.
    importlib.import_module("torch.distributed.optim")

    @torch.jit.script
    def plus(x: torch.Tensor):
        return x + torch.tensor([1.0])

    assert plus(torch.zeros(1)).item() == 1
    with torch.device("vgpu:1"):
        assert torch.as_tensor([1.0]).device == two[1]
    control.stop()
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta


def test_a_foreach_result_is_on_the_device_of_its_argument(two):
    tensors = [torch.ones(2, device=device) for device in two]
    assert [out.device for out in torch._foreach_mul(tensors, 2.0)] == list(two)
    assert tensors[1].new_tensor([1, 2]).device == two[1]


def test_numpy_needs_the_host(two):
    x = torch.ones(2, device=two[0])
    message = (
        r"can't convert vgpu:0 device type tensor to numpy. "
        r"Use Tensor.cpu\(\) to copy the tensor to host memory first."
    )
    for call in (x.numpy, x.__array__):
        with pytest.raises(TypeError, match=message):
            call()
    assert x.numpy(force=True).tolist() == [1, 1]


def test_reading_and_printing(two):
    x = torch.tensor([[1.5, 2.0], [-3.0, 4.25]], device=two[1])
    assert x.sum().item() == 4.75
    assert x.tolist() == [[1.5, 2.0], [-3.0, 4.25]]
    assert float(x[0, 0]) == 1.5
    rows = "[[ 1.5000,  2.0000],\n        [-3.0000,  4.2500]]"
    assert repr(x) == f"tensor({rows}, device='vgpu:1')"
    assert f"{x[0, 0]:.2f}" == "1.50"
    assert bool((x == x).all())
    assert len(x) == 2
    assert torch.tensor([x[0, 0], 5.0]).tolist() == [1.5, 5]
    assert torch.tensor([x[0, 0], x[0, 1]], device=two[0]).tolist() == [1.5, 2]
    assert "grad_fn=<MulBackward0>" in repr(x.requires_grad_() * 2)
    parameter = nn.Parameter(x[0].detach())
    shown = "tensor([1.5000, 2.0000], device='vgpu:1', requires_grad=True)"
    assert repr(parameter) == f"Parameter containing:\n{shown}"
    assert repr(torch.ones(0, device=two[0])) == "tensor([], device='vgpu:0')"
    # torch formats a tensor without dimensions as its number, but not a Parameter.
    third = torch.tensor(1 / 3, dtype=torch.float64, device=two[1])
    assert f"{third} {third.requires_grad_() * 2}" == f"{1 / 3} {2 / 3}"
    assert f"{nn.Parameter(third)}".startswith("Parameter containing:")
    assert f"{x}" == repr(x)
    assert x.is_vgpu
    assert not x.is_cuda
    assert x.get_device() == 1
    assert str(x.device) == "vgpu:1"
    assert (x.nbytes, x.itemsize, x.element_size()) == (16, 4, 4)
    assert not (x.is_sparse or x.is_quantized or x.is_meta)
    x.note = "kept"
    assert x.note == "kept"


def test_layouts_that_virtual_gpus_lack(two):
    x = torch.eye(2, device=two[0])
    calls = {
        "torch.sparse_csr: use to_sparse()": x.to_sparse_csr,
        "torch.sparse_csc: use to_sparse()": x.to_sparse_csc,
        "layout=torch.jagged": lambda: torch.nested.nested_tensor([x, x]),
    }
    for words, call in calls.items():
        with pytest.raises(NotImplementedError, match=re.escape(words)):
            call()
    assert (x.to_sparse() @ x).tolist() == [[1, 0], [0, 1]]


def test_a_subclass_that_is_no_wrapper(two):
    class Named(torch.Tensor):
        pass

    x = torch.ones(2, 3, device=two[0])
    for call in (lambda: x.as_subclass(Named), lambda: x.cpu().as_subclass(Named).to(two[0])):
        with pytest.raises(TypeError, match=r"vgpu:0 cannot become a Named.*attribute"):
            call()
    assert x.as_subclass(torch.Tensor).add_(1).device == two[0]
    assert x.tolist() == [[2, 2, 2]] * 2
    assert x.names == (None, None)
