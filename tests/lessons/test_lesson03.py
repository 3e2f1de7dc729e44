"""Lesson 03: two halves on two GPUs, and a pipeline of processes, learn what one GPU learns."""

import sys

import pytest
import torch
from commands import ROOT, planted, run, torchrun

from multigpu import proof, vgpu
from multigpu.models import CNN

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_ModelParallel as lesson

SCRIPT = ROOT / "scripts" / "PT_CNN_ModelParallel.py"
PIPELINE = ROOT / "scripts" / "PT_CNN_Pipeline.py"
FLAGS = ("--epochs", 2, "--batch-size", 8, "--prove")

FAULTS = {
    "the filling counts": "pad = lesson.F.pad\nlesson.F.pad = lambda x, by, value=0: pad(x, by, value=max(value, 0))",
    "no gradient comes back": "lesson.PipelineStage.get_bwd_send_ops = lambda self, piece: []\n"
    "lesson.PipelineStage.get_bwd_recv_ops = lambda self, piece: []\n"
    "lesson.PipelineStage._retrieve_recv_grads = lambda self, piece: (torch.zeros(2, 512),)",
    "GPipe's mean over pieces": "plain = lesson.schedule\n"
    "def schedule(*args):\n    run = plain(*args)\n    run.scale_grads = True\n    return run\n"
    "lesson.schedule = schedule",
}


def batches(number: int, size: int):
    source = torch.Generator().manual_seed(5)
    for _ in range(number):
        yield (
            torch.rand(size, 1, 8, 8, generator=source),
            torch.randint(0, 10, (size,), generator=source),
        )


# ---- one process, two devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [1, 2, 3, 10])
def test_halves_equal_one_device_after_each_step(pieces, two):
    """10 images: 3 pieces are 4, 4 and 2."""
    torch.manual_seed(0)
    halves = lesson.Halves(*two)
    torch.manual_seed(0)
    serial = CNN()
    ours = torch.optim.SGD(halves.parameters(), 0.05, momentum=0.9)
    theirs = torch.optim.SGD(serial.parameters(), 0.05, momentum=0.9)
    for images, labels in batches(5, 10):
        loss = lesson.step(halves, ours, images.to(two[0]), labels.to(two[1]), pieces)
        assert abs(loss.item() - lesson.step(serial, theirs, images, labels).item()) < 1e-6
        assert proof.difference(halves, serial) <= 1e-6


def test_the_layers_are_where_the_lesson_says(two):
    halves = lesson.Halves(*two)
    assert {name: weight.device for name, weight in halves.named_parameters() if "weight" in name} == {
        "conv1.weight": two[0], "conv2.weight": two[0], "fc1.weight": two[1], "fc2.weight": two[1],
    }  # fmt: skip


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_the_run_equals_one_process(tmp_path, npz, pieces):
    """35 images in batches of 8: the last one has 3, fewer than pieces."""
    done = run(
        "python", SCRIPT, "--data", npz(), *FLAGS, "--pieces", pieces, "--out", tmp_path / "o"
    )
    assert done.returncode == 0 and "limit 1e-05: holds" in done.stdout, done.stdout
    assert all(
        weight.device.type == "cpu"
        for weight in torch.load(tmp_path / "o" / "model.pt").values()
    )


def test_where_no_gradient_goes_back_the_proof_fails(tmp_path, npz, monkeypatch, capsys):
    def forward(self, images):
        x = torch.tanh(self.conv2(torch.tanh(self.conv1(images)))).detach().to(self.second)
        return self.fc2(torch.tanh(self.fc1(x.flatten(1))))

    monkeypatch.setattr(lesson.Halves, "forward", forward)
    try:
        # the optimizer skips what has no gradient
        with pytest.raises(SystemExit):
            lesson.main(
                lesson.parse(
                    [
                        str(flag)
                        for flag in ("--data", npz(), *FLAGS, "--pieces", 2, "--out", tmp_path)
                    ]
                )
            )
    finally:
        vgpu.stop()
    assert "limit 1e-05: fails" in capsys.readouterr().out


def two_steps(model, first, last, batch: int = 320) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(2):
        images = torch.rand(batch, 1, 28, 28, device=first)
        lesson.step(
            model, optimizer, images, torch.zeros(batch, dtype=torch.long, device=last)
        )


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


def test_the_bubble_and_the_best_number_of_pieces():
    """Naive is slower than one GPU; pieces are faster than both; too many are not; less is never lost than the formula."""

    def simulate(pieces: int, halves: bool = True):
        with vgpu.running(2, compute=False) as (first, second):
            model = (
                lesson.Halves(first, second, (1, 28, 28), hidden=320)
                if halves
                else CNN((1, 28, 28), hidden=320)
            )
            model, last = (model, second) if halves else (model.to(first), first)
            optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            images = torch.empty(4096, 1, 28, 28, device=first)
            for _ in range(2):
                began = vgpu.elapsed()
                lesson.step(
                    model,
                    optimizer,
                    images,
                    torch.empty(4096, dtype=torch.long, device=last),
                    pieces,
                )
            return vgpu.elapsed() - began, vgpu.timeline(since=began)

    one = simulate(1, halves=False)[0]
    runs = {pieces: simulate(pieces) for pieces in (1, 2, 8, 32)}
    assert runs[8][0] < runs[2][0] < one < runs[1][0] and runs[8][0] < runs[32][0]
    for pieces, (_, timeline) in runs.items():
        assert (timeline.idle(0) + timeline.idle(1)) / 2 > 1 / (pieces + 1)
    # naive: the two never compute at the same time
    assert (
        runs[1][1].busy(0) + runs[1][1].busy(1) < 1 < runs[8][1].busy(0) + runs[8][1].busy(1)
    )


# ---- a process a stage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "schedule", "pieces"),
    [(2, "gpipe", 4), (2, "1f1b", 2), (3, "1f1b", 4), (4, "gpipe", 4)],
)
def test_the_pipeline_equals_one_process(tmp_path, npz, ranks, schedule, pieces):
    """35 images in batches of 8: the last one is filled up."""
    more = (
        "--schedule",
        schedule,
        "--pieces",
        pieces,
        "--spawn",
        ranks,
        "--out",
        tmp_path / "o",
    )
    done = run("python", PIPELINE, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 0 and "limit 1e-05: holds" in done.stdout, done.stdout
    assert f"{schedule} with {ranks} stages equals one process" in done.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_proof_fails(tmp_path, npz, fault):
    path = planted(tmp_path, "PT_CNN_Pipeline", FAULTS[fault])
    more = ("--schedule", "gpipe", "--spawn", 2, "--out", tmp_path / "o")
    done = run("python", path, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 1 and "limit 1e-05: fails" in done.stdout, done.stdout


# ---- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        (SCRIPT, ("--pieces", 3), "cannot be split evenly over 1 rank × 3 pieces"),
        (SCRIPT, ("--pieces", 0), "from 1 up"),
        (SCRIPT, ("--lr", "3e38"), "lower --lr"),
        (PIPELINE, (), "2, 3 or 4 stages, not 1"),
        (PIPELINE, ("--spawn", 5), "2, 3 or 4 stages, not 5"),
        (PIPELINE, ("--spawn", 3, "--pieces", 2), "too few for 1F1B on 3 stages"),
        (PIPELINE, ("--spawn", 2, "--lr", "3e38"), "lower --lr"),
        (PIPELINE, ("--spawn", 2, "--data", "no.npz"), "no data file"),
        (PIPELINE, ("--spawn", 2, "--schedule", "zigzag"), "invalid choice"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, script, flags, words):
    batch = ("--batch-size", 64) if "--pieces" in flags else ()
    done = run("python", script, *flags, *batch, "--out", tmp_path / "out")
    assert (
        done.returncode == 2 and done.stdout.count("error: ") == 1 and words in done.stdout
    ), done.stdout
    assert "Traceback" not in done.stdout and not list(tmp_path.rglob("model.pt"))


def test_a_launcher_is_refused_where_one_process_has_all_gpus(tmp_path):
    done = torchrun(2, SCRIPT, "--out", tmp_path)
    assert (
        done.returncode != 0
        and done.stdout.count("is one process, and torchrun started 2") == 1
    ), done.stdout


def test_ranks_that_read_other_data(tmp_path, npz):
    """On nodes whose disks are not the same, say."""
    path = planted(
        tmp_path, "PT_CNN_Pipeline", "lesson.data.checksum = lambda train: os.environ['RANK']"
    )
    done = run(
        "python", path, "--data", npz(), "--spawn", 3, "--out", tmp_path / "o", timeout=60
    )
    words = "the training data of rank 1 is not that of rank 0"
    assert (
        done.returncode == 2 and done.stdout.count("error: ") == 1 and words in done.stdout
    ), done.stdout


def test_a_rank_that_dies_ends_the_pipeline(tmp_path, npz):
    path = planted(tmp_path, "PT_CNN_Pipeline", "lesson.F.pad = None")
    done = run(
        "python", path, "--data", npz(), "--spawn", 2, "--out", tmp_path / "o", timeout=60
    )
    assert (
        done.returncode == 1
        and "TypeError" in done.stdout
        and not list(tmp_path.rglob("*.pt"))
    ), done.stdout
