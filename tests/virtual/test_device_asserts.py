"""A wrong index, or number, is a device-side assert: asynchronous, and then in each call."""

import pytest
import torch
from torch.nn import functional as F
from virtual_runs import TORCHRUN, virtual, write

from multigpu.virtual import face

ASSERTS = "device-side assert triggered"


def on_gpu(*values):
    return torch.tensor(values, device="cuda")


def of_images():
    return F.nll_loss(torch.ones(1, 2, 2, 2).cuda(), torch.full((1, 2, 2), 5).cuda())


# The file of an assert, and a part of what it says.
INDEX = ("IndexKernel.cu", "-sizes[i] <= index")
SCATTER = ("ScatterGatherKernel.cu", "idx_dim")
SELECT = ("Indexing.cu:1515", "srcIndex")
LABELS = ("Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d", "t >= 0 && t < n_classes")
IMAGES = ("NLLLoss2d.cu", "t >= 0 && t < n_classes")
MARGIN = ("MultiMarginLoss.cu", "target_k")
MULTINOMIAL = (
    "TensorCompare.cu:109: _assert_async_cuda_kernel",
    "probability tensor contains either `inf`, `nan` or element < 0",
)
NO_PROBABILITY = ("TensorCompare.cu", "sum of probabilities <= 0")
CROSS_ENTROPY = ("Loss.cu:90", "input_val >= zero && input_val <= one")
MASKED = ("IndexKernel.cu: masked_scatter_size_check", "totalElements <= srcSize")
# (the call, file and part)
CALLS = {
    "index": (lambda x, bad: x[bad], "IndexKernel.cu:111", INDEX[1]),
    "index of the host": (lambda x, bad: x[torch.tensor([9])], *INDEX),
    "index, set": (lambda x, bad: x.index_put_((bad,), x[0] * 2), *INDEX),
    "index, added": (lambda x, bad: x.index_put_((bad,), x[0] * 2, accumulate=True), *INDEX),
    "gather": (lambda x, bad: x.gather(0, bad), *SCATTER),
    "scatter": (lambda x, bad: x.scatter(0, bad, x), *SCATTER),
    "scatter_": (lambda x, bad: x.scatter_(0, bad, 1.0), *SCATTER),
    "scatter_add": (lambda x, bad: x.scatter_add(0, bad, x), *SCATTER),
    "scatter_reduce": (lambda x, bad: x.scatter_reduce(0, bad, x, "amax"), *SCATTER),
    "index_select": (lambda x, bad: x.index_select(0, bad), *SELECT),
    "index_add": (lambda x, bad: x.index_add(0, bad, x[:2]), "Indexing.cu", "dstIndex"),
    "index_copy": (lambda x, bad: x.index_copy(0, bad, x[:2]), "IndexKernel.cu", "index_copy"),
    "index_fill": (lambda x, bad: x.index_fill_(0, bad, 1.0), "IndexKernel.cu", "Index out"),
    "take": (lambda x, bad: x.take(bad), "IndexKernel.cu", "take_put"),
    "out": (lambda x, bad: torch.index_select(x, 0, bad, out=on_gpu()), *SELECT),
    "embedding": (lambda x, bad: F.embedding(bad, x[:, None]), *SELECT),
    "bags": (lambda x, bad: F.embedding_bag(bad[None], x[:, None]), "EmbeddingBag.cu", "num"),
    "one_hot": (lambda x, bad: F.one_hot(bad, 3), *SCATTER),
    "cross_entropy": (lambda x, bad: F.cross_entropy(x.expand(2, 3), bad), *LABELS),
    "images": (lambda x, bad: of_images(), *IMAGES),
    "margin": (lambda x, bad: F.multi_margin_loss(x.expand(2, 3), bad), *MARGIN),
    "multinomial": (lambda x, bad: torch.multinomial(-x, 1), *MULTINOMIAL),
    "multinomial of nan": (
        lambda x, bad: torch.multinomial(x * torch.nan, 2, True),
        *MULTINOMIAL,
    ),
    "multinomial of zeros": (lambda x, bad: torch.multinomial(x * 0, 1), *NO_PROBABILITY),
    "bernoulli": (lambda x, bad: torch.bernoulli(x * 2), "DistributionBernoulli.cu", "<= 1"),
    "binary_cross_entropy": (lambda x, bad: F.binary_cross_entropy(x * 2, x), *CROSS_ENTROPY),
    "masked_scatter": (lambda x, bad: x.masked_scatter(x > 0, x[:1]), *MASKED),
    "poisson": (lambda x, bad: torch.poisson(-x), "Distributions.cu", "lambda >= 0"),
    "_assert_async": (lambda x, bad: torch._assert_async(x[0] - 1), "TensorCompare", "input"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_call_returns_and_the_next_wait_raises(fresh_cuda, capfd, name):
    call, file, condition = CALLS[name]
    x = torch.ones(3, device="cuda")
    bad = on_gpu(0, 9)
    out = call(x, bad)
    line = capfd.readouterr().err
    assert f"native/cuda/{file}" in line and condition in line and line.endswith("failed.\n")
    assert "block: [0,0,0], thread: [0,0,0] Assertion `" in line
    if out is not None:
        # The device does not know yet either, so the host launches more.
        (out + 1).sum()
    with pytest.raises(torch.AcceleratorError, match=ASSERTS):
        torch.cuda.synchronize()
    with pytest.raises(torch.AcceleratorError, match=ASSERTS):
        x + 1


WAITS = {
    "item": lambda x, y: y.sum().item(),
    "another tensor": lambda x, y: x.tolist(),
    "cpu": lambda x, y: y.cpu(),
    "to": lambda x, y: y.to("cuda:1"),
    "numpy": lambda x, y: y.numpy(force=True),
    "print": lambda x, y: str(y),
    "format": lambda x, y: f"{y[0]}",
    "from the host": lambda x, y: torch.ones(2).cuda(),
    "torch.tensor": lambda x, y: torch.tensor([1], device="cuda"),
    "nonzero": lambda x, y: y.nonzero(),
    "a mask": lambda x, y: x[x > 0],
    "equal": lambda x, y: torch.equal(y, y),
    "synchronize": lambda x, y: torch.cuda.synchronize(),
    "accelerator": lambda x, y: torch.accelerator.synchronize(),
    "stream": lambda x, y: torch.cuda.current_stream().synchronize(),
    "query": lambda x, y: torch.cuda.current_stream().query(),
    "event": lambda x, y: torch.cuda.current_stream().record_event().synchronize(),
    "save": lambda x, y: torch.save(x, "/dev/null"),
    "mem_get_info": lambda x, y: torch.cuda.mem_get_info(),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_raises_and_raises_again(fresh_cuda, name):
    x = torch.ones(3, device="cuda")
    y = x[on_gpu(9, 0)]
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError, match=ASSERTS) as error:
            WAITS[name](x, y)
    assert error.value.error_code == 710


def test_each_later_call_raises_with_cudas_text(fresh_cuda):
    x = torch.ones(3, device="cuda")
    y = x[on_gpu(9)]
    with pytest.raises(torch.AcceleratorError) as error:
        y.item()
    assert str(error.value).startswith("CUDA error: device-side assert triggered\n")
    assert "passing CUDA_LAUNCH_BLOCKING=1\n" in str(error.value)
    later = [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.randn(2, device="cuda"),
        lambda: torch.full_like(x, 2),
        lambda: x.add_(1),
    ]
    for call in later:
        with pytest.raises(torch.AcceleratorError, match=ASSERTS):
            call()
    # The driver has no part in these, and the other GPU is well.
    assert x.view(3, 1).shape == (3, 1) and torch.cuda.memory_allocated() > 0
    assert (torch.ones(2, device="cuda:1") + 1).tolist() == [2.0, 2.0]


def test_backward_of_a_wrong_index_touches_no_memory_of_the_host(fresh_cuda):
    weight = torch.ones(3, 2, device="cuda", requires_grad=True)
    bags = F.embedding_bag(on_gpu(0, 10**9)[None], weight, mode="sum", scale_grad_by_freq=True)
    bags.sum().backward()
    torch.optim.SGD([weight], 0.1).step()
    with pytest.raises(torch.AcceleratorError, match=ASSERTS):
        weight.grad.cpu()


ERRORS_OF_THE_HOST = {
    "a dimension": (lambda x: x.index_select(3, on_gpu(0)), IndexError),
    "select": (lambda x: x[9], IndexError),
    "too many indices": (lambda x: x[on_gpu(0), on_gpu(0)], IndexError),
    "a dimension of index_copy": (lambda x: x.index_copy(2, on_gpu(0), x[:1]), IndexError),
    "dtypes": (lambda x: x.scatter_add(0, on_gpu(0), x[:1].double()), RuntimeError),
}


@pytest.mark.parametrize("name", ERRORS_OF_THE_HOST)
def test_what_the_host_finds_is_no_assert(fresh_cuda, name):
    call, kind = ERRORS_OF_THE_HOST[name]
    x = torch.ones(3, device="cuda")
    with pytest.raises(kind) as error:
        call(x)
    assert ASSERTS not in str(error.value) and (x + 1).tolist() == [2.0, 2.0, 2.0]


def test_with_launch_blocking_the_call_itself_raises(monkeypatch, capfd):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    face.put_on()
    try:
        x = torch.ones(3, device="cuda")
        with pytest.raises(torch.AcceleratorError) as error:
            F.cross_entropy(x.expand(2, 3), on_gpu(0, 3))
        assert "LAUNCH_BLOCKING" not in str(error.value) and ASSERTS in str(error.value)
        assert "Loss.cu:245" in capfd.readouterr().err
        with pytest.raises(torch.AcceleratorError, match=ASSERTS):
            torch.ones(2).cuda()
    finally:
        face.take_off()


RANKS = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
x = torch.ones(3, device="cuda")
dist.all_reduce(x)
y = x[torch.tensor([9 * rank], device="cuda")]
try:
    print(f"rank {rank} has {y.item()}", flush=True)
except torch.AcceleratorError as error:
    print(f"rank {rank}: {str(error).splitlines()[0]}", flush=True)
"""


def test_the_assert_of_a_rank_leaves_the_others_alone(tmp_path):
    """The run also ends with a report, for which no host waits."""
    script = write(tmp_path, RANKS)
    done = virtual(tmp_path, "--gpus", 2, *TORCHRUN, "--nproc-per-node=2", script)
    assert done.returncode == 0, done.stdout
    assert "rank 0 has 2.0" in done.stdout
    assert f"rank 1: CUDA error: {ASSERTS}" in done.stdout
    assert "rank 1, cuda:1" in done.stdout
