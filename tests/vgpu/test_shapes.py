"""Point 6: with compute=False a model of any size is placed, metered and timed without numbers."""

import sys
import time

import pytest
import torch
from commands import ROOT
from torch import nn

from multigpu import vgpu

sys.path.insert(0, str(ROOT / "benchmarks"))
from resnet50 import resnet50


def held(device) -> int:
    return torch.vgpu.memory_allocated(device)


def test_a_step_of_resnet50():
    with vgpu.running(count=1, compute=False) as (device,):
        with torch.device(device):
            model = resnet50()
        assert (
            sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
        )  # as published
        update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        images, labels = (
            torch.empty(32, 3, 224, 224, device=device),
            torch.zeros(32, dtype=torch.long, device=device),
        )
        took = []
        for _ in range(4):
            began, start = time.process_time(), vgpu.elapsed()
            update.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            update.step()
            took.append(time.process_time() - began)
        assert min(took) < 2
        # 3 × 4.1 GFLOP × 2 an image at 15.7 TFLOP/s is a lower bound; memory traffic comes on top
        assert 32 * 24.5e9 / 15.7e12 < vgpu.elapsed() - start < 3 * 32 * 24.5e9 / 15.7e12
        split = vgpu.memory_held(model, update)[device]
        assert (
            split["weights"] >= 4 * 25_557_032
            and split["gradients"] == split["optimizer"] >= 4 * 25_557_032
        )


def test_seven_billion_parameters_do_not_fit_on_one_and_fit_on_two():
    """A Llama-like stack of 32 layers: 7 billion parameters in float32 are 26 GB, too many for 16 GiB."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            width, inner = 4096, 11008
            self.qkv, self.out = (
                nn.Linear(width, 3 * width, bias=False),
                nn.Linear(width, width, bias=False),
            )
            self.up, self.gate, self.down = (
                nn.Linear(a, b, bias=False)
                for a, b in ((width, inner), (width, inner), (inner, width))
            )

        def forward(self, x):
            q, k, v = (
                part.unflatten(-1, (32, 128)).transpose(1, 2)
                for part in self.qkv(x).chunk(3, -1)
            )
            x = x + self.out(
                nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                .transpose(1, 2)
                .flatten(2)
            )
            return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    def build(places):
        layers = []
        for place in places:
            with torch.device(place):
                layers.append(Layer())
        return layers

    with vgpu.running(count=2, gpu="V100-16GB", compute=False) as (first, second):
        with pytest.raises(
            torch.OutOfMemoryError, match=r"GPU 0 has a total capacity of 16.00 GiB"
        ):
            build([first] * 32)
        assert held(first) == 0
        layers = build([first] * 16 + [second] * 16)
        assert sum(p.numel() for layer in layers for p in layer.parameters()) == 32 * (
            4 * 4096**2 + 3 * 4096 * 11008
        )
        assert held(first) == held(second) > 12 * 2**30
        x = torch.empty(1, 512, 4096, device=first)
        with torch.no_grad():
            for layer, place in zip(layers, [first] * 16 + [second] * 16, strict=True):
                x = layer(x.to(place))
        assert (
            x.shape == (1, 512, 4096)
            and x.device == second
            and vgpu.elapsed() > 2 * 6.5e9 * 512 / 15.7e12
        )


def test_what_needs_numbers_says_so():
    with vgpu.running(count=1, compute=False) as (device,):
        x = torch.ones(3, device=device)
        for call in (
            lambda: x.sum().item(),
            lambda: x.cpu(),
            lambda: x.tolist(),
            lambda: x.nonzero(),
            lambda: bool(x[0] > 0),
        ):
            with pytest.raises(
                RuntimeError,
                match="needs numbers, and the virtual GPUs were started with compute=False",
            ):
                call()
        assert repr(x) == "tensor(..., size=(3,), device='vgpu:0')"


def test_small_whole_numbers_are_kept_until_they_meet_shapes():
    """Counters and indices stay real, which DDP needs to agree on its buckets."""
    with vgpu.running(count=2, compute=False) as (first, second):
        counter = torch.zeros((), dtype=torch.long, device=first)
        counter.add_(2)
        indices = torch.tensor([1, 2, 0]).to(first)
        assert (
            counter.item() == 2
            and indices.to(second).tolist() == [1, 2, 0]
            and (indices * 2).tolist() == [2, 4, 0]
        )
        table = torch.ones(4, 2, device=first)
        assert table[indices].shape == (3, 2) and indices.tolist() == [1, 2, 0]
        indices.copy_(table[:3, 0])
        with pytest.raises(RuntimeError, match="needs numbers"):
            indices.tolist()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_same_memory_and_time_as_with_numbers(kind):
    told = []
    for compute in (True, False):
        with vgpu.running(count=2, compute=compute) as (first, second):
            body = nn.Sequential(nn.Embedding(50, 16), nn.Dropout(0.1)).to(first)
            head = kind(16, 8, batch_first=True).to(second)
            attention = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).to(first)
            update = torch.optim.Adam(
                [*body.parameters(), *head.parameters(), *attention.parameters()]
            )
            for _ in range(2):
                update.zero_grad()
                out = head(
                    attention(body(torch.zeros(4, 9, dtype=torch.long, device=first))).to(
                        second
                    )
                )[0]
                out.square().mean().backward()
                update.step()
            peaks = [torch.vgpu.max_memory_allocated(device) for device in (first, second)]
            told.append(
                (
                    peaks,
                    [held(first), held(second)],
                    vgpu.elapsed(),
                    len(vgpu.timeline().events),
                )
            )
    assert told[0] == told[1]
