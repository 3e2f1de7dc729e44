"""Points 2 and Bad input: a virtual GPU refuses what a GPU refuses, in CUDA's words; and behaves like one otherwise."""

import copy
import io
import os
import pickle

import pytest
import torch
from commands import run
from torch import nn

import multigpu
from multigpu import vgpu
from multigpu.devices import CLASSROOM
from multigpu.errors import UserError

MISMATCH = (
    "Expected all tensors to be on the same device, but found at least two devices, {} and {}!"
)


def test_two_devices_in_one_operation(two):
    first, second = two
    x, y = torch.ones(3, device=first), torch.ones(3, device=second)
    for call in (lambda: x + y, lambda: x.add_(y), lambda: torch.where(x > 0, x, y)):
        with pytest.raises(RuntimeError, match=MISMATCH.format("vgpu:0", "vgpu:1")):
            call()
    with pytest.raises(RuntimeError, match=MISMATCH.format("vgpu:0", "cpu")):
        x * torch.ones(3)
    with pytest.raises(
        RuntimeError,
        match=MISMATCH.format("vgpu:1", "vgpu:0")
        + r" \(when checking argument for argument \w+ in method wrapper_VGPU_addmm\)",
    ):
        nn.Linear(3, 3).to(second)(x[None])
    with pytest.raises(RuntimeError, match=MISMATCH.format("vgpu:0", "vgpu:1")):
        torch.cat([x, y])
    with pytest.raises(RuntimeError, match="at least two devices"):
        nn.Conv2d(1, 1, 3).to(first)(torch.ones(1, 1, 4, 4))
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.add(x, x, out=y)


def test_what_cuda_allows_across_devices(two):
    x = torch.arange(4.0, device=two[0])
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]  # a number of the host
    assert x[torch.tensor([1, 3])].tolist() == [1, 3]  # indices of the host
    y = torch.zeros(4, device=two[1])
    y.copy_(x)
    assert y.tolist() == [0, 1, 2, 3]


def test_a_device_that_is_not_there(two):
    for call in (
        lambda: torch.ones(2, device="vgpu:2"),
        lambda: torch.ones(2).to("vgpu:7"),
        lambda: torch.vgpu.memory_allocated(5),
        lambda: torch.vgpu.set_device(3),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            call()


def test_numpy_needs_the_host(two):
    x = torch.ones(2, device=two[0])
    message = "can't convert vgpu:0 device type tensor to numpy. Use Tensor.cpu\\(\\) to copy the tensor to host memory first."
    for call in (x.numpy, x.__array__):
        with pytest.raises(TypeError, match=message):
            call()
    assert x.numpy(force=True).tolist() == [1, 1]


def test_reading_and_printing(two):
    x = torch.tensor([[1.5, 2.0], [-3.0, 4.25]], device=two[1])
    assert (
        x.sum().item() == 4.75
        and x.tolist() == [[1.5, 2.0], [-3.0, 4.25]]
        and float(x[0, 0]) == 1.5
    )
    assert (
        repr(x) == "tensor([[ 1.5000,  2.0000],\n        [-3.0000,  4.2500]], device='vgpu:1')"
    )
    assert f"{x[0, 0]:.2f}" == "1.50" and bool((x == x).all()) and len(x) == 2
    assert "grad_fn=<MulBackward0>" in repr(x.requires_grad_() * 2)
    assert (
        repr(nn.Parameter(x[0].detach()))
        == "Parameter containing:\ntensor([1.5000, 2.0000], device='vgpu:1', requires_grad=True)"
    )
    assert repr(torch.ones(0, device=two[0])) == "tensor([], device='vgpu:0')"
    assert x.is_vgpu and not x.is_cuda and x.get_device() == 1 and str(x.device) == "vgpu:1"


@pytest.mark.parametrize("weights_only", [True, False])
def test_saved_and_loaded(two, tmp_path, weights_only):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(two[1])
    update = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3, device=two[1])).sum().backward()
    update.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": update.state_dict()}, tmp_path / "last.pt"
    )
    for place in (None, "cpu", "vgpu:0", {"vgpu:1": "vgpu:0"}):
        loaded = torch.load(
            tmp_path / "last.pt", map_location=place, weights_only=weights_only
        )
        weight = loaded["model"]["0.weight"]
        assert str(weight.device) == (
            "vgpu:1" if place is None else place if isinstance(place, str) else "vgpu:0"
        )
        assert torch.equal(weight.cpu(), model[0].weight.detach().cpu())
    fresh = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    fresh.load_state_dict(loaded["model"])
    assert fresh[0].weight.device.type == "cpu" and torch.equal(
        fresh[0].weight, model[0].weight.cpu()
    )
    torch.optim.AdamW(fresh.to(two[0]).parameters()).load_state_dict(loaded["optimizer"])


def test_a_file_of_a_device_that_is_not_there(two, tmp_path):
    torch.save(torch.ones(2, device=two[1]), tmp_path / "tensor.pt")
    vgpu.stop()
    vgpu.start(count=1)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.load(tmp_path / "tensor.pt")
    assert torch.load(tmp_path / "tensor.pt", map_location="cpu").tolist() == [1, 1]


def test_pickle_and_deepcopy(two):
    model = nn.Linear(3, 2).to(two[1])
    model.weight.grad = torch.ones_like(model.weight)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert (
            isinstance(other.weight, nn.Parameter)
            and other.weight.device == two[1]
            and other.weight.requires_grad
        )
        assert (
            torch.equal(other.weight.cpu(), model.weight.cpu())
            and other.weight is not model.weight
        )
        with torch.no_grad():
            other.weight.zero_()
        assert model.weight.abs().sum() > 0
    assert copy.deepcopy(model).weight.grad.tolist() == model.weight.grad.tolist()
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model.weight * 2)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert (
        torch.load(buffer, weights_only=False, map_location="cpu").weight.device.type == "cpu"
    )


def test_to_keeps_ties_identity_and_hooks(two):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    weight, update = model[0].weight, torch.optim.SGD(model.parameters(), lr=0.1)
    for place in (two[0], two[1], torch.device("cpu")):
        model.to(place)
        assert (
            model[0].weight is weight and model[1].weight is weight and weight.device == place
        )
        assert update.param_groups[0]["params"][0] is weight
    assert model.to(two[0]).half()[0].weight.dtype is torch.float16
    assert model.vgpu(1)[0].weight.device == two[1]


def test_data_set_and_shared_views(two):
    x = torch.zeros(2, 3, device=two[0])
    view = x.view(3, 2)[1:]
    view += 1
    assert x.tolist() == [[0, 0, 1], [1, 1, 1]]
    alias = x.detach()
    alias.t_()
    assert x.shape == (2, 3) and alias.shape == (3, 2)
    assert x.tolist() == [[0, 0, 1], [1, 1, 1]] and alias.tolist() == [[0, 1], [0, 1], [1, 1]]
    x.data = torch.full((4,), 7.0, device=two[0])
    assert x.tolist() == [7, 7, 7, 7] and alias.sum().item() == 4
    x.unsqueeze_(0).resize_(1, 2)
    assert x.shape == (1, 2) and x.tolist() == [[7, 7]]
    out = torch.empty(0, device=two[0])
    torch.add(x, 1, out=out)
    assert out.tolist() == [[8, 8]]


def test_an_exception_in_backward_comes_out_as_it_is(two):
    """It has to cross autograd's engine; without engine.py the process aborts here."""
    weight = torch.ones(3, device=two[1], requires_grad=True)

    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("forgotten")

    with pytest.raises(KeyError, match="forgotten"):
        (Careless.apply(weight) * 3).sum().backward()
    out = weight * 2

    def hook(grad):
        raise KeyboardInterrupt

    out.register_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        (out * 3).sum().backward()
    (weight * 3).sum().backward()
    assert weight.grad.tolist() == [3, 3, 3]


def test_an_operation_that_the_backend_cannot_do(two):
    library = torch.library.Library("vgputest", "DEF")
    library.define("nowhere(Tensor x) -> Tensor")
    with pytest.raises(
        NotImplementedError, match=r"Virtual GPUs cannot run the operation .*nowhere"
    ):
        torch.ops.vgputest.nowhere(torch.ones(2, device=two[0]))


def test_starting_twice_and_stopping():
    vgpu.stop()  # nothing runs: nothing to do
    with pytest.raises(UserError, match="no virtual GPUs are running"):
        vgpu.elapsed()
    vgpu.start(count=1)
    try:
        with pytest.raises(UserError, match="running already"):
            vgpu.start(count=2)
        x = torch.ones(2, device="vgpu:0")
    finally:
        vgpu.stop()
    assert torch.vgpu.device_count() == 0 and not torch.vgpu.is_available()
    with pytest.raises(RuntimeError, match="No virtual GPUs are running"):
        torch.ones(2, device="vgpu:0")
    with vgpu.running(count=1):
        for use in (
            lambda: x + 1,
            lambda: x.cpu(),
            lambda: x.view(2, 1),
            lambda: x[0].item(),
            lambda: x.add_(1),
        ):
            with pytest.raises(RuntimeError, match="have been stopped"):
                use()
        assert repr(x) == "tensor(..., size=(2,), device='vgpu:0')"
        assert torch.vgpu.memory_allocated(0) == 0


def test_stopping_puts_torch_back():
    from torch.nn.parallel import comm

    before = (
        torch.__future__.get_swap_module_params_on_conversion(),
        torch.utils.swap_tensors,
        comm.gather,
    )
    with vgpu.running(count=1):
        assert comm.gather is not before[2]
    assert before == (
        torch.__future__.get_swap_module_params_on_conversion(),
        torch.utils.swap_tensors,
        comm.gather,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"count": 0}, "count is 0"),
        ({"count": "2"}, "count is '2'"),
        ({"gpu": "V1000"}, 'there is no GPU "V1000": use one of V100-16GB'),
        ({"link": "NVLink9"}, 'there is no link "NVLink9"'),
        ({"memory": "64 MB"}, "memory is '64 MB'"),
        ({"memory": -1}, "memory is -1"),
        ({"memory": True}, "memory is True"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(UserError, match=words):
        vgpu.start(**arguments)
    assert torch.cuda.is_available() or not vgpu.devices()


def test_an_unsupported_torch():
    from multigpu.vgpu.patches.backend import check_version

    for version in ("2.10.1", "2.14.0", "3.0.0"):
        with pytest.raises(
            UserError, match=f"tried with torch 2.11 to 2.13, and this is torch {version}"
        ):
            check_version(version)
    for version in ("2.11.0", "2.12.1+cu128", "2.13.0+cpu"):
        check_version(version)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_after_start():
    done = run("python", "-c", "\n".join((
        "import os, sys, torch",
        "from multigpu import vgpu",
        "vgpu.start(1)",
        "if os.fork() == 0:",
        "    try: torch.ones(2, device='vgpu:0')",
        "    except RuntimeError as error: print(error); sys.stdout.flush(); os._exit(3)",
        "print('child', os.waitstatus_to_exitcode(os.wait()[1]))",
    )))  # fmt: skip
    assert (
        "Cannot re-initialize virtual GPUs in forked subprocess" in done.stdout
        and "child 3" in done.stdout
    )


def test_gpus(capsys):
    assert not torch.cuda.is_available(), "this test is about a machine without GPUs"
    try:
        first, second = multigpu.gpus(2)
        said = capsys.readouterr().out
        assert (
            said.count("\n") == 1
            and "no GPU" in said
            and "simulated: 2 × V100-16GB, NVLink2" in said
        )
        assert (
            [str(first), str(second)]
            == ["vgpu:0", "vgpu:1"]
            == [str(device) for device in multigpu.gpus(2)]
        )
        with pytest.raises(
            UserError, match="3 GPUs were asked for, and only 2 virtual ones are running"
        ):
            multigpu.gpus(3)
    finally:
        vgpu.stop()


def test_gpus_takes_real_ones_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert multigpu.gpus(2) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setenv("SLURM_CLUSTER_NAME", CLASSROOM)  # whose GPUs are pretended
    try:
        assert multigpu.gpus(1) == [torch.device("vgpu", 0)]
    finally:
        vgpu.stop()
    with pytest.raises(AttributeError):
        multigpu.nothing  # noqa: B018
