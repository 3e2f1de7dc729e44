"""Lesson 09: the Trainer learns what one process learns; a mistake is one error message."""

import importlib.util
import json
import re
import sys

import pytest
from commands import ROOT, planted, run_script, torchrun

SCRIPT = ROOT / "scripts" / "PTL_multiGPU.py"
PAGE = ROOT / "lessons" / "09-lightning"
FLAGS = ("--epochs", 2, "--batch-size", 8)

FAULTS = {
    "the gradients are not averaged": """
from multigpu.strategies.ddp import DDPStrategy

DDPStrategy.wrap = lambda self, model, optimizers: model
""",
    "each rank's mean": """
def training_step(self, batch, index):
    return lesson.F.cross_entropy(self.net(batch[0]), batch[1])

def on_train_epoch_end(self, trainer, module):
    row = {'epoch': 1, 'loss': 1.0, 'test_accuracy': 1.0, 'images_per_s': 1.0}
    self.rows.append(row)

lesson.LitCNN.training_step = training_step
lesson.Table.on_train_epoch_end = on_train_epoch_end
""",
}


def warnings_in(printed: str) -> int:
    """The number of warnings. One is allowed: some ranks have nothing to evaluate."""
    warnings = [line for line in printed.splitlines() if "Warning" in line]
    for warning in warnings:
        assert "1 batch" in warning and "2 ranks" in warning, printed
    return len(warnings)


@pytest.mark.parametrize(
    ("start", "ranks", "more"),
    [
        ("python", 1, ()),
        ("python", 2, ("--devices", 2)),
        ("torchrun", 2, ()),
        ("python", 2, ("--devices", 2, "--accelerator", "vgpu")),
    ],
)
def test_the_trainer_learns_what_one_process_learns(tmp_path, npz, start, ranks, more):
    """35 images, 7 for testing: the last batch is uneven, and the sampler repeats some."""
    flags = ("--data", npz(), *FLAGS, *more, "--prove", "--out", tmp_path / "o")
    done = (
        torchrun(ranks, SCRIPT, *flags) if start == "torchrun" else run_script(SCRIPT, *flags)
    )
    assert done.returncode == 0 and "limit 1e-05: holds" in done.stdout, done.stdout
    assert warnings_in(done.stdout) == min(1, ranks - 1), "one batch of 7 images to test with"
    assert done.stdout.count("global batch 8") == 1, "only rank 0 prints"
    metrics = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert metrics["world_size"] == ranks
    assert (len(metrics["epochs"]), metrics["batch_size"]) == (2, 8)
    started_by = "ddp" if ranks > 1 else "python"
    assert metrics["launcher"] == ("torchrun" if start == "torchrun" else started_by)


@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_proof_fails(tmp_path, npz, fault):
    path = planted(tmp_path, "PTL_multiGPU", FAULTS[fault])
    more = ("--devices", 2, "--prove", "--out", tmp_path / "o")
    done = run_script(path, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 1 and "limit 1e-05: fails" in done.stdout, done.stdout


def test_the_loaders_own_order_is_another_on_one_device(tmp_path, npz):
    """Exercise 2: the Trainer adds a DistributedSampler where there are several ranks."""
    fault = """
RandomSampler = lesson.torch.utils.data.RandomSampler
lesson.DistributedSampler = lambda data, *_, seed: RandomSampler(data)
"""
    path = planted(tmp_path, "PTL_multiGPU", fault)
    flags = ("--data", npz(), *FLAGS, "--prove", "--out", tmp_path)
    assert [
        run_script(path, *flags, "--devices", devices).returncode for devices in (1, 2)
    ] == [
        1,
        0,
    ]


def test_a_run_that_is_resumed_is_the_run_that_never_stopped(tmp_path, npz):
    same = ("--data", npz(), "--batch-size", 8, "--devices", 2, "--out", tmp_path / "o")
    anew = run_script(SCRIPT, *same, "--epochs", 1, "--resume")
    assert anew.returncode == 0 and "no checkpoint in" in anew.stdout, anew.stdout
    done = run_script(SCRIPT, *same, "--epochs", 3, "--prove", "--resume")
    assert (
        done.returncode == 0 and "1 epoch done, of 3" in done.stdout and "holds" in done.stdout
    ), done.stdout
    assert warnings_in(done.stdout) == 1, done.stdout
    assert len(json.loads((tmp_path / "o" / "metrics.json").read_text())["epochs"]) == 3


def test_16_bit_is_another_run(tmp_path, npz):
    flags = ("--data", npz(), *FLAGS, "--precision", "bf16")
    done = run_script(SCRIPT, *flags, "--out", tmp_path / "o")
    assert done.returncode == 0 and "proof" not in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("start", "flags", "words"),
    [
        ("torchrun", ("--batch-size", 7), ("--batch-size 7", "2 ranks", "give 8")),
        ("torchrun", ("--devices", 3), ("3 devices", "torchrun", "2 ranks")),
        ("python", ("--data", "no.npz"), ("no.npz",)),
        ("python", ("--lr", "3e38"), ("lower --lr",)),
        ("python", ("--resume", "no.ckpt"), ("no.ckpt",)),
        ("python", ("--prove", "--precision", "bf16"), ("--prove", "--precision")),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, start, flags, words):
    if start == "torchrun":
        done = torchrun(2, SCRIPT, "--out", tmp_path, *flags)
        assert done.returncode == 1, done.stdout
    else:
        done = run_script(SCRIPT, "--devices", 2, "--out", tmp_path, *flags)
        assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    sentences = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, done.stdout
    assert all(word in sentences[0] for word in words), done.stdout


def test_what_a_rank_finds_in_its_environment():
    done = run_script(PAGE / "variables.py", PYTHONPATH=ROOT)
    lines = sorted(line.partition(" ")[2] for line in done.stdout.splitlines() if "=" in line)
    assert lines == [
        f"WORLD_SIZE=3 NODE_RANK=None RANK={rank} LOCAL_RANK={rank}" for rank in range(3)
    ], done.stdout


def test_what_moved_is_counted_in_the_scripts():
    sys.path.insert(0, str(PAGE))
    import what_moved

    lines = what_moved.statements("PTL_multiGPU")
    assert "class LitCNN(L.LightningModule):" in lines and not any(
        line.startswith(("import", "#")) for line in lines
    )
    assert all(
        any(
            word in line for word in words for line in what_moved.statements("PT_CNN_MultiGPU")
        )
        for words, _ in what_moved.SUBJECTS.values()
    ), "each row finds something in lesson 05"


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="the package lightning is not installed",
)
def test_the_real_lightning_runs_the_same_classes(tmp_path):
    done = run_script(SCRIPT, "--epochs", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stdout
    done = run_script(PAGE / "in_lightning.py", tmp_path / "last.ckpt", PYTHONPATH=ROOT)
    assert (
        "weights within 1e-6: True" in done.stdout and "the same weights: True" in done.stdout
    ), done.stdout


@pytest.mark.parametrize("library", ["multigpu.trainer", "lightning"])
def test_the_pages_own_example_runs(tmp_path, library):
    pytest.importorskip(library)
    page = (ROOT / "lessons" / "09-lightning" / "README.md").read_text()
    script = tmp_path / "own.py"
    own = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    assert "import multigpu.trainer as L" in own
    script.write_text(own.replace("multigpu.trainer", library))
    done = run_script(script, cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "mine.ckpt").exists(), done.stdout
    assert done.stdout.count("\nNet(") == 1
