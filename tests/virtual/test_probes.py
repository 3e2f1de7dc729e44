"""Small programs that use many parts of torch: on a virtual GPU they give the CPU's results.

Each program gets a device, and returns tensors, all on this device. The device is cuda:1: a
program that loses the index fails.
"""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Tensors = list[torch.Tensor]
Program = Callable[[torch.device], Tensors]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def made(device: torch.device, *shape: int, positive: bool = False) -> torch.Tensor:
    """The same random numbers on each device."""
    data = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return (data.abs() + 0.1 if positive else data).to(device)


def gradients(module: nn.Module, *inputs: torch.Tensor) -> Tensors:
    """The gradients of the module's parameters, for a sum of its outputs."""
    out = module(*inputs)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def seeded(make: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return make().to(device)


@program
def searching_and_sorting(device):
    x = made(device, 4, 8)
    counts = torch.tensor([0, 3, 3, 1, 4], device=device)
    unique, inverse, times = torch.unique(counts, return_inverse=True, return_counts=True)
    edges = torch.linspace(-1, 1, 5, device=device)
    return [
        torch.bincount(counts), unique, inverse, times, torch.histc(x, 4), x.median(),
        *x.sort(), *x.topk(2), *x.kthvalue(2, 1), x.argmax(1), x.nonzero(), *x.cummax(1),
        torch.bucketize(x, edges), torch.searchsorted(edges, x), x.quantile(0.5),
    ]  # fmt: skip


@program
def indices(device):
    x = made(device, 4, 8)
    rows = torch.tensor([2, 0], device=device)
    place = x.argsort(0)
    y = x.clone()
    y[y > 0] = 0
    y[rows, 1] = 5
    one = torch.tensor(1, device=device)
    return [
        x.scatter_add(0, place, x), x.gather(0, place), x.index_add(0, rows, x[:2]), y,
        x.masked_scatter(x > 0, x), x.take_along_dim(place, 0), x[one - 1], x[:, one],
        x[[0, 1, 2][one]], x.index_select(1, rows), x.put(rows, x[0, :2]),
    ]  # fmt: skip


@program
def embeddings(device):
    numbers = torch.tensor([[1, 2, 4], [4, 3, 1]], device=device)
    bag = seeded(lambda: nn.EmbeddingBag(10, 4), device)
    sparse = seeded(lambda: nn.Embedding(5, 3, sparse=True), device)
    update = torch.optim.SparseAdam(list(sparse.parameters()))
    sparse(numbers).sum().backward()
    update.step()
    return [*gradients(bag, numbers), sparse.weight.detach(), sparse.weight.grad.to_dense()]


@program
def convolutions(device):
    images = made(device, 2, 3, 8, 8)
    last = images.to(memory_format=torch.channels_last)
    layer = seeded(lambda: nn.Conv2d(3, 8, 3), device).to(memory_format=torch.channels_last)
    out = layer(last)
    assert out.is_contiguous(memory_format=torch.channels_last)
    return [
        out.detach(),
        *gradients(seeded(lambda: nn.ConvTranspose2d(3, 4, 3), device), images),
        *gradients(seeded(lambda: nn.Conv3d(1, 2, 3), device), made(device, 1, 1, 6, 6, 6)),
        *gradients(seeded(lambda: nn.ConvTranspose1d(3, 4, 3), device), made(device, 1, 3, 8)),
        *gradients(
            seeded(lambda: nn.Conv2d(4, 4, 3, groups=2), device), made(device, 1, 4, 8, 8)
        ),
    ]


@program
def norms(device):
    images = made(device, 2, 4, 8, 8)
    layers = [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(8), nn.RMSNorm(8)]
    layers += [nn.InstanceNorm2d(4), nn.LocalResponseNorm(2), nn.SyncBatchNorm(4).eval()]
    outs = [copy.deepcopy(layer).to(device)(images).detach() for layer in layers]
    weighted = seeded(lambda: parametrizations.weight_norm(nn.Linear(8, 2)), device)
    spectral = seeded(lambda: parametrizations.spectral_norm(nn.Linear(8, 2)), device)
    return [*outs, *gradients(weighted, images), spectral.eval()(images).detach()]


@program
def losses(device):
    x = made(device, 4, 8).requires_grad_()
    classes = torch.tensor([0, 3, 7, 1], device=device)
    signs = torch.ones(4, device=device)
    total = (
        F.cross_entropy(x, classes, label_smoothing=0.1)
        + F.nll_loss(x.log_softmax(1), classes)
        + F.binary_cross_entropy_with_logits(x, torch.ones_like(x))
        + F.kl_div(x.log_softmax(1), x.detach().softmax(1), reduction="batchmean")
        + F.huber_loss(x, x.detach() * 2)
        + F.triplet_margin_loss(x, x + 1, x - 2)
        + F.cosine_embedding_loss(x, x.detach() + 1, signs)
        + F.multi_margin_loss(x, classes)
        + F.poisson_nll_loss(x, x.detach().abs())
    )
    total.backward()
    return [total.detach(), x.grad, F.one_hot(classes)]


@program
def transformers(device):
    rows = made(device, 2, 5, 8)
    layer = seeded(
        partial(nn.TransformerEncoderLayer, 8, 2, 16, 0.0, batch_first=True), device
    )
    heads = seeded(partial(nn.MultiheadAttention, 8, 2, batch_first=True), device)
    both = seeded(partial(nn.Transformer, 8, 2, 1, 1, 16, 0.0, batch_first=True), device)
    found = [*gradients(layer, rows), *gradients(heads, rows, rows, rows)]
    with torch.inference_mode():
        padding = torch.zeros(2, 5, dtype=torch.bool, device=device)
        found.append(layer.eval()(rows, src_key_padding_mask=padding))
        found += heads.eval()(rows, rows, rows)
    return [*found, both(rows, rows[:, :4]).detach()]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0].sign().abs()


@program
def custom_derivatives(device):
    x = made(device, 4, 8).requires_grad_()
    Doubled.apply(x).sum().backward()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    first.sum().backward()
    seen = []
    layer = seeded(partial(nn.Linear, 8, 2), device)
    layer.register_forward_hook(lambda module, inputs, out: seen.append(out.detach()))
    layer.weight.register_hook(lambda grad: grad * 2)
    found = gradients(layer, x.detach())
    double = x.detach()[0, :3].double().requires_grad_()
    assert torch.autograd.gradcheck(torch.sin, double)
    return [x.grad, *seen, *found]


@program
def saving_memory(device):
    layer = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), device)
    x = made(device, 4, 8).requires_grad_()
    for reentrant in (False, True):
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        out = layer(x).sum()
    out.backward()
    return [x.grad, layer[0].weight.grad]


@program
def transformed_functions(device):
    x, weight = made(device, 4, 8), made(device, 8)
    layer = seeded(partial(nn.Linear, 8, 2), device)

    def out(weight, row):
        return (row @ weight).sin()

    return [
        vmap(out, (None, 0))(weight, x), grad(lambda w: out(w, x).sum())(weight),
        *jvp(lambda w: out(w, x), (weight,), (weight,)), vmap(grad(out), (None, 0))(weight, x),
        functional_call(layer, {"weight": layer.weight * 2}, (x,)).detach(),
    ]  # fmt: skip


@program
def a_model_without_memory(device):
    with torch.device("meta"):
        model = nn.Linear(8, 4)
    source = seeded(partial(nn.Linear, 8, 4), torch.device("cpu"))
    model.load_state_dict(source.state_dict(), assign=True)
    empty = nn.Linear(8, 4, device="meta").to_empty(device=device)
    empty.load_state_dict(source.state_dict())
    return [model.to(device)(made(device, 4, 8)).detach(), empty.weight.detach()]


@program
def changed_in_place(device):
    x, y = made(device, 4, 8), made(device, 4, 8)
    z = y.clone()
    x.resize_(2, 2)
    y.data = made(device, 3)
    z.set_(made(device, 5))
    w = nn.Parameter(made(device, 3))
    w.data.clamp_(0)
    w.grad = torch.ones_like(w)
    return [x, y, z, w.detach(), w.grad, nn.init.constant_(torch.empty(2, device=device), 3)]


@program
def scripts_and_graphs(device):
    x = made(device, 4, 8)
    layer = seeded(partial(nn.Linear, 8, 4), device)
    traced = torch.jit.trace(layer, x)
    graph = torch.fx.symbolic_trace(nn.Sequential(layer, nn.ReLU()))
    return [traced(x).detach(), torch.jit.script(layer)(x).detach(), graph(x).detach()]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_a_program_gives_the_cpus_results(cuda, name):
    expected = PROGRAMS[name](torch.device("cpu"))
    actual = PROGRAMS[name](cuda[1])
    assert [tensor.device for tensor in actual] == [cuda[1]] * len(expected)
    for tensor, right in zip(actual, expected, strict=True):
        assert tensor.dtype is right.dtype
        assert torch.allclose(tensor.cpu().resolve_conj(), right, atol=1e-5, rtol=1e-4)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x.normal_(),
    "permutation": lambda x: torch.randperm(9, device=x.device),
    "integers": lambda x: torch.randint(0, 9, (4,), device=x.device),
    "dropout": F.dropout,
    "gumbel": F.gumbel_softmax,
    "Normal": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "Beta": lambda x: torch.distributions.Beta(x, x).rsample(),
    "orthogonal": lambda x: nn.init.orthogonal_(x),
    "truncated normal": lambda x: nn.init.trunc_normal_(x),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_follow_the_devices_seed(cuda, draw):
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(draw(made(cuda[1], 4, 8, positive=True)))
    assert drawn[0].device == cuda[1]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_flags_that_change_nothing(cuda):
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
        assert torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = False
    assert torch.utils.data.random_split(range(4), [2, 2], torch.Generator("cuda"))
    assert not torch.backends.cudnn.is_acceptable(torch.ones(2, device="cuda"))
