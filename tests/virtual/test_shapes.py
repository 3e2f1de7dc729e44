"""With compute=False a model of any size is placed, metered and timed without numbers."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from multigpu.virtual import control


def allocated(device: torch.device) -> int:
    return torch.vgpu.memory_allocated(device)


def test_one_number_that_was_not_computed_can_be_printed_but_not_decided_by():
    with control.running(count=1, compute=False) as (device,):
        loss = torch.ones(3, device=device).sum()
        number = loss.item()
        for text in (
            str(number),
            f"{number:.4f}",
            f"{loss:.2f}",
            f"{loss}",
            str(1 - number / 3 + 2**number),
        ):
            assert text == "unknown"
        assert f"{number:>9.3f}|{number:9}|{number:^11,}" == "  unknown|unknown  |  unknown  "
        assert str(sum([number, number])) == "unknown"
        assert repr(pickle.loads(pickle.dumps(number))) == "unknown"
        assert (loss > 2).item() is not True
        for value in (float(loss), float(loss.cpu()), torch.tensor([number]).item()):
            assert value != value, "NaN on the host"
        assert torch.equal(torch.ones(2) * number, torch.full((2,), torch.nan)) is False
        waited = control.elapsed()
        loss.item()
        assert control.elapsed() > waited, "the host waits for the number"
        for decide in (
            lambda: bool(number),
            lambda: bool(loss > 2),
            lambda: number < 3,
            lambda: number == 3,
            lambda: min(number, 3),
            lambda: int(number),
            lambda: math.ceil(number),
            lambda: math.isnan(number),
            lambda: math.isfinite(number),
        ):
            with pytest.raises(RuntimeError, match=r"^test_shapes.py, line \d+: .* needs num"):
                decide()
    assert math.isnan(number) and math.isfinite(1.0), "math is restored"


def test_a_copy_of_one_unknown_number_is_unknown():
    with control.running(count=1, compute=False) as (device,):
        loss = torch.ones(3, device=device, requires_grad=True).sum().cpu()
        total = torch.zeros(())
        total += loss.detach()
        mean = torch.stack([loss.detach(), total]).mean()
        for number in (loss, mean, copy.deepcopy(mean)):
            assert f"{number:.3f}" == f"{number.item()}" == "unknown"
            assert "unknown" in repr(number) and f"{number.tolist()}" == "unknown"
            assert np.isnan(number.detach().numpy())
        file = io.BytesIO()
        torch.save({"loss": mean}, file)
        file.seek(0)
        assert torch.load(file)["loss"].isnan()
        loss.backward()
        for decide in (
            lambda: bool(loss < 1),
            lambda: bool(total > mean),
            lambda: bool(torch.isnan(mean).any()),
            lambda: int(mean),
            lambda: range(3)[mean],
            lambda: torch.equal(mean, torch.zeros(())),
            lambda: mean.item() < 1,
        ):
            with pytest.raises(RuntimeError, match=r"^test_shapes.py, line \d+: .* needs num"):
                decide()


def test_truncated_normal_numbers_need_no_decision():
    with control.running(count=1, compute=False) as (device,):
        assert nn.init.trunc_normal_(torch.empty(3, 4, device=device)).shape == (3, 4)
        assert nn.init.trunc_normal_(torch.empty(99)).abs().max() <= 2


def test_small_integer_tensors_keep_their_numbers_until_a_shape_is_written():
    """DDP needs them to agree on its buckets."""
    with control.running(count=2, compute=False) as (first, second):
        counter = torch.zeros((), dtype=torch.long, device=first)
        counter.add_(2)
        indices = torch.tensor([1, 2, 0]).to(first)
        assert counter.item() == 2
        assert indices.to(second).tolist() == [1, 2, 0]
        assert (indices * 2).tolist() == [2, 4, 0]
        table = torch.ones(4, 2, device=first)
        assert table[indices].shape == (3, 2)
        assert indices.tolist() == [1, 2, 0]
        indices.copy_(table[:3, 0])
        with pytest.raises(RuntimeError, match="needs numbers"):
            indices.tolist()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_same_memory_and_time_as_with_numbers(kind):
    results = []
    for compute in (True, False):
        with control.running(count=2, compute=compute) as (first, second):
            body = nn.Sequential(nn.Embedding(50, 16), nn.Dropout(0.1)).to(first)
            head = kind(16, 8, batch_first=True).to(second)
            attention = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).to(first)
            update = torch.optim.Adam(
                [*body.parameters(), *head.parameters(), *attention.parameters()]
            )
            for _ in range(2):
                update.zero_grad()
                tokens = torch.zeros(4, 9, dtype=torch.long, device=first)
                out = head(attention(body(tokens)).to(second))[0]
                out.square().mean().backward()
                update.step()
            peaks = [torch.vgpu.max_memory_allocated(device) for device in (first, second)]
            now = [allocated(device) for device in (first, second)]
            results.append((peaks, now, control.elapsed(), control.timeline().events))
    assert results[0] == results[1]


def test_all_views_of_a_storage_lose_their_numbers():
    with control.running(count=1, compute=False) as (device,):
        shapes = torch.ones(10, device=device)
        for write in (
            lambda whole, part: part.copy_(shapes[:3]),
            lambda whole, part: whole.add_(shapes.long()),
            lambda whole, part: whole.__setitem__(slice(2, 5), shapes[:3].long()),
            lambda whole, part: torch.add(shapes[:3].long(), 1, out=part),
        ):
            whole = torch.arange(10, device=device)
            part = whole[2:5]
            other = whole[3:]
            before = torch.vgpu.memory_allocated()
            write(whole, part)
            for tensor in (whole, part, other, whole.view(5, 2)):
                assert repr(tensor).startswith("tensor(..., size=")
                with pytest.raises(RuntimeError, match="needs numbers"):
                    tensor.tolist()
            assert torch.vgpu.memory_allocated() == before
            assert other.add_(1) is other
            assert other.shape == (7,)
            assert torch.vgpu.memory_allocated() == before
            del whole, part, other, tensor
        table = torch.ones(4, 2, device=device)
        rows = torch.tensor([1, 2], device=device)
        table[rows] = 0.0
        assert rows.tolist() == [1, 2], "a tensor that is only read keeps its numbers"
        torch.manual_seed(0)
        state = torch.get_rng_state()
        torch.rand((), device=device)
        torch.randint(3, (2,), device=device)
        same = torch.equal(state, torch.get_rng_state())
        assert same, "the state of the host's generator changed"


# ---- copies on the host: a program saves them, loads them and moves them back ----


@pytest.fixture
def shapes():
    """Two virtual GPUs whose tensors have shapes only."""
    with control.running(count=2, compute=False) as devices:
        yield devices


def trained(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after a step."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 64, device=device)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("location", [None, "cpu", "vgpu:0", {"vgpu:0": "vgpu:1"}])
def test_a_checkpoint_of_shapes(shapes, location, weights_only):
    model, optimizer = trained(shapes[0])
    file = io.BytesIO()
    began = control.elapsed()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    nbytes = 4 * 3 * sum(parameter.numel() for parameter in model.parameters())
    assert control.elapsed() - began > nbytes / 64e9, "the numbers would be copied to the host"
    assert file.tell() < nbytes / 4, "the file has no numbers"
    file.seek(0)
    before = torch.vgpu.memory_allocated(shapes[0])
    state = torch.load(file, map_location=location, weights_only=weights_only)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert optimizer.state[model[0].weight]["exp_avg"].device == shapes[0]
    # map_location moves the number of steps of each parameter, too: four blocks.
    more = 4 * 512 if location == "vgpu:0" else 0
    assert torch.vgpu.memory_allocated(shapes[0]) == before + more
    model(torch.ones(3, 64, device=shapes[0])).sum().backward()
    optimizer.step()


def test_a_module_that_moves_to_the_host_and_back(shapes):
    model, _ = trained(shapes[0])
    weight = model[0].weight
    model.cpu()
    assert model[0].weight is weight and isinstance(weight, nn.Parameter)
    assert weight.device == torch.device("cpu")
    assert model(torch.ones(3, 64)).shape == (3, 8)
    assert model.half()[0].weight.dtype == torch.float16
    assert (weight + 1).dtype == torch.float16
    model.to(shapes[1])
    assert model[0].weight is weight and weight.device == shapes[1]
    assert model(torch.ones(3, 64, device=shapes[1], dtype=torch.float16)).shape == (3, 8)


def test_the_host_computes_with_shapes(shapes):
    weight = torch.ones(32, 64, device=shapes[0]).cpu()
    assert (weight.t() @ weight).shape == (64, 64)
    assert torch.cat([weight, torch.ones(1, 64)]).shape == (33, 64)
    assert weight.add_(torch.ones(64)) is weight
    assert [part.shape for part in weight.split(16)] == [(16, 64), (16, 64)]
    assert copy.deepcopy(weight).shape == (32, 64)
    assert weight[torch.tensor([1, 5])].shape == (2, 64)
    assert repr(weight) == "tensor(unknown, size=(32, 64), dtype=torch.float32)"
    mean = weight.mean()
    assert f"{mean:.3f}" == str(mean.item()) == str(mean.tolist()) == "unknown"
    assert f"{weight}" == repr(weight)
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{weight:.3f}"
    assert float(mean) != float(mean), "NaN"


def test_copies_of_a_module_on_the_host_have_parameters(shapes):
    """With deepcopy and pickle their weights were no parameters, and needed no gradient."""
    model, _ = trained(shapes[0])
    model[1].weight.requires_grad_(False)
    model.cpu()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other[0].weight is not model[0].weight
        for one, weight in zip(model.parameters(), other.parameters(), strict=True):
            assert isinstance(weight, nn.Parameter)
            assert (weight.shape, weight.requires_grad) == (one.shape, one.requires_grad)
            assert weight.device == torch.device("cpu")
    leaf = torch.ones(2, device=shapes[0]).cpu().requires_grad_()
    assert copy.deepcopy(leaf).requires_grad
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(leaf * 2)


def test_a_shape_that_changes_in_place(shapes):
    unknown = torch.ones(2, 3, device=shapes[0]).cpu()
    assert unknown.t_() is unknown
    assert unknown.shape == (unknown + 1).shape == (3, 2)
    assert unknown.resize_(4, 4).shape == (unknown + 1).shape == (4, 4)
    for new in (torch.ones(5, device=shapes[0]).cpu(), torch.ones(6), unknown.clone()):
        unknown.data = new
        assert unknown.shape == (unknown + 1).shape == new.shape
        assert type(unknown) is type(new)


def test_memory_that_a_tensor_without_numbers_does_not_have(shapes):
    """Each of these ended the process by a segmentation fault."""
    model, _ = trained(shapes[0])
    model.cpu().share_memory()
    weight = model[0].weight.detach()
    assert weight.share_memory_() is weight
    for read in (torch.from_dlpack, torch.utils.dlpack.to_dlpack):
        with pytest.raises(RuntimeError, match="DLPack needs numbers"):
            read(weight)


@pytest.mark.parametrize("backend", ["vgpu", "gloo"])
def test_gloo_cannot_send_a_tensor_without_numbers(shapes, backend):
    """With "vgpu", all_gather ended the process; with "gloo", it changed nothing."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    unknown = torch.ones(3, device=shapes[0]).cpu()
    for call in (
        lambda: dist.all_gather([torch.zeros(3)], unknown),
        lambda: dist.all_reduce(unknown),
        lambda: dist.broadcast(unknown, 0),
    ):
        with pytest.raises(RuntimeError, match="a collective of tensors of the host needs"):
            call()
    everyones = [None]
    dist.all_gather_object(everyones, unknown)
    assert everyones[0].shape == (3,)
    dist.destroy_process_group()


def test_a_gpu_does_not_compute_with_a_tensor_of_the_host(shapes):
    on_device = torch.ones(2, 2, device=shapes[0])
    with pytest.raises(RuntimeError, match="two devices, vgpu:0 and cpu!"):
        on_device + on_device.cpu()


def test_what_needs_numbers(shapes):
    on_device = torch.ones(4, 4, device=shapes[0])
    assert repr(on_device) == "tensor(..., size=(4, 4), device='vgpu:0')"
    unknown = on_device.cpu()
    for read in (
        on_device.tolist,
        on_device.nonzero,
        lambda: bool(on_device[0, 0] > 0),
        lambda: unknown.numpy(),
        lambda: np.asarray(unknown),
        lambda: unknown.tolist(),
        lambda: unknown.nonzero(),
        lambda: unknown[unknown > 0],
        lambda: bool((unknown > 0).all()),
        lambda: int(unknown[0, 0]),
        lambda: torch.zeros(4, 4).copy_(unknown),
        lambda: torch.zeros(4).add_(unknown[0]),
    ):
        with pytest.raises(RuntimeError, match=r"^test_shapes.py, line \d+: .* needs"):
            read()
