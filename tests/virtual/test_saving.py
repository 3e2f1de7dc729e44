"""Tensors of virtual GPUs in files: torch.save, torch.load, pickle, and copies."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

from multigpu.errors import UserError
from multigpu.virtual import control


def allocated(place: str) -> int:
    """Bytes allocated on a virtual GPU; 0 for the CPU."""
    return 0 if place == "cpu" else torch.vgpu.memory_allocated(place)


def test_tied_tensors_stay_tied_in_a_file(two, tmp_path):
    layers = {"embed": nn.Embedding(512, 8), "out": nn.Linear(8, 512, bias=False)}
    model = nn.ModuleDict(layers).to(two[1])
    model["out"].weight = model["embed"].weight
    view = model["embed"].weight.detach().t()[2:4]
    state = model.state_dict() | {"view": view}
    nbytes = 512 * 8 * 4
    file = tmp_path / "tied.pt"
    torch.save(state, file)
    assert file.stat().st_size < 1.5 * nbytes
    for map_location, place in (
        (None, "vgpu:1"),
        ("vgpu:0", "vgpu:0"),
        ({"vgpu:1": "vgpu:0"}, "vgpu:0"),
        ("cpu", "cpu"),
    ):
        before = allocated(place)
        loaded = torch.load(file, map_location=map_location)
        assert [str(tensor.device) for tensor in loaded.values()] == [place] * 3
        assert allocated(place) - before == (0 if place == "cpu" else nbytes)
        assert torch.equal(loaded["view"].cpu(), view.cpu())
        loaded["out.weight"].fill_(7)
        assert (loaded["embed.weight"] == 7).all()
        assert (loaded["view"] == 7).all()
        del loaded
        assert allocated(place) == before
    unpickled = pickle.loads(pickle.dumps(model))
    assert unpickled["out"].weight is unpickled["embed"].weight
    assert unpickled["out"].weight.device == two[1]
    # As between processes.
    before = allocated("vgpu:1")
    sent = pickle.loads(ForkingPickler.dumps([model["out"].weight, view]))
    assert allocated("vgpu:1") == before, "who has made the memory counts it"
    assert [tensor.device for tensor in sent] == [two[1], two[1]]
    assert isinstance(sent[0], nn.Parameter) and sent[0].requires_grad
    with torch.no_grad():
        sent[0].fill_(3)
    assert (sent[1] == 3).all() and (view == 3).all(), "all share their memory"
    with pytest.raises(RuntimeError, match="not a leaf cannot go to another process"):
        ForkingPickler.dumps(model["out"].weight * 2)
    control.stop()
    with pytest.raises(RuntimeError, match=r"vgpu:1.*stopped.*create it again"):
        torch.save(state, file)


def test_pickle_and_deepcopy(two):
    model = nn.Linear(3, 2).to(two[1])
    model.weight.grad = torch.ones_like(model.weight)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert isinstance(other.weight, nn.Parameter)
        assert other.weight.device == two[1]
        assert other.weight.requires_grad
        assert torch.equal(other.weight.cpu(), model.weight.cpu())
        assert other.weight is not model.weight
        with torch.no_grad():
            other.weight.zero_()
        assert model.weight.abs().sum() > 0
    # As in torch, which copies gradients of other tensors, but none of parameters.
    assert copy.deepcopy(model).weight.grad is None
    leaf = torch.ones(2, device=two[0], requires_grad=True)
    (leaf * 3).sum().backward()
    assert copy.deepcopy(leaf).grad.tolist() == [3, 3]
    sparse = torch.eye(2, device=two[1]).to_sparse()
    assert copy.deepcopy(sparse).to_dense().tolist() == [[1, 0], [0, 1]]
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model.weight * 2)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False, map_location="cpu")
    assert loaded.weight.device.type == "cpu"


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_module_of_torch_jit_stays_on_the_host(two):
    file = io.BytesIO()
    # torch compiles for itself: here this is torch's code.
    script = eval(
        "lambda model: torch.jit.script(model)", {"torch": torch, "__name__": "torch"}
    )
    torch.jit.save(script(nn.Linear(3, 2)), file)
    file.seek(0)
    with pytest.raises(UserError, match="load its state_dict"):
        torch.jit.load(file, map_location=two[1])
    loaded = torch.jit.load(file, map_location="cpu").double()
    with pytest.raises(UserError, match="load its state_dict"):
        loaded.to(two[1])
    assert loaded.weight.device.type == "cpu" and loaded.weight.dtype is torch.float64
