"""Lesson 03: layers on two GPUs, and a pipeline of processes, learn what one GPU learns."""

import sys

import pytest
import torch
from commands import ROOT, planted, torchrun

from multigpu import proof, prove

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_ModelParallel as lesson

SCRIPT = ROOT / "scripts" / "PT_CNN_ModelParallel.py"
PIPELINE = ROOT / "scripts" / "PT_CNN_Pipeline.py"
SINGLE = ROOT / "scripts" / "PT_CNN_SingleGPU.py"
TORCHRUN = ("torchrun", "--standalone", "--local-addr=127.0.0.1")
# The last of an epoch's 3 batches has 477 images: the pipeline pads it.
FLAGS = ("--batch-size", "480")


# ---- one process, two devices ----


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_halves_equal_one_device_after_each_step(micro_batches, two):
    """10 images: 3 micro-batches have 4, 4 and 2."""
    first, second = two
    torch.manual_seed(0)
    halves = lesson.Halves(lesson.CNN(), first, second)
    torch.manual_seed(0)
    serial = lesson.CNN()
    optimizer = torch.optim.SGD(halves.parameters(), 0.05, momentum=0.9)
    serial_optimizer = torch.optim.SGD(serial.parameters(), 0.05, momentum=0.9)
    for _ in range(5):
        images, labels = torch.rand(10, 1, 8, 8), torch.randint(0, 10, (10,))
        expected = lesson.step(serial, serial_optimizer, images, labels)
        images, labels = images.to(first), labels.to(second)
        loss = lesson.step(halves, optimizer, images, labels, micro_batches)
        assert abs(loss.item() - expected.item()) < 1e-6
        assert proof.difference(halves, serial) <= 1e-6


def test_the_convolutions_are_on_the_first_gpu_and_the_linear_layers_on_the_second(two):
    """A proof does not see that: in its reference both GPUs are one."""
    first, second = two
    devices = {
        name: weight.device
        for name, weight in lesson.Halves(lesson.CNN(), first, second).named_parameters()
    }
    assert {devices["conv1.weight"], devices["conv2.weight"]} == {first}
    assert {devices["fc1.weight"], devices["fc2.weight"]} == {second}


NO_GRADIENT_GOES_BACK = """
def forward(self, images):
    x = torch.tanh(self.conv2(torch.tanh(self.conv1(images)))).detach().to(self.second)
    return self.fc2(torch.tanh(self.fc1(x.flatten(1))))

lesson.Halves.forward = forward
"""


def proof_with_one_gpu(script) -> prove.Proof:
    """Against the script's own code on one GPU, such a fault would be in both runs."""
    return prove.run([str(script)], gpus=2, reference=str(SINGLE), steps=2, timeout=100)


@pytest.mark.long
@pytest.mark.slow
def test_layers_on_two_gpus_learn_what_one_gpu_learns(in_forks):
    found = proof_with_one_gpu(SCRIPT)
    assert found.verdict == "holds", str(found)


@pytest.mark.slow
def test_where_no_gradient_goes_back_the_proof_fails(in_forks, tmp_path):
    path = planted(tmp_path, "PT_CNN_ModelParallel", NO_GRADIENT_GOES_BACK)
    found = proof_with_one_gpu(path)
    assert found.verdict == "fails", str(found)


# ---- one process per stage ----


def pipeline_proof(script, ranks: int, *flags: object) -> prove.Proof:
    words = [*TORCHRUN, f"--nproc-per-node={ranks}", str(script), *FLAGS, *map(str, flags)]
    one_gpu = " ".join([str(SINGLE), *FLAGS])
    return prove.run(words, reference=one_gpu, steps=4, timeout=100)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "schedule", "micro_batches"), [(2, "1f1b", 4), (3, "gpipe", 5)]
)
def test_the_pipeline_learns_what_one_gpu_learns(in_forks, ranks, schedule, micro_batches):
    flags = ("--schedule", schedule, "--micro-batches", micro_batches)
    found = pipeline_proof(PIPELINE, ranks, *flags)
    assert found.verdict == "holds", str(found)


PADDING_COUNTS = """
pad = lesson.F.pad
lesson.F.pad = lambda x, by, value=0: pad(x, by, value=max(value, 0))
"""


@pytest.mark.slow
def test_where_the_padding_counts_the_proof_fails(in_forks, tmp_path):
    found = pipeline_proof(planted(tmp_path, "PT_CNN_Pipeline", PADDING_COUNTS), 2)
    assert found.verdict == "fails", str(found)
    assert "from step 3 on" in found.line


# ---- mistakes ----


def test_ranks_that_cannot_share_the_micro_batches_say_so_and_end(tmp_path):
    done = torchrun(3, PIPELINE, "--micro-batches", 2, cwd=tmp_path, timeout=60)
    assert done.returncode != 0, done.stdout
    assert "--micro-batches: 3 or more" in done.stdout


def test_a_rank_that_dies_ends_the_pipeline(tmp_path):
    fault = "if os.environ['RANK'] == '1': lesson.F.pad = None"
    path = planted(tmp_path, "PT_CNN_Pipeline", fault)
    done = torchrun(2, path, cwd=tmp_path, timeout=60)
    assert done.returncode != 0, done.stdout
    assert "TypeError" in done.stdout
    assert not list(tmp_path.rglob("*.pt"))
