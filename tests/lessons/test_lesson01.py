"""Lesson 01: one process, whatever loads its data, learns what the plain loop learns."""

import json
import os
import re
import sys
import threading
import time

import nbformat
import pytest
import torch
from commands import ROOT, run_script, torchrun
from virtual_runs import virtual

from multigpu.notebooks import cells

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_SingleGPU as lesson

SCRIPT = ROOT / "scripts" / "PT_CNN_SingleGPU.py"
PAGE = ROOT / "lessons" / "01-one-gpu"


def weights(folder) -> list[torch.Tensor]:
    return list(torch.load(folder / "model.pt", weights_only=True).values())


def test_workers_change_no_bit(tmp_path, npz):
    """Uneven last batch: 35 images, 8 a step."""
    flags = ("--data", npz(), "--epochs", 2, "--batch-size", 8, "--prove")
    for workers in (0, 1, 2):
        more = ("--workers", workers, "--out", tmp_path / str(workers))
        done = run_script(SCRIPT, *flags, *more)
        assert done.returncode == 0, done.stdout
        assert "equals the plain loop" in done.stdout
        assert "limit 1e-05: holds" in done.stdout
    first, *others = (weights(tmp_path / str(workers)) for workers in (0, 1, 2))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_proof_fails_where_the_data_come_in_another_order(
    tmp_path, npz, monkeypatch, capsys
):
    """A sampler that gets no seed."""
    unseeded = lesson.RandomSampler
    monkeypatch.setattr(lesson, "RandomSampler", lambda data, generator: unseeded(data))
    flags = ("--data", npz(), "--epochs", 1, "--batch-size", 8, "--prove", "--out", tmp_path)
    with pytest.raises(SystemExit) as end:
        lesson.main(lesson.parse([str(flag) for flag in flags]))
    assert end.value.code == 1
    assert "fails" in capsys.readouterr().out
    assert not json.loads((tmp_path / "metrics.json").read_text())["proof"]["holds"]


def test_the_last_batch_counts_by_its_images(tmp_path, npz):
    """The mean over images, with a learning rate so small that the weights do not change."""
    flags = ("--data", npz(35), "--epochs", 1, "--batch-size", 8, "--lr", 1e-30)
    lesson.main(lesson.parse([str(flag) for flag in (*flags, "--out", tmp_path)]))
    loss = json.loads((tmp_path / "metrics.json").read_text())["loss"]
    train, _ = lesson.data.load(npz(35))
    torch.manual_seed(0)
    model = lesson.CNN((1, 8, 8), 3)
    images, labels = train.tensors
    expected = torch.nn.functional.cross_entropy(model(images), labels).item()
    assert loss == pytest.approx(expected, abs=1e-6)


def test_profile_prints_operations_and_writes_a_trace(tmp_path, npz):
    flags = ("--data", npz(), "--epochs", 1, "--batch-size", 8, "--profile", "--out", tmp_path)
    done = run_script(SCRIPT, *flags)
    assert done.returncode == 0, done.stdout
    assert "aten::convolution_backward" in done.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::tanh" for event in events)
    # The reading has one measurement, that of `phases`; the profiler gives another one.
    assert not any("DataLoader" in event.get("name", "") for event in events)
    assert "USDT" not in done.stdout, "the profiler's own lines"
    assert max(map(len, done.stdout.splitlines())) <= 95


def test_phases_are_measured_separately():
    """A loader that waits 20 ms, and a step that is much shorter: reading takes longest."""

    def slow():
        for _ in range(6):
            time.sleep(0.02)
            yield torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long)

    model = lesson.CNN()
    spent = lesson.phases(model, torch.optim.SGD(model.parameters(), 0.1), slow())
    assert list(spent) == ["data", "forward", "backward", "update"]
    assert spent["data"] > 0.02
    assert all(seconds > 0 for seconds in spent.values())
    # The thread's own clock stands still while it waits, and while other programs compute.
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    own = lesson.phases(model, optimizer, slow(), clock=time.thread_time)
    assert 0 < own["data"] < 0.02


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--workers", -1), "from 0 up"),
        (("--data", "no.npz"), "no data file"),
        (("--lr", "3e38"), "lower --lr"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, flags, words):
    done = run_script(SCRIPT, *flags, "--out", tmp_path / "out")
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("error: ") == 1
    assert words in done.stdout
    assert "Traceback" not in done.stdout


def test_a_launcher_is_refused(tmp_path):
    done = torchrun(2, SCRIPT, "--out", tmp_path)
    assert done.returncode != 0, done.stdout
    assert done.stdout.count("is one process, and torchrun started 2") == 1


# ---- the notebook's experiments -------------------------------------------------------------


def test_the_queue_device_works_after_launch_has_returned(experiments):
    device = experiments.QueueDevice()
    free = threading.Event()
    order = []
    device.launch(lambda: order.append(free.wait(60)))
    device.launch(lambda: order.append("second"))
    assert order == [], "launch has not waited"
    free.set()
    device.synchronize()
    assert order == [True, "second"]
    device.synchronize()  # an empty queue


def test_synchronize_raises_what_an_operation_raised(experiments):
    """As on a GPU: the line that launched it has long succeeded."""
    device = experiments.QueueDevice()
    device.launch(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        device.synchronize()


def test_without_synchronize_the_clock_is_read_before_the_work_is_done(experiments):
    device = experiments.QueueDevice()
    free = threading.Event()
    done = []
    operations = {
        "forward": lambda: done.append(free.wait(60)),
        "update": lambda: done.append("update"),
    }
    readings = experiments.clock_readings(device, operations, [])
    assert list(readings) == ["forward", "update"]
    assert done == []
    free.set()
    device.synchronize()


def test_synchronize_shows_the_work_where_it_is_called(experiments):
    device = experiments.QueueDevice()
    operations = {name: lambda: time.sleep(0.02) for name in ("forward", "backward", "update")}
    each = experiments.clock_readings(device, operations, list(operations))
    assert all(milliseconds >= 20 for milliseconds in each.values())
    last = experiments.clock_readings(device, operations, ["update"])
    assert sum(last.values()) >= 60
    assert last["update"] == max(last.values())


def test_on_paper(experiments):
    steps = [experiments.seconds_on_paper(w, 0.128, 0.060) for w in (0, 1, 2, 4)]
    assert steps == pytest.approx([0.188, 0.128, 0.064, 0.060])
    assert experiments.seconds_on_paper(0, 0.128, 0.030) == pytest.approx(0.158)
    computing = [
        experiments.seconds_on_paper(w, 0.128, 0.060, computing=True, cores=1)
        for w in (0, 1, 4)
    ]
    assert computing == pytest.approx([0.188, 0.128, 0.128])


@pytest.mark.parametrize("computing", [False, True])
def test_the_measured_step_waits_for_the_reading(experiments, computing):
    """Without workers a step reads and computes; a worker reads while the step computes."""
    read, compute = 0.04, 0.01
    serial = experiments.seconds_measured(0, read, compute, computing, batch=4)
    assert serial >= read + compute
    # If this process stops for a while, the worker reads two batches of the four beforehand.
    one_worker = experiments.seconds_measured(1, read, compute, computing, batch=4)
    assert one_worker >= 0.4 * read


def test_images_that_compute_use_the_core(experiments):
    images = experiments.SlowImages(3, 0.02, computing=True)
    before = time.thread_time()
    assert images[2] == 2
    assert time.thread_time() - before >= 0.02
    assert len(images) == 3


def test_each_worker_reads_in_its_own_process(experiments):
    class Readers(experiments.SlowImages):
        def __getitem__(self, index: int) -> int:
            return os.getpid()

    loader = torch.utils.data.DataLoader(Readers(8, 0), 2, num_workers=2)
    readers = {pid.item() for batch in loader for pid in batch}
    assert len(readers) == 2 and os.getpid() not in readers


@pytest.mark.parametrize(("workers", "ahead"), [(1, 2), (4, 2), (2, 5)])
def test_each_worker_reads_prefetch_factor_batches_ahead(experiments, workers, ahead):
    assert experiments.batches_read(workers, ahead) == workers * ahead + 1


@pytest.mark.slow
def test_events_show_the_gpus_time_and_a_clock_without_waiting_the_launches(tmp_path):
    """A large batch, on the simulated clock. A small one waits for the host: all are equal."""
    options = ("--gpus", "1", "--clock", "simulated", "--shapes-only")
    times = {}
    for batch in ("4096", "64"):
        done = virtual(tmp_path, *options, PAGE / "gpu_clocks.py", batch)
        assert done.returncode == 0, done.stdout
        found = re.search(r"without waiting (\S+), .*synchronize (\S+), .* (\S+)", done.stdout)
        times[batch] = [float(time) for time in found.groups()]
    without, waited, events = times["4096"]
    assert events == pytest.approx(waited, rel=0.01)
    assert without < events / 4
    assert max(times["64"]) < 1.05 * min(times["64"])


# ---- the stored notebook --------------------------------------------------------------------


def test_the_notebook_has_no_line_of_the_profilers_own():
    notebook = nbformat.read(ROOT / "notebooks" / "PT_CNN_SingleGPU.ipynb", as_version=4)
    assert "USDT" not in cells.printed(notebook)


def test_something_runs_by_the_third_visible_cell():
    notebook = nbformat.read(ROOT / "notebooks" / "PT_CNN_SingleGPU.ipynb", as_version=4)
    visible = [
        cell
        for cell in notebook.cells
        if not cell.metadata.get("jupyter", {}).get("source_hidden")
        and "how-to-run" not in cell.metadata.get("tags", [])
    ]
    assert any(cell.get("outputs") for cell in visible[:3])
