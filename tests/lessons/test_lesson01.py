"""Lesson 01: one process, whatever loads its data, learns what the plain loop learns."""

import json
import sys
import time

import pytest
import torch
from commands import ROOT, run_script, torchrun

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_SingleGPU as lesson

SCRIPT = ROOT / "scripts" / "PT_CNN_SingleGPU.py"


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
