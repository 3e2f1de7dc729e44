"""Lesson 09: the Trainer learns what one process learns, however its ranks start, and a mistake is one sentence."""

import importlib.util
import json
import re
import sys

import pytest
from commands import ROOT, planted, run, torchrun

SCRIPT = ROOT / "scripts" / "PTL_multiGPU.py"
PAGE = ROOT / "lessons" / "09-lightning"
FLAGS = ("--epochs", 2, "--batch-size", 8)

FAULTS = {
    "the gradients are not averaged": "from multigpu.strategies.ddp import DDPStrategy\n"
    "DDPStrategy.wrap = lambda self, model, optimizers: model",
    "each rank's mean": "lesson.LitCNN.training_step = lambda self, batch, index: lesson.F.cross_entropy("
    "self.net(batch[0]), batch[1])\n"
    "lesson.Table.on_train_epoch_end = lambda self, trainer, module: self.rows.append("
    "{'epoch': 1, 'loss': 1.0, 'test_accuracy': 1.0, 'images_per_s': 1.0})",
}


def warnings_in(told: str) -> int:
    """How many; all that there may be say that some ranks get nothing to evaluate."""
    assert told.count("Warning") == told.count(
        "UserWarning: 1 batch to evaluate for 2 ranks, so some get none"
    ), told
    return told.count("Warning")


@pytest.mark.parametrize(
    ("start", "ranks", "more"),
    [("python", 1, ()), ("python", 2, ("--devices", 2)), ("torchrun", 2, ()), ("python", 2, ("--devices", 2, "--accelerator", "vgpu"))],
)  # fmt: skip
def test_the_trainer_learns_what_one_process_learns(tmp_path, npz, start, ranks, more):
    """35 images, 7 for testing: the last batch is uneven, and the sampler repeats some."""
    flags = ("--data", npz(), *FLAGS, *more, "--prove", "--out", tmp_path / "o")
    done = (
        torchrun(ranks, SCRIPT, *flags)
        if start == "torchrun"
        else run("python", SCRIPT, *flags)
    )
    assert done.returncode == 0 and "limit 1e-05: holds" in done.stdout, done.stdout
    assert warnings_in(done.stdout) == min(1, ranks - 1), "one batch of 7 images to test with"
    assert done.stdout.count("global batch 8") == 1, "rank 0 alone speaks"
    told = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert (told["world_size"], len(told["epochs"]), told["batch_size"]) == (ranks, 2, 8)
    assert told["launcher"] == (
        "torchrun" if start == "torchrun" else "ddp" if ranks > 1 else "python"
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_proof_fails(tmp_path, npz, fault):
    path = planted(tmp_path, "PTL_multiGPU", FAULTS[fault])
    more = ("--devices", 2, "--prove", "--out", tmp_path / "o")
    done = run("python", path, "--data", npz(), *FLAGS, *more)
    assert done.returncode == 1 and "limit 1e-05: fails" in done.stdout, done.stdout


def test_the_loaders_own_order_is_another_on_one_device(tmp_path, npz):
    """Exercise 2: the Trainer deals with a DistributedSampler where there are ranks."""
    fault = "lesson.DistributedSampler = lambda data, *_, seed: lesson.torch.utils.data.RandomSampler(data)"
    path, flags = (
        planted(tmp_path, "PTL_multiGPU", fault),
        ("--data", npz(), *FLAGS, "--prove", "--out", tmp_path),
    )
    assert [
        run("python", path, *flags, "--devices", devices).returncode for devices in (1, 2)
    ] == [1, 0]


def test_a_run_that_is_resumed_is_the_run_that_never_stopped(tmp_path, npz):
    same = ("--data", npz(), "--batch-size", 8, "--devices", 2, "--out", tmp_path / "o")
    anew = run("python", SCRIPT, *same, "--epochs", 1, "--resume")
    assert anew.returncode == 0 and "no checkpoint in" in anew.stdout, anew.stdout
    done = run("python", SCRIPT, *same, "--epochs", 3, "--prove", "--resume")
    assert (
        done.returncode == 0 and "1 epoch done, of 3" in done.stdout and "holds" in done.stdout
    ), done.stdout
    assert warnings_in(done.stdout) == 1, done.stdout
    assert len(json.loads((tmp_path / "o" / "metrics.json").read_text())["epochs"]) == 3


def test_16_bit_is_another_run(tmp_path, npz):
    done = run(
        "python",
        SCRIPT,
        "--data",
        npz(),
        *FLAGS,
        "--precision",
        "bf16",
        "--out",
        tmp_path / "o",
    )
    assert done.returncode == 0 and "proof" not in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("start", "flags", "words"),
    [
        ("torchrun", ("--batch-size", 7), "cannot be split evenly over 2 ranks"),
        ("torchrun", ("--devices", 3), "wants 3 devices, but torchrun started 2 ranks"),
        ("python", ("--data", "no.npz"), "no data file"),
        ("python", ("--lr", "3e38"), "lower --lr"),
        ("python", ("--resume", "no.ckpt"), "there is no checkpoint no.ckpt"),
        ("python", ("--prove", "--precision", "bf16"), "leave one of them out"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, start, flags, words):
    if start == "torchrun":
        done = torchrun(2, SCRIPT, "--out", tmp_path, *flags)
        assert done.returncode == 1, done.stdout
    else:
        done = run("python", SCRIPT, "--devices", 2, "--out", tmp_path, *flags)
        assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    sentences = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1 and words in sentences[0], done.stdout


def test_what_a_rank_finds_in_its_environment():
    done = run("python", PAGE / "variables.py", PYTHONPATH=ROOT)
    lines = sorted(line.partition(" ")[2] for line in done.stdout.splitlines() if "=" in line)
    assert lines == [
        f"WORLD_SIZE=3 NODE_RANK=None RANK={rank} LOCAL_RANK={rank}" for rank in range(3)
    ], done.stdout


def test_what_moved_is_counted_in_the_scripts():
    sys.path.insert(0, str(PAGE))
    import what_moved

    lines = what_moved.code("PTL_multiGPU")
    assert "class LitCNN(L.LightningModule):" in lines and not any(
        line.startswith(("import", "#")) for line in lines
    )
    assert all(
        any(word in line for word in words for line in what_moved.code("PT_CNN_MultiGPU"))
        for words, _ in what_moved.WHO.values()
    ), "each row finds something in lesson 05"


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="the package lightning is not installed",
)
def test_the_real_lightning_runs_the_same_classes(tmp_path):
    done = run("python", SCRIPT, "--epochs", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stdout
    done = run("python", PAGE / "in_lightning.py", tmp_path / "last.ckpt", PYTHONPATH=ROOT)
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
    done = run("python", script, cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "mine.ckpt").exists(), done.stdout
    assert done.stdout.count("\nNet(") == 1
