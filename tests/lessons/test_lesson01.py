"""Lesson 01: one process, whatever loads its data, learns what the plain loop learns."""

import json
import sys
import time

import pytest
import torch
from commands import ROOT, run, torchrun

sys.path.insert(0, str(ROOT / "scripts"))
import PT_CNN_SingleGPU as lesson

SCRIPT = ROOT / "scripts" / "PT_CNN_SingleGPU.py"


def weights(folder) -> list[torch.Tensor]:
    return list(torch.load(folder / "model.pt", weights_only=True).values())


def test_workers_change_no_bit(tmp_path, npz):
    """Uneven last batch: 35 images, 8 a step."""
    flags = ("--data", npz(), "--epochs", 2, "--batch-size", 8, "--prove")
    for workers in (0, 1, 2):
        done = run(
            "python", SCRIPT, *flags, "--workers", workers, "--out", tmp_path / str(workers)
        )
        assert (
            done.returncode == 0 and "equals the plain loop after 2 epochs" in done.stdout
        ), done.stdout
        assert "limit 1e-05: holds" in done.stdout
    first, *others = (weights(tmp_path / str(workers)) for workers in (0, 1, 2))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_proof_fails_where_the_data_come_in_another_order(
    tmp_path, npz, monkeypatch, capsys
):
    """A sampler that takes no seed, as in many a script."""
    unseeded = lesson.RandomSampler
    monkeypatch.setattr(lesson, "RandomSampler", lambda data, generator: unseeded(data))
    flags = [
        "--data",
        str(npz()),
        "--epochs",
        "1",
        "--batch-size",
        "8",
        "--prove",
        "--out",
        str(tmp_path),
    ]
    with pytest.raises(SystemExit) as end:
        lesson.main(lesson.parse(flags))
    assert end.value.code == 1 and "fails" in capsys.readouterr().out
    assert not json.loads((tmp_path / "metrics.json").read_text())["proof"]["holds"]


def test_the_last_batch_counts_by_its_images(tmp_path, npz):
    """The mean over images, with a learning rate so small that the model stays as it was."""
    flags = [
        "--data",
        str(npz(35)),
        "--epochs",
        "1",
        "--batch-size",
        "8",
        "--lr",
        "1e-30",
        "--out",
        str(tmp_path),
    ]
    lesson.main(lesson.parse(flags))
    told = json.loads((tmp_path / "metrics.json").read_text())["loss"]
    train, _ = lesson.data.load(npz(35))
    torch.manual_seed(0)
    model = lesson.CNN((1, 8, 8), 3)
    expected = torch.nn.functional.cross_entropy(
        model(train.tensors[0]), train.tensors[1]
    ).item()
    assert told == pytest.approx(expected, abs=1e-6)


def test_profile_tells_operations_and_writes_a_trace(tmp_path, npz):
    done = run(
        "python",
        SCRIPT,
        "--data",
        npz(),
        "--epochs",
        1,
        "--batch-size",
        8,
        "--profile",
        "--out",
        tmp_path,
    )
    assert done.returncode == 0 and "aten::convolution_backward" in done.stdout, done.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::tanh" for event in events)


def test_phases_are_told_apart():
    """Data that come after 20 ms, in a step that is much shorter: the data's share is the largest by far."""

    def slow():
        for _ in range(6):
            time.sleep(0.02)
            yield torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long)

    model = lesson.CNN()
    spent = lesson.phases(model, torch.optim.SGD(model.parameters(), 0.1), slow())
    assert list(spent) == ["data", "forward", "backward", "update"]
    assert spent["data"] > 0.02 and all(seconds > 0 for seconds in spent.values())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--workers", -1), "from 0 up"),
        (("--data", "no.npz"), "no data file"),
        (("--lr", "3e38"), "lower --lr"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, flags, words):
    done = run("python", SCRIPT, *flags, "--out", tmp_path / "out")
    assert (
        done.returncode == 2 and done.stdout.count("error: ") == 1 and words in done.stdout
    ), done.stdout
    assert "Traceback" not in done.stdout


def test_a_launcher_is_refused(tmp_path):
    done = torchrun(2, SCRIPT, "--out", tmp_path)
    assert (
        done.returncode != 0
        and done.stdout.count("is one process, and torchrun started 2") == 1
    ), done.stdout
