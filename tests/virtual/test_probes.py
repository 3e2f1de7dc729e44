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
from torch.optim.swa_utils import AveragedModel
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
def fourier_transforms(device):
    x = made(device, 4, 8)
    window = torch.hann_window(16, device=device)
    spectrum = torch.stft(made(device, 2, 64), 16, window=window, return_complex=True)
    return [torch.fft.rfft(x), torch.fft.ifft2(torch.fft.fft2(x)), spectrum]


@program
def linear_algebra(device):
    a = made(device, 4, 4) + 4 * torch.eye(4, device=device)
    definite = a @ a.T
    return [
        torch.linalg.svdvals(a), torch.linalg.inv(a), torch.linalg.eigvalsh(definite),
        torch.linalg.solve(a, a[:, :1]), torch.linalg.det(a), torch.linalg.cholesky(definite),
        torch.linalg.qr(a).R.abs(), torch.linalg.norm(a), torch.linalg.matrix_rank(a),
    ]  # fmt: skip


@program
def products(device):
    x = made(device, 4, 8)
    return [
        torch.einsum("ij,kj->ik", x, x), torch.tensordot(x, x.T, 1), torch.cdist(x, x),
        torch.baddbmm(x[None, :, :4], x[None], x.T[None]), torch.kron(x, x),
        torch.block_diag(x, x), torch.corrcoef(x), torch.cartesian_prod(x[0, :2], x[1, :2]),
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
def resampling(device):
    images = made(device, 1, 3, 8, 8).requires_grad_()
    grid = F.affine_grid(torch.eye(2, 3, device=device)[None], (1, 3, 4, 4), False)
    outs = [
        F.grid_sample(images, grid, align_corners=False),
        F.interpolate(images, scale_factor=2, mode="bilinear"), F.interpolate(images, size=5),
        F.pad(images, (1, 1, 1, 1), "reflect"), F.pixel_shuffle(images.repeat(1, 4, 1, 1), 2),
        F.fold(F.unfold(images, 3), (8, 8), 3),
    ]  # fmt: skip
    sum(out.sum() for out in outs).backward()
    return [*(out.detach() for out in outs), images.grad]


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
def pooling(device):
    images = made(device, 1, 3, 8, 8).requires_grad_()
    most, places = F.max_pool2d(images, 2, return_indices=True)
    outs = [
        most, F.avg_pool2d(images, 2), F.adaptive_avg_pool2d(images, 1),
        F.adaptive_max_pool2d(images, 2), F.lp_pool2d(images, 2, 2),
        F.max_unpool2d(most, places, 2),
    ]  # fmt: skip
    sum(out.sum() for out in outs).backward()
    return [*(out.detach() for out in outs), images.grad]


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


@program
def small_dtypes(device):
    x = made(device, 4, 8)
    return [
        (x.half() @ x.half().T).float(), x.bfloat16().sum(), x.to(torch.float8_e4m3fn).float(),
        torch.complex(x, x).abs(), torch.view_as_real(torch.complex(x, x).conj() * 2),
        x.to(torch.int8), (x > 0).byte().sum(),
    ]  # fmt: skip


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
def averaged_weights(device):
    model = seeded(partial(nn.Linear, 8, 4), device)
    average = AveragedModel(model)
    with torch.no_grad():
        model.weight += 1
    average.update_parameters(model)
    average.update_parameters(model)
    return [average(made(device, 4, 8)).detach()]


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
def sparse_tensors(device):
    x = made(device, 4, 8).relu()
    sparse = x.to_sparse()
    ends = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], device=device)
    return [
        torch.sparse.mm(sparse, x.T), sparse.to_dense(), ends.to_dense(),
        sparse.coalesce().values(), (sparse + sparse).to_dense(),
    ]  # fmt: skip


@program
def new_tensors(device):
    x = made(device, 4, 8)
    options = {"device": device}
    return [
        torch.eye(3, **options), torch.linspace(0, 1, 3, **options), torch.triu(x, 1),
        torch.logspace(0, 1, 3, **options), torch.tril_indices(3, 3, **options),
        torch.empty_strided((2, 2), (1, 2), **options).zero_(), x.new_full((2,), 1.0),
        torch.zeros(2).type_as(x), torch.ones_like(x), torch.full((2,), 1, **options),
        *torch.meshgrid(x[0], x[1], indexing="ij"), torch.combinations(x[0]),
        torch.arange(3, **options), torch.as_tensor([1.0], **options),
        torch.from_numpy(x.cpu().numpy()).to(device),
    ]  # fmt: skip


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
def elementwise_and_reductions(device):
    x = made(device, 4, 8)
    return [
        *x.tensor_split(3), x.unfold(1, 2, 1), x.roll(1), x.flip(0), x.diff(), x.isnan().any(),
        x.logcumsumexp(1), torch.nan_to_num(x), torch.trapz(x), x.std(0), x.var(), x.prod(1),
        x.logsumexp(1), torch.where(x > 0, x, 0.0), torch.addcmul(x, x, x), x.lerp(x + 1, 0.5),
        torch.stack([x, x]), x.repeat_interleave(2, 0), x.movedim(0, 1), x.clamp(-1, 1),
    ]  # fmt: skip


@program
def scripts_and_graphs(device):
    x = made(device, 4, 8)
    layer = seeded(partial(nn.Linear, 8, 4), device)
    traced = torch.jit.trace(layer, x)
    graph = torch.fx.symbolic_trace(nn.Sequential(layer, nn.ReLU()))
    return [traced(x).detach(), torch.jit.script(layer)(x).detach(), graph(x).detach()]


@program
def parts_of_a_module(device):
    module = nn.Module()
    module.weights = nn.ParameterList([nn.Parameter(torch.ones(2))])
    module.register_buffer("count", torch.zeros(2))
    module.to(device)
    module.half().float()
    return [module.weights[0].detach(), module.count, *module.state_dict().values()]


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
    "uniform": lambda x: x.uniform_(),
    "bernoulli": lambda x: x.bernoulli_(0.5),
    "exponential": lambda x: x.exponential_(),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "poisson": torch.poisson,
    "permutation": lambda x: torch.randperm(9, device=x.device),
    "integers": lambda x: torch.randint(0, 9, (4,), device=x.device),
    "dropout": F.dropout,
    "channel dropout": lambda x: F.dropout2d(x[None, :, None]),
    "gumbel": F.gumbel_softmax,
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "Normal": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "Categorical": lambda x: torch.distributions.Categorical(logits=x).sample(),
    "Gamma": lambda x: torch.distributions.Gamma(x, x).sample(),
    "Beta": lambda x: torch.distributions.Beta(x, x).rsample(),
    "Dirichlet": lambda x: torch.distributions.Dirichlet(x).rsample(),
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


def test_numbers_of_the_host(cuda):
    tensor = torch.arange(4.0, device="cuda")
    assert f"{tensor.sum():.1f}" == "6.0" and int(tensor.argmax()) == 3
    assert bool((tensor > 2).any()) and [10, 20, 30][tensor.long()[1]] == 20
    assert tensor.tolist() == [0, 1, 2, 3] and tensor.cpu().numpy().sum() == 6
    assert torch.tensor([tensor[1], 5.0]).tolist() == [1, 5]
    assert torch.tensor([tensor[1], tensor[2]], device="cuda:1").tolist() == [1, 2]
    assert isinstance(tensor, torch.Tensor) and isinstance(nn.Parameter(tensor), nn.Parameter)
    assert list(range(tensor.long()[2])) == [0, 1]


def test_flags_that_change_nothing(cuda):
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
        assert torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = False
    assert torch.utils.data.random_split(range(4), [2, 2], torch.Generator("cuda"))
    assert not torch.backends.cudnn.is_acceptable(torch.ones(2, device="cuda"))
