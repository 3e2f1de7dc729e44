"""Small things that CUDA programs do: each gives the CPU's numbers, on the device "cuda"."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint


def rows(device):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device)


def images(device):
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2)).to(device)


def layer(device, make, *args, **options):
    torch.manual_seed(0)
    return make(*args, **options).to(device)


def gradient(device, function, make=rows):
    leaf = make(device).requires_grad_()
    function(leaf).sum().backward()
    return leaf.grad


def of_parameters(device, make, data):
    module = layer(device, make)
    out = module(data)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def with_hooks(device):
    linear = layer(device, nn.Linear, 8, 4)
    linear.register_full_backward_hook(lambda *args: None)
    linear.weight.register_hook(lambda grad: grad * 2)
    linear(rows(device)).sum().backward()
    return linear.weight.grad


def unpacked(device):
    gru = layer(device, nn.GRU, 8, 4, batch_first=True)
    packed = rnn.pack_padded_sequence(rows(device)[None].repeat(2, 1, 1), [4, 2], True)
    return rnn.pad_packed_sequence(gru(packed)[0], True)[0]


def averaged(device):
    model = AveragedModel(layer(device, nn.Linear, 8, 4))
    model.update_parameters(layer(device, nn.Linear, 8, 4))
    return model(rows(device))


def after_meta(device):
    with torch.device("meta"):
        linear = nn.Linear(8, 4)
    linear.to_empty(device=device)
    nn.init.constant_(linear.weight, 0.5)
    nn.init.zeros_(linear.bias)
    return linear(rows(device))


PROBES = {
    "indexing": lambda d: rows(d)[rows(d)[:, 0] > 0][:, torch.tensor([0, 1], device=d)],
    "index by a tensor": lambda d: rows(d)[torch.tensor(2, device=d)],
    "scatter": lambda d: torch.zeros(4, 8, device=d).scatter_add(
        0, torch.arange(4, device=d)[:, None] % 2, rows(d)
    ),
    "where": lambda d: torch.where(rows(d) > 0, rows(d), 0.0),
    "sort": lambda d: rows(d).sort(1).values,
    "topk": lambda d: rows(d).topk(2).values,
    "unique": lambda d: torch.unique(rows(d).round(), return_counts=True)[1].float(),
    "einsum": lambda d: torch.einsum("ij,kj->ik", rows(d), rows(d)),
    "svd": lambda d: torch.linalg.svd(rows(d)).S,
    "solve": lambda d: torch.linalg.solve(rows(d)[:, :4], rows(d)[:, :1]),
    "fft": lambda d: torch.fft.rfft(rows(d)).abs(),
    "complex": lambda d: torch.view_as_real(
        torch.complex(rows(d), rows(d)).conj().resolve_conj()
    ),
    "quantile": lambda d: rows(d).quantile(0.5),
    "meshgrid": lambda d: torch.meshgrid(*[torch.arange(3.0, device=d)] * 2, indexing="ij")[1],
    "bucketize": lambda d: torch.bucketize(rows(d), torch.linspace(-1, 1, 5, device=d)),
    "float8": lambda d: rows(d).to(torch.float8_e4m3fn).float(),
    "half": lambda d: (rows(d).half() @ rows(d).half().T).float(),
    "one_hot": lambda d: F.one_hot(torch.arange(3, device=d)),
    "embedding": lambda d: layer(d, nn.Embedding, 5, 3)(torch.tensor([1, 2], device=d)),
    "embedding bag": lambda d: layer(d, nn.EmbeddingBag, 5, 3)(
        torch.ones(2, 2, device=d).long()
    ),
    "convolution": lambda d: gradient(d, layer(d, nn.Conv2d, 3, 4, 3), images),
    "channels last": lambda d: layer(d, nn.Conv2d, 3, 4, 3).to(
        memory_format=torch.channels_last
    )(images(d).to(memory_format=torch.channels_last)),
    "transposed": lambda d: gradient(d, layer(d, nn.ConvTranspose2d, 3, 4, 3), images),
    "pools": lambda d: F.max_pool2d(images(d), 2) + F.avg_pool2d(images(d), 2),
    "adaptive pool": lambda d: gradient(d, lambda x: F.adaptive_avg_pool2d(x, 2) ** 2, images),
    "group norm": lambda d: layer(d, nn.GroupNorm, 3, 3)(images(d)),
    "weight norm": lambda d: parametrizations.weight_norm(layer(d, nn.Linear, 8, 2))(rows(d)),
    "interpolate": lambda d: F.interpolate(images(d), scale_factor=2, mode="bilinear"),
    "grid_sample": lambda d: F.grid_sample(
        images(d), torch.zeros(2, 2, 2, 2, device=d), align_corners=False
    ),
    "lstm": lambda d: of_parameters(d, lambda: nn.LSTM(8, 4, 2), rows(d)[None]),
    "packed gru": unpacked,
    "encoder": lambda d: layer(
        d, nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0, batch_first=True
    )(rows(d)[None]),
    "attention": lambda d: F.scaled_dot_product_attention(
        *[rows(d)[None]] * 3, is_causal=True
    ),
    "cross entropy": lambda d: gradient(
        d,
        lambda x: F.cross_entropy(x, torch.arange(4, device=d), label_smoothing=0.1),
    ),
    "vmap": lambda d: vmap(grad(lambda w: w.sin().sum()))(rows(d)),
    "jvp": lambda d: jvp(torch.sin, (rows(d),), (rows(d),))[1],
    "double backward": lambda d: torch.autograd.grad(
        torch.autograd.grad(
            (x := rows(d).requires_grad_()).pow(3).sum(), x, create_graph=True
        )[0].sum(),
        x,
    )[0],
    "checkpoint": lambda d: gradient(
        d, lambda x: checkpoint(torch.sin, x, use_reentrant=False)
    ),
    "hooks": with_hooks,
    "deepcopy": lambda d: copy.deepcopy(layer(d, nn.Linear, 8, 2))(rows(d)),
    "pickle": lambda d: pickle.loads(pickle.dumps(rows(d))),
    "averaged model": averaged,
    "meta first": after_meta,
    "sparse": lambda d: torch.sparse.mm(rows(d).relu().to_sparse(), rows(d).T),
    "type_as": lambda d: torch.zeros(2).type_as(rows(d)),
    "new_full": lambda d: rows(d).new_full((2,), 3.0),
    "data": lambda d: nn.Parameter(rows(d)).data.clamp_(0),
    "assigned data": lambda d: setattr(x := rows(d), "data", rows(d)[:2]) or x,
    "resize_": lambda d: rows(d).resize_(2, 2),
    "swap of dtype": lambda d: (
        layer(d, nn.Linear, 8, 2).double().to(d, torch.float32)(rows(d))
    ),
    "to a tensor": lambda d: torch.ones(2).to(rows(d)),
    "trace": lambda d: torch.jit.trace(layer(d, nn.Linear, 8, 2), rows(d))(rows(d)),
    "fx": lambda d: torch.fx.symbolic_trace(layer(d, nn.Linear, 8, 2))(rows(d)),
    "distribution": lambda d: torch.distributions.Normal(rows(d), 1.0).log_prob(rows(d)),
}


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.filterwarnings("ignore")
def test_a_program_gives_the_cpus_numbers(cuda, name):
    result = PROBES[name]("cuda")
    assert result.is_cuda and result.device == torch.device("cuda:0")
    torch.testing.assert_close(result.cpu(), PROBES[name]("cpu"), atol=1e-5, rtol=1e-5)


def test_numbers_of_the_host(cuda):
    tensor = torch.arange(4.0, device="cuda")
    assert f"{tensor.sum():.1f}" == "6.0" and int(tensor.argmax()) == 3
    assert bool((tensor > 2).any()) and [10, 20, 30][tensor.long()[1]] == 20
    assert tensor.tolist() == [0, 1, 2, 3] and tensor.cpu().numpy().sum() == 6
    assert torch.tensor([tensor[1], 5.0]).tolist() == [1, 5]
    assert isinstance(tensor, torch.Tensor) and isinstance(nn.Parameter(tensor), nn.Parameter)
    assert list(range(tensor.long()[2])) == [0, 1]


def test_flags_that_change_nothing(cuda):
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
        assert torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = False
    assert torch.utils.data.random_split(range(4), [2, 2], torch.Generator("cuda"))
    assert not torch.backends.cudnn.is_acceptable(torch.ones(2, device="cuda"))
