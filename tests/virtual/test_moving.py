"""A module moves to a virtual GPU and back: what a program has put on its parameters stays."""

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from multigpu.virtual import control


def test_a_moved_module_keeps_what_a_program_has_put_on_its_parameters(two):
    model = nn.Linear(2, 2)
    weight = model.weight
    reference = weakref.ref(weight)
    weight.mark = "the program's"
    calls = []
    weight.register_hook(lambda grad: calls.append(("hook", str(grad.device))))
    weight.register_post_accumulate_grad_hook(
        lambda parameter: calls.append(("after", str(parameter.grad.device)))
    )
    moves = (
        (lambda: model.to(two[0]), "vgpu:0"),
        (lambda: model.to(two[1]), "vgpu:1"),
        (lambda: model.cpu(), "cpu"),
        (lambda: model.double(), "cpu"),
    )
    for move, device in moves:
        move()
        assert model.weight is weight is reference()
        assert isinstance(weight, nn.Parameter) and weight.mark == "the program's"
        model.zero_grad()
        model(torch.ones(1, 2, device=device, dtype=weight.dtype)).sum().backward()
        assert calls == [("hook", device), ("after", device)]
        assert str(weight.device) == device
        calls.clear()
    assert type(weight) is nn.Parameter and set(vars(weight)) == {"mark"}
    assert nn.Linear(2, 2).to("meta").to_empty(device=two[1]).weight.device == two[1]


def test_load_state_dict_copies_into_the_parameter(two):
    """As without virtual GPUs: the parameter keeps its storage."""
    model = nn.Linear(2, 2)
    model.to(two[0]).cpu()
    flat = model.weight.data.view(-1)
    model.load_state_dict(nn.Linear(2, 2).state_dict())
    assert torch.equal(flat, model.weight.data.view(-1))


def test_a_module_moves_while_a_graph_is_alive(two):
    model = nn.LSTM(2, 2)
    rows = torch.ones(3, 2)
    before, _ = model(rows)
    model.to(two[0])
    with pytest.raises(RuntimeError, match="moved between forward and backward"):
        before.sum().backward()
    model(rows.to(two[0]))[0].sum().backward()
    assert all(parameter.grad.device == two[0] for parameter in model.parameters())
    alive = model(rows.to(two[0]))
    model.cpu()
    assert next(model.parameters()).grad.device.type == "cpu" and alive is not None
    model(rows)


def test_modules_that_move_without_a_graph(two):
    with torch.inference_mode():
        inside = nn.Linear(3, 2).to(two[0])
    outside = nn.Linear(3, 2)
    with torch.inference_mode():
        outside.to(two[1])
    assert inside.weight.device == two[0] and outside.weight.device == two[1]

    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    assert sparse.to(two[0]).weight.device == two[0]
    assert sparse.cpu().weight.device.type == "cpu"
    assert torch.equal(sparse.weight.to_dense(), torch.eye(3))


def test_a_model_without_numbers_cannot_be_moved_where_numbers_count(two):
    with pytest.raises(NotImplementedError, match="to_empty"):
        nn.Linear(2, 2, device="meta").to(two[0])
    control.stop()
    with control.running(1, compute=False) as (device,):
        assert nn.Linear(2, 2, device="meta").to(device).weight.device == device


def test_data_of_another_device_can_be_assigned(two):
    """As FSDP1 does it: the parameter stays the same object, and gets the device."""
    parameter = nn.Parameter(torch.ones(3))
    moved = torch.full((2,), 2.0, device=two[1])
    parameter.data = moved
    assert type(parameter.data) is type(moved) and isinstance(parameter, nn.Parameter)
    assert parameter.device == two[1] and parameter.shape == (2,) and parameter.requires_grad
    (parameter * 3).sum().backward()
    assert parameter.grad.device == two[1] and parameter.grad.tolist() == [3.0, 3.0]
    moved.zero_()
    assert parameter.tolist() == [0.0, 0.0], "they share the memory"
    parameter.grad = None
    parameter.data = torch.ones(4)
    assert parameter.device.type == "cpu" and parameter.numpy(force=True).tolist() == [1.0] * 4
    assert isinstance(parameter, nn.Parameter) and parameter.requires_grad
    plain = torch.ones(2)
    plain.data = moved
    assert plain.device == two[1] and not plain.requires_grad


def test_a_wrappers_own_tensors_move_with_it(two):
    """As DTensor's local tensor; the parameter stays the same object."""
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach() + 1))
    weight = layer.weight
    for place in (two[1], torch.device("cpu"), two[0]):
        layer.to(place)
        assert layer.weight is weight
        assert [weight.device, weight.a.device, weight.b.device] == [place] * 3
    layer(torch.ones(1, 3, device=two[0])).sum().backward()
    assert type(weight.grad) is TwoTensor


def lazy_model(**options) -> nn.Sequential:
    return nn.Sequential(
        nn.LazyConv2d(2, 3, **options), nn.LazyBatchNorm2d(**options), nn.Flatten(),
        nn.LazyLinear(2, **options),
    )  # fmt: skip


@pytest.mark.parametrize("how", ["to", "made there", "default device"])
def test_lazy_modules_get_their_memory_on_the_device(two, how):
    if how == "made there":
        model = lazy_model(device=two[1])
    elif how == "default device":
        with torch.device(two[1]):
            model = lazy_model()
    else:
        model = lazy_model().to(two[1])
    weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert weight.device == two[1]
    images = torch.randn(3, 1, 5, 5)
    model(images.to(two[1]))
    assert model[0].weight is weight
    assert {tensor.device for tensor in model.state_dict().values()} == {two[1]}
    on_cpu = lazy_model()
    on_cpu(images)
    # A lazy module reads the shapes from a file, too.
    model.load_state_dict(on_cpu.state_dict())
    outputs = []
    for copied, place in ((on_cpu, "cpu"), (model, two[1])):
        outputs.append(copied.eval()(images.to(place)))
        outputs[-1].sum().backward()
    assert torch.equal(outputs[0], outputs[1].cpu())
    optimizer.step()
    assert not torch.equal(weight.cpu(), on_cpu[0].weight)


def test_a_copy_of_a_lazy_module_is_on_its_device(two):
    model = copy.deepcopy(nn.LazyLinear(2).to(two[1]))
    model(torch.ones(1, 3, device=two[1]))
    assert model.weight.device == two[1]


def test_what_the_reducer_holds_of_a_module_has_no_memory_after_a_move(two):
    """On CUDA the reducer's tensors move too, and only its buckets stay."""
    dist.init_process_group("vgpu", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Linear(512, 512, bias=False).to(two[0])
    ddp = DistributedDataParallel(model)
    assert torch.vgpu.memory_allocated() == 2 * 2**20
    model.to("cpu")
    assert torch.vgpu.memory_allocated() == 2**20 and ddp.module is model
    model.to(two[1])
    ddp.to(two[0])
    assert [torch.vgpu.memory_allocated(device) for device in two] == [2 * 2**20, 0]
    ddp(torch.ones(1, 512, device=two[0])).sum().backward()
    assert torch.vgpu.memory_allocated() == 3 * 2**20


def test_a_graph_sees_where_a_saved_tensor_is_now(two):
    """As on CUDA, where the graph and the module hold the same tensor."""
    scale = nn.ParameterList([nn.Parameter(torch.ones(300), requires_grad=False)]).to(two[0])
    rows = torch.ones(300, device=two[0], requires_grad=True)
    out = rows * scale[0]
    before = torch.vgpu.memory_allocated()
    scale.cpu()
    assert torch.vgpu.memory_allocated() == before - 1536
    with pytest.raises(RuntimeError, match="two devices, vgpu:0 and cpu!"):
        out.sum().backward()

    out = rows * scale.to(two[0])[0]
    scale.cpu()
    scale[0].mul_(3)
    scale.to(two[0])
    out.sum().backward()
    assert rows.grad.tolist() == [3.0] * 300
