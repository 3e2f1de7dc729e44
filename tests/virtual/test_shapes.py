"""With compute=False a model of any size is placed, metered and timed without numbers."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
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
