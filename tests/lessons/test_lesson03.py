"""Lesson 03: halves on two GPUs, and a pipeline of processes, learn what one GPU learns."""

import sys

import pytest
import torch
from commands import ROOT, planted, run_script, torchrun

from multigpu import proof, vgpu
from multigpu.models import CNN

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_ModelParallel as lesson

SCRIPT = ROOT / "scripts" / "PT_CNN_ModelParallel.py"
PIPELINE = ROOT / "scripts" / "PT_CNN_Pipeline.py"
FLAGS = ("--epochs", 2, "--batch-size", 8, "--prove")

PADDING_COUNTS = """
pad = lesson.F.pad
lesson.F.pad = lambda x, by, value=0: pad(x, by, value=max(value, 0))
"""
NO_GRADIENT_COMES_BACK = """
stage = lesson.PipelineStage
stage.get_bwd_send_ops = lambda self, index: []
stage.get_bwd_recv_ops = lambda self, index: []
stage._retrieve_recv_grads = lambda self, index: (torch.zeros(2, 512),)
"""
MEAN_OVER_MICRO_BATCHES = """
original = lesson.schedule

def schedule(*args):
    pipeline = original(*args)
    pipeline.scale_grads = True
    return pipeline

lesson.schedule = schedule
"""
FAULTS = {
    "the padding counts": PADDING_COUNTS,
    "no gradient comes back": NO_GRADIENT_COMES_BACK,
    "GPipe's mean over micro-batches": MEAN_OVER_MICRO_BATCHES,
}


def batches(number: int, size: int):
    source = torch.Generator().manual_seed(5)
    for _ in range(number):
        yield (
            torch.rand(size, 1, 8, 8, generator=source),
            torch.randint(0, 10, (size,), generator=source),
        )


# ---- one process, two devices ----


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 10])
def test_halves_equal_one_device_after_each_step(micro_batches, two):
    """10 images: 3 micro-batches have 4, 4 and 2."""
    first, second = two
    torch.manual_seed(0)
    halves = lesson.Halves(first, second)
    torch.manual_seed(0)
    serial = CNN()
    optimizer = torch.optim.SGD(halves.parameters(), 0.05, momentum=0.9)
    serial_optimizer = torch.optim.SGD(serial.parameters(), 0.05, momentum=0.9)
    for images, labels in batches(5, 10):
        expected = lesson.step(serial, serial_optimizer, images, labels)
        images = images.to(first)
        labels = labels.to(second)
        loss = lesson.step(halves, optimizer, images, labels, micro_batches)
        assert abs(loss.item() - expected.item()) < 1e-6
        assert proof.difference(halves, serial) <= 1e-6


def test_the_layers_are_where_the_lesson_says(two):
    first, second = two
    halves = lesson.Halves(first, second)
    assert halves.conv1.weight.device == first
    assert halves.conv2.weight.device == first
    assert halves.fc1.weight.device == second
    assert halves.fc2.weight.device == second


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_the_run_equals_one_process(tmp_path, npz, micro_batches):
    """35 images in batches of 8: the last batch has 3, fewer than 4 micro-batches."""
    more = ("--micro-batches", micro_batches, "--out", tmp_path / "o")
    done = run_script(SCRIPT, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 0, done.stdout
    assert "limit 1e-05: holds" in done.stdout
    saved = torch.load(tmp_path / "o" / "model.pt")
    assert all(weight.device.type == "cpu" for weight in saved.values())


def test_where_no_gradient_goes_back_the_proof_fails(tmp_path, npz, monkeypatch, capsys):
    def forward(self, images):
        x = torch.tanh(self.conv2(torch.tanh(self.conv1(images)))).detach().to(self.second)
        return self.fc2(torch.tanh(self.fc1(x.flatten(1))))

    monkeypatch.setattr(lesson.Halves, "forward", forward)
    flags = ("--data", npz(), *FLAGS, "--micro-batches", 2, "--out", tmp_path)
    try:
        # the optimizer skips weights without a gradient
        with pytest.raises(SystemExit):
            lesson.main(lesson.parse([str(flag) for flag in flags]))
    finally:
        vgpu.stop()
    assert "limit 1e-05: fails" in capsys.readouterr().out


def two_steps(model, first, last, batch: int = 320) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(2):
        images = torch.rand(batch, 1, 28, 28, device=first)
        labels = torch.zeros(batch, dtype=torch.long, device=last)
        lesson.step(model, optimizer, images, labels)


def test_too_large_for_one_device_in_the_second_step_and_not_for_two():
    with vgpu.running(1, memory="64MiB", compute=False) as (one,):
        with pytest.raises(torch.OutOfMemoryError):
            two_steps(CNN((1, 28, 28), hidden=320).to(one), one, one)
        assert vgpu.timeline().events[-1].phase == "backward"
        assert any(event.phase == "update" for event in vgpu.timeline().events), (
            "the first step went well"
        )
    with vgpu.running(2, memory="64MiB", compute=False) as (first, second):
        two_steps(lesson.Halves(first, second, (1, 28, 28), hidden=320), first, second)


def test_the_bubble_and_the_best_number_of_micro_batches():
    """Naive is slower than one GPU; 8 micro-batches are faster than 2 and than 32."""

    def simulate(micro_batches: int, halves: bool = True):
        with vgpu.running(2, compute=False) as (first, second):
            if halves:
                model = lesson.Halves(first, second, (1, 28, 28), hidden=320)
                last = second
            else:
                model = CNN((1, 28, 28), hidden=320).to(first)
                last = first
            optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            images = torch.empty(4096, 1, 28, 28, device=first)
            labels = torch.empty(4096, dtype=torch.long, device=last)
            for _ in range(2):
                began = vgpu.elapsed()
                lesson.step(model, optimizer, images, labels, micro_batches)
            return vgpu.elapsed() - began, vgpu.timeline(since=began)

    one_gpu, _ = simulate(1, halves=False)
    seconds = {}
    timelines = {}
    for micro_batches in (1, 2, 8, 32):
        seconds[micro_batches], timelines[micro_batches] = simulate(micro_batches)
    assert seconds[8] < seconds[2] < one_gpu < seconds[1]
    assert seconds[8] < seconds[32]
    for micro_batches, timeline in timelines.items():
        assert (timeline.idle(0) + timeline.idle(1)) / 2 > 1 / (micro_batches + 1)
    # naive: the two GPUs never compute at the same time
    assert timelines[1].busy(0) + timelines[1].busy(1) < 1
    assert timelines[8].busy(0) + timelines[8].busy(1) > 1


# ---- one process per stage ----


@pytest.mark.parametrize(
    ("ranks", "schedule", "micro_batches"),
    [(2, "gpipe", 4), (2, "1f1b", 2), (3, "1f1b", 4), (4, "gpipe", 4)],
)
def test_the_pipeline_equals_one_process(tmp_path, npz, ranks, schedule, micro_batches):
    """35 images in batches of 8: the last batch is padded."""
    flags = ("--data", npz(), *FLAGS, "--schedule", schedule)
    more = ("--micro-batches", micro_batches, "--spawn", ranks, "--out", tmp_path / "o")
    done = run_script(PIPELINE, *flags, *more)
    assert done.returncode == 0, done.stdout
    assert "limit 1e-05: holds" in done.stdout
    assert f"{schedule} with {ranks} stages equals one process" in done.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_proof_fails(tmp_path, npz, fault):
    path = planted(tmp_path, "PT_CNN_Pipeline", FAULTS[fault])
    more = ("--schedule", "gpipe", "--spawn", 2, "--out", tmp_path / "o")
    done = run_script(path, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 1, done.stdout
    assert "limit 1e-05: fails" in done.stdout


# ---- mistakes ----


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        (SCRIPT, ("--micro-batches", 3), "over 1 rank × 3 micro-batches"),
        (SCRIPT, ("--micro-batches", 0), "from 1 up"),
        (SCRIPT, ("--lr", "3e38"), "lower --lr"),
        (PIPELINE, (), "2, 3 or 4 stages, not 1"),
        (PIPELINE, ("--spawn", 5), "2, 3 or 4 stages, not 5"),
        (PIPELINE, ("--spawn", 3, "--micro-batches", 2), "too few for 1F1B on 3 stages"),
        (PIPELINE, ("--spawn", 2, "--lr", "3e38"), "lower --lr"),
        (PIPELINE, ("--spawn", 2, "--data", "no.npz"), "no data file"),
        (PIPELINE, ("--spawn", 2, "--schedule", "zigzag"), "invalid choice"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, script, flags, words):
    batch = ("--batch-size", 64) if "--micro-batches" in flags else ()
    done = run_script(script, *flags, *batch, "--out", tmp_path / "out")
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("error: ") == 1
    assert words in done.stdout
    assert "Traceback" not in done.stdout
    assert not list(tmp_path.rglob("model.pt"))


def test_a_launcher_is_refused_where_one_process_has_all_gpus(tmp_path):
    done = torchrun(2, SCRIPT, "--out", tmp_path)
    assert done.returncode != 0, done.stdout
    assert done.stdout.count("is one process, and torchrun started 2") == 1


def test_ranks_that_read_other_data(tmp_path, npz):
    """As on nodes whose disks hold different files."""
    fault = "lesson.data.checksum = lambda train: os.environ['RANK']"
    path = planted(tmp_path, "PT_CNN_Pipeline", fault)
    flags = ("--data", npz(), "--spawn", 3, "--out", tmp_path / "o")
    done = run_script(path, *flags, timeout=60)
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("error: ") == 1
    (error,) = (line for line in done.stdout.splitlines() if line.startswith("error: "))
    for fact in ("training data", "rank 1", "rank 0"):
        assert fact in error


def test_a_rank_that_dies_ends_the_pipeline(tmp_path, npz):
    path = planted(tmp_path, "PT_CNN_Pipeline", "lesson.F.pad = None")
    flags = ("--data", npz(), "--spawn", 2, "--out", tmp_path / "o")
    done = run_script(path, *flags, timeout=60)
    assert done.returncode == 1, done.stdout
    assert "TypeError" in done.stdout
    assert not list(tmp_path.rglob("*.pt"))
