"""torch.use_deterministic_algorithms refuses on virtual GPUs what it refuses on CUDA."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import multigpu


@pytest.fixture(autouse=True)
def restored():
    yield
    torch.use_deterministic_algorithms(False)


def ones(*shape):
    return torch.ones(shape, device="cuda", requires_grad=True)


def indices(*values):
    return torch.tensor(values, device="cuda")


def backward(function, shape, *arguments, **options):
    """A call that computes function(ones of this shape, *arguments), and the gradient."""

    def call():
        out = function(ones(*shape), *arguments, **options)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    return call


def unpool(pool, undo, shape):
    def call():
        return undo(*pool(ones(*shape), 2, return_indices=True), 2)

    return call


def ctc(x):
    return F.ctc_loss(x.log_softmax(2), indices(1, 2)[None], (4,), (2,))


def grid_sample(x):
    """Of images, or of volumes."""
    dimensions = x.dim() - 2
    grid = ones(1, *(2,) * dimensions, dimensions)
    return F.grid_sample(x, grid, align_corners=False)


def loss_of_pixels(**options):
    labels = torch.zeros(1, 2, 2, dtype=torch.long, device="cuda")
    return F.cross_entropy(ones(1, 3, 2, 2), labels, **options)


def bag(weight, mode):
    return F.embedding_bag(indices(0, 1)[None], weight, mode=mode)


def scattered(how):
    return torch.ones(3).cuda().scatter_reduce(0, indices(0, 1), torch.ones(2).cuda(), how)


def interpolate(mode, *shape, **options):
    return backward(F.interpolate, (1, 1, *shape), scale_factor=2, mode=mode, **options)


IMAGE = (1, 1, 4, 4)
VOLUME = (1, 1, 4, 4, 4)
# CUDA's names: those of an H100 (torch 2.11), or of torch's library for CUDA (2.12).
REFUSED = {
    "avg_pool3d_backward_cuda": backward(F.avg_pool3d, VOLUME, 2),
    "adaptive_avg_pool2d_backward_cuda": backward(F.adaptive_avg_pool2d, IMAGE, 2),
    "adaptive_avg_pool3d_backward_cuda": backward(F.adaptive_avg_pool3d, VOLUME, 2),
    "adaptive_max_pool2d_backward_cuda": backward(F.adaptive_max_pool2d, IMAGE, 2),
    "adaptive_max_pool3d_backward_cuda": backward(F.adaptive_max_pool3d, VOLUME, 2),
    "fractional_max_pool2d_backward_cuda": backward(F.fractional_max_pool2d, IMAGE, 2, 2),
    "fractional_max_pool3d_backward_cuda": backward(F.fractional_max_pool3d, VOLUME, 2, 2),
    "max_unpooling2d_forward_out": unpool(F.max_pool2d, F.max_unpool2d, IMAGE),
    "max_unpooling3d_forward_out": unpool(F.max_pool3d, F.max_unpool3d, VOLUME),
    "upsample_linear1d_backward_out_cuda": interpolate("linear", 4),
    "upsample_bicubic2d_backward_out_cuda": interpolate("bicubic", 4, 4),
    "upsample_bilinear2d_aa_backward_out_cuda": interpolate("bilinear", 4, 4, antialias=True),
    "reflection_pad1d_backward_out_cuda": backward(F.pad, (1, 4), (1, 1), "reflect"),
    "reflection_pad3d_backward_out_cuda": backward(F.pad, VOLUME, (1,) * 6, "reflect"),
    "grid_sampler_2d_backward_cuda": backward(grid_sample, IMAGE),
    "grid_sampler_3d_backward_cuda": backward(grid_sample, VOLUME),
    "nll_loss2d_forward_out_cuda_template": loss_of_pixels,
    "ctc_loss_backward_gpu": backward(ctc, (4, 1, 3)),
    "embedding_bag_backward_cuda_max": backward(bag, (3, 2), "max"),
    "put_": lambda: torch.zeros(3, device="cuda").put_(indices(0), torch.ones(1).cuda(), True),
    "_histc_cuda with floating point input": lambda: torch.histc(torch.ones(3, device="cuda")),
    "_bincount_cuda": lambda: torch.bincount(indices(0, 1), torch.ones(2, device="cuda")),
    "median CUDA with indices output": lambda: torch.ones(3, device="cuda").median(0),
    "scatter_reduce_cuda_prod_": lambda: scattered("prod"),
    "index_reduce_cuda": lambda: torch.ones(3, device="cuda").index_reduce(
        0, indices(0, 1), torch.ones(2, device="cuda"), "amax"
    ),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_is_refused_with_torchs_sentence(fresh_cuda, name):
    REFUSED[name]()
    torch.use_deterministic_algorithms(True)
    words = f"^{name} does not have a deterministic .* use the 'warn_only=True' option"
    with pytest.raises(RuntimeError, match=words):
        REFUSED[name]()


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", ["index_reduce_cuda", "put_"])
def test_with_warn_only_it_warns_once_and_computes(fresh_cuda, name):
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        REFUSED[name]()
    (text,) = {str(one.message) for one in caught if "deterministic" in str(one.message)}
    assert text.startswith(f"{name} does not have a deterministic implementation, but you set")
    assert "algorithms(True, warn_only=True)'" in text
    assert torch.is_deterministic_algorithms_warn_only_enabled()


COMPUTED = {
    "cumsum": lambda: torch.ones(3, device="cuda").cumsum(0),
    "a matrix product": lambda: nn.Linear(4, 4).cuda()(ones(2, 4)).sum().backward(),
    "bilinear": interpolate("bilinear", 4, 4),
    "trilinear": interpolate("trilinear", 4, 4, 4),
    "nearest": interpolate("nearest", 4, 4),
    "reflection of images": backward(F.pad, IMAGE, (1,) * 4, "reflect"),
    "replication": backward(F.pad, IMAGE, (1,) * 4, "replicate"),
    "convolution": lambda: F.conv2d(ones(*IMAGE), ones(1, 1, 2, 2)).sum().backward(),
    "max_pool2d": backward(F.max_pool2d, IMAGE, 2),
    "average of all": backward(F.adaptive_avg_pool2d, IMAGE, 1),
    "scatter_add": lambda: ones(3).scatter_add(0, indices(0, 0), ones(2)).sum().backward(),
    "gather": lambda: ones(3).gather(0, indices(0, 0)).sum().backward(),
    "embedding": lambda: F.embedding(indices(0, 0), ones(3, 2)).sum().backward(),
    "bags": backward(bag, (3, 2), "mean"),
    "index_put": lambda: (
        torch.ones(3).cuda().index_put_((indices(0),), torch.tensor(2.0).cuda())
    ),
    "counts": lambda: torch.bincount(indices(0, 1)),
    "one median": lambda: torch.ones(3, device="cuda").median(),
    "kthvalue": lambda: torch.ones(3, device="cuda").kthvalue(1),
    "loss of labels": lambda: F.cross_entropy(ones(2, 3), indices(0, 1)).backward(),
    "loss of each pixel": lambda: loss_of_pixels(reduction="none"),
    "largest": lambda: scattered("amax"),
    "a median of the host": lambda: torch.ones(3).median(0),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_cuda_computes_is_computed(fresh_cuda, name):
    torch.use_deterministic_algorithms(True)
    COMPUTED[name]()


def test_a_warning_is_at_the_line_of_the_program(fresh_cuda):
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="median CUDA") as caught:
        ones(3).median(0)
    assert [warning.filename for warning in caught] == [__file__]


def test_shapes_are_refused_in_each_call():
    with torch.no_grad(), multigpu.gpus(1, shapes_only=True):
        x = torch.ones(3, 5, device="cuda")
        for _ in range(2):
            x.median(0)
        torch.use_deterministic_algorithms(True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="median CUDA with indices output"):
                x.median(0)
