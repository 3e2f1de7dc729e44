"""torch.use_deterministic_algorithms refuses on virtual GPUs what it refuses on CUDA."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from multigpu.virtual import face
from multigpu.virtual.options import Options

ISSUES = "https://github.com/pytorch/pytorch/issues"


@pytest.fixture(autouse=True)
def restored():
    yield
    torch.use_deterministic_algorithms(False)


def ones(*shape):
    return torch.ones(shape, device="cuda", requires_grad=True)


def indices(*values):
    return torch.tensor(values, device="cuda")


def backward(out):
    return lambda: (out()[0] if isinstance(out(), tuple) else out()).sum().backward()


def unpool():
    values, places = F.max_pool2d(ones(1, 1, 4, 4), 2, return_indices=True)
    return F.max_unpool2d(values, places, 2)


def unpool3d():
    values, places = F.max_pool3d(ones(1, 1, 4, 4, 4), 2, return_indices=True)
    return F.max_unpool3d(values, places, 2)


def ctc():
    return F.ctc_loss(ones(4, 1, 3).log_softmax(2), indices(1, 2)[None], (4,), (2,))


def interpolate(mode, *shape, **more):
    return backward(
        lambda: F.interpolate(ones(1, 1, *shape), scale_factor=2, mode=mode, **more)
    )


IMAGE = (1, 1, 4, 4)
VOLUME = (1, 1, 4, 4, 4)
# CUDA's names: those of an H100 (torch 2.11), or of torch's library for CUDA (2.12).
REFUSED = {
    "avg_pool3d_backward_cuda": backward(lambda: F.avg_pool3d(ones(*VOLUME), 2)),
    "adaptive_avg_pool2d_backward_cuda": backward(
        lambda: F.adaptive_avg_pool2d(ones(*IMAGE), 2)
    ),
    "adaptive_avg_pool3d_backward_cuda": backward(
        lambda: F.adaptive_avg_pool3d(ones(*VOLUME), 2)
    ),
    "adaptive_max_pool2d_backward_cuda": backward(
        lambda: F.adaptive_max_pool2d(ones(*IMAGE), 2)
    ),
    "adaptive_max_pool3d_backward_cuda": backward(
        lambda: F.adaptive_max_pool3d(ones(*VOLUME), 2)
    ),
    "fractional_max_pool2d_backward_cuda": backward(
        lambda: F.fractional_max_pool2d(ones(*IMAGE), 2, output_size=2)
    ),
    "fractional_max_pool3d_backward_cuda": backward(
        lambda: F.fractional_max_pool3d(ones(*VOLUME), 2, output_size=2)
    ),
    "max_unpooling2d_forward_out": unpool,
    "max_unpooling3d_forward_out": unpool3d,
    "upsample_linear1d_backward_out_cuda": interpolate("linear", 4),
    "upsample_bicubic2d_backward_out_cuda": interpolate("bicubic", 4, 4),
    "upsample_bilinear2d_aa_backward_out_cuda": interpolate("bilinear", 4, 4, antialias=True),
    "reflection_pad1d_backward_out_cuda": backward(
        lambda: F.pad(ones(1, 4), (1, 1), mode="reflect")
    ),
    "reflection_pad3d_backward_out_cuda": backward(
        lambda: F.pad(ones(*VOLUME), (1,) * 6, mode="reflect")
    ),
    "grid_sampler_2d_backward_cuda": backward(
        lambda: F.grid_sample(ones(*IMAGE), ones(1, 2, 2, 2), align_corners=False)
    ),
    "grid_sampler_3d_backward_cuda": backward(
        lambda: F.grid_sample(ones(*VOLUME), ones(1, 2, 2, 2, 3), align_corners=False)
    ),
    "nll_loss2d_forward_out_cuda_template": lambda: F.cross_entropy(
        ones(1, 3, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long, device="cuda")
    ),
    "ctc_loss_backward_gpu": backward(ctc),
    "embedding_bag_backward_cuda_max": backward(
        lambda: F.embedding_bag(indices(0, 1)[None], ones(3, 2), mode="max")
    ),
    "put_": lambda: torch.zeros(3, device="cuda").put_(indices(0), torch.ones(1).cuda(), True),
    "_histc_cuda with floating point input": lambda: torch.histc(torch.ones(3, device="cuda")),
    "_bincount_cuda": lambda: torch.bincount(indices(0, 1), torch.ones(2, device="cuda")),
    "median CUDA with indices output": lambda: torch.ones(3, device="cuda").median(0),
    "scatter_reduce_cuda_prod_": lambda: torch.ones(3, device="cuda").scatter_reduce(
        0, indices(0, 1), torch.ones(2, device="cuda"), "prod"
    ),
    "index_reduce_cuda": lambda: torch.ones(3, device="cuda").index_reduce(
        0, indices(0, 1), torch.ones(2, device="cuda"), "amax"
    ),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_is_refused_with_torchs_sentence(fresh_cuda, name):
    REFUSED[name]()
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError) as error:
        REFUSED[name]()
    assert str(error.value) == (
        f"{name} does not have a deterministic implementation, but you set "
        f"'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for "
        f"this operation, or you can use the 'warn_only=True' option, if that's acceptable "
        f"for your application. You can also file an issue at {ISSUES} to help us prioritize "
        f"adding deterministic support for this operation."
    )


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", ["index_reduce_cuda", "put_"])
def test_with_warn_only_it_warns_once_and_computes(fresh_cuda, name):
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        REFUSED[name]()
    (text,) = {str(one.message) for one in caught if "deterministic" in str(one.message)}
    assert text == (
        f"{name} does not have a deterministic implementation, but you set "
        f"'torch.use_deterministic_algorithms(True, warn_only=True)'. You can file an issue "
        f"at {ISSUES} to help us prioritize adding deterministic support for this operation."
    )
    assert torch.is_deterministic_algorithms_warn_only_enabled()


COMPUTED = {
    "cumsum": lambda: torch.ones(3, device="cuda").cumsum(0),
    "a matrix product": lambda: nn.Linear(4, 4).cuda()(ones(2, 4)).sum().backward(),
    "bilinear": interpolate("bilinear", 4, 4),
    "trilinear": interpolate("trilinear", 4, 4, 4),
    "nearest": interpolate("nearest", 4, 4),
    "reflection of images": backward(lambda: F.pad(ones(*IMAGE), (1,) * 4, mode="reflect")),
    "replication": backward(lambda: F.pad(ones(*IMAGE), (1,) * 4, mode="replicate")),
    "convolution": backward(lambda: F.conv2d(ones(*IMAGE), ones(1, 1, 2, 2))),
    "max_pool2d": backward(lambda: F.max_pool2d(ones(*IMAGE), 2)),
    "average of all": backward(lambda: F.adaptive_avg_pool2d(ones(*IMAGE), 1)),
    "scatter_add": lambda: ones(3).scatter_add(0, indices(0, 0), ones(2)).sum().backward(),
    "gather": lambda: ones(3).gather(0, indices(0, 0)).sum().backward(),
    "embedding": backward(lambda: F.embedding(indices(0, 0), ones(3, 2))),
    "bags": backward(lambda: F.embedding_bag(indices(0, 1)[None], ones(3, 2), mode="mean")),
    "index_put": lambda: (
        torch.ones(3).cuda().index_put_((indices(0),), torch.tensor(2.0).cuda())
    ),
    "counts": lambda: torch.bincount(indices(0, 1)),
    "one median": lambda: torch.ones(3, device="cuda").median(),
    "kthvalue": lambda: torch.ones(3, device="cuda").kthvalue(1),
    "loss of labels": lambda: F.cross_entropy(ones(2, 3), indices(0, 1)).backward(),
    "loss of each pixel": lambda: F.cross_entropy(
        ones(1, 3, 2, 2),
        torch.zeros(1, 2, 2, dtype=torch.long, device="cuda"),
        reduction="none",
    ),
    "largest": lambda: torch.ones(3, device="cuda").scatter_reduce(
        0, indices(0, 1), torch.ones(2, device="cuda"), "amax"
    ),
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
    with torch.no_grad():
        face.put_on(Options(gpus=1, shapes_only=True))
        try:
            x = torch.ones(3, 5, device="cuda")
            for _ in range(2):
                x.median(0)
            torch.use_deterministic_algorithms(True)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="median CUDA with indices output"):
                    x.median(0)
        finally:
            face.take_off()
