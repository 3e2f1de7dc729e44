"""CUDA programs give the CPU's numbers on virtual GPUs: training, autocast, two GPUs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from multigpu.models.transformer import Transformer

IMAGES = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
CLASSES = torch.randint(0, 10, (16,), generator=torch.Generator().manual_seed(2))
TOKENS = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 10),
    )


def gpt() -> nn.Module:
    return Transformer(layers=2, hidden=16, heads=2, tokens=8, vocabulary=11, causal=True)


def train_cnn(device: str, steps: int = 4) -> list[float]:
    """The losses of a program as people write it for CUDA."""
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.manual_seed_all(0)
        torch.backends.cudnn.deterministic = True
    model = cnn().to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pinned = device == "cuda"
    loader = DataLoader(TensorDataset(IMAGES, CLASSES), 8, pin_memory=pinned)
    losses = []
    for _ in range(steps // 2):
        for images, classes in loader:
            images = images.to(device, non_blocking=True)
            classes = classes.to(device, non_blocking=True)
            loss = criterion(model(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def train_gpt(device: str, steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=device == "cuda")
    tokens = TOKENS.to(device)
    losses = []
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_the_losses_are_the_cpus(cuda, device):
    assert train_gpt(device) == pytest.approx(train_gpt("cpu"), abs=1e-6, rel=0)


def test_the_cnns_losses_are_the_cpus_bit_for_bit(cuda):
    assert train_cnn("cuda") == train_cnn("cuda:1") == train_cnn("cpu")


def test_fp16_with_a_scaler(cuda):
    torch.manual_seed(0)
    model = gpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    tokens = TOKENS.cuda()
    losses = []
    for _ in range(4):
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        assert logits.dtype == torch.float16 and loss.dtype == torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scaler.is_enabled() and scaler.get_scale() == 2.0**10
    assert losses == pytest.approx(train_gpt("cpu"), abs=5e-3)


def test_a_scaler_leaves_out_a_step_with_infinities(cuda):
    weight = torch.ones(2, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler(init_scale=8.0)
    scaler.scale((weight * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1] and scaler.get_scale() == 4.0


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp")
def test_all_spellings_of_autocast(cuda):
    layer = nn.Linear(4, 4).cuda()
    rows = torch.ones(2, 4, device="cuda")
    with torch.cuda.amp.autocast():
        assert layer(rows).dtype == torch.float16
        images = torch.ones(1, 1, 4, 4, device="cuda")
        out = nn.Conv2d(1, 2, 3).cuda()(images)
        assert out.dtype == torch.float16
        # The CPU's lists keep layer_norm in 16 bits.
        for again in (out.softmax(1), F.layer_norm(out, (2,))):
            assert again.dtype == torch.float32
        assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_gpu_dtype() == torch.float16
        assert not torch.is_autocast_enabled("cpu")
        with torch.autocast("cuda", enabled=False):
            assert layer(rows).dtype == torch.float32
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16, cache_enabled=False):
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        assert layer(rows).dtype == torch.bfloat16 and layer(rows).sum().dtype == torch.float32
    assert not torch.is_autocast_enabled() and torch.amp.is_autocast_available("cuda")
    assert torch.get_autocast_dtype("cuda") == torch.float16
    assert torch.cuda.amp.GradScaler().is_enabled()

    @torch.autocast("cuda")
    def decorated() -> torch.Tensor:
        return layer(rows)

    assert decorated().dtype == torch.float16
    with torch.autocast("cpu"):
        assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype == torch.bfloat16
