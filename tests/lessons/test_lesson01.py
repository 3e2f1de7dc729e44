"""Lesson 01: one process, whatever loads its data, learns what the plain loop learns."""

import json
import shutil
import sys

import pytest
import torch
from commands import ROOT, planted, run_script
from virtual_runs import virtual

from multigpu.virtual import face

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_SingleGPU as lesson

SCRIPT = ROOT / "scripts" / "PT_CNN_SingleGPU.py"
PAGE = ROOT / "lessons" / "01-one-gpu"
EPOCHS, BATCH = 2, 8
# A sampler that gets no seed: the data come in another order.
UNSEEDED = """
sampler = lesson.RandomSampler
lesson.RandomSampler = lambda train, generator: sampler(train)
"""


@pytest.fixture(autouse=True)
def taken_off():
    yield
    face.take_off()


def trained(script, data, out, *flags) -> dict[str, torch.Tensor]:
    """The weights that a run of the script writes."""
    flags = ("--data", data, "--epochs", EPOCHS, "--batch-size", BATCH, "--out", out, *flags)
    done = run_script(script, *flags)
    assert done.returncode == 0, done.stdout
    return torch.load(out / "model.pt", weights_only=True)


def plain_loop(path) -> dict[str, torch.Tensor]:
    """The same training without a DataLoader."""
    train, _ = lesson.read_digits(path)
    images, labels = train.tensors
    torch.manual_seed(0)
    model = lesson.CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model.state_dict()


def largest_gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert list(one) == list(other)
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_workers_change_no_bit_and_the_plain_loop_ends_with_equal_weights(
    tmp_path, few_digits
):
    """35 images, 8 a step: the last batch of each epoch has 3."""
    data = few_digits(35)
    none, *others = (
        trained(SCRIPT, data, tmp_path / str(workers), "--workers", workers)
        for workers in (0, 1, 2)
    )
    assert [largest_gap(none, other) for other in others] == [0, 0]
    assert largest_gap(none, plain_loop(data)) < 1e-6


def test_in_another_order_the_weights_differ(tmp_path, few_digits):
    data = few_digits(35)
    found = trained(planted(tmp_path, "PT_CNN_SingleGPU", UNSEEDED), data, tmp_path / "o")
    assert largest_gap(found, plain_loop(data)) > 1e-4


def test_the_last_batch_counts_by_its_images(tmp_path, few_digits):
    """The mean over images, with a learning rate so small that the weights do not change."""
    data = few_digits(35)
    trained(SCRIPT, data, tmp_path, "--lr", 1e-30)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    torch.manual_seed(0)
    images, labels = lesson.read_digits(data)[0].tensors
    expected = torch.nn.functional.cross_entropy(lesson.CNN()(images), labels).item()
    assert metrics["loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_a_copy_trains_alone_and_on_a_gpu_as_on_the_cpu(tmp_path, few_digits):
    """In an empty folder; on the CPU where no library can be imported."""
    copy = shutil.copy(SCRIPT, tmp_path)
    flags = ("--data", few_digits(35), "--epochs", EPOCHS, "--out")
    alone = "import runpy, sys; sys.modules['multigpu'] = None; sys.argv[:] = sys.argv[1:]; "
    alone += "runpy.run_path(sys.argv[0], run_name='__main__')"
    on_cpu = run_script("-c", alone, copy, *flags, "cpu", cwd=tmp_path)
    assert on_cpu.returncode == 0 and "device: cpu\nepoch 1:" in on_cpu.stdout, on_cpu.stdout
    on_gpu = virtual(tmp_path, "--gpus", 1, copy, *flags, tmp_path / "gpu")
    assert "device: cuda:0\nepoch 1:" in on_gpu.stdout, on_gpu.stdout
    gap = largest_gap(
        *(torch.load(tmp_path / one / "model.pt", weights_only=True) for one in ("cpu", "gpu"))
    )
    assert gap < 1e-5


# ---- the notebook's experiments -------------------------------------------------------------


@pytest.mark.parametrize("computing", [False, True])
def test_the_measured_step_waits_for_the_reading(experiments, computing):
    """Without workers a step reads and computes; a worker reads while the step computes."""
    read, compute = 0.04, 0.01
    serial = experiments.seconds_measured(0, read, compute, computing, batch=4)
    assert serial >= read + compute
    # If this process stops for a while, the worker reads two batches of the four beforehand.
    one_worker = experiments.seconds_measured(1, read, compute, computing, batch=4)
    assert one_worker >= 0.4 * read


@pytest.mark.parametrize(("workers", "ahead"), [(1, 2), (4, 2), (2, 5)])
def test_each_worker_reads_prefetch_factor_batches_ahead(experiments, workers, ahead):
    assert experiments.batches_read(workers, ahead) == workers * ahead + 1
