"""Lesson 09: the Trainer learns what one process learns; a mistake is one error message."""

import json
import re
import sys
import traceback
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from commands import ROOT, planted, run_script, torchrun

from multigpu import launch, proof, vgpu
from multigpu.errors import UserError

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


def test_the_exercises_name_text_of_the_script():
    page = (PAGE / "README.md").read_text()
    script = SCRIPT.read_text()
    for text in (
        "DataLoader(self.train, self.images_per_rank, s",
        "F.cross_entropy(self.net(",
    ):
        assert f"`{text}" in page
    for text in (
        "return loss * ranks / ",
        "return DataLoader(self.train, self.images_per_rank",
    ):
        assert script.count(text) == 1, text
    assert "callbacks=[table, checkpoints]" in script and "trainer.fit(" in script


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "verdict"), [(1, "holds"), (2, "fails"), (3, "holds")])
def test_exercise_1_the_mean_of_own_images(tmp_path, npz, devices, verdict):
    """It is right if all ranks have equally many images in each batch, and none twice."""
    fault = """
def usual(self, batch, batch_idx):
    loss = lesson.F.cross_entropy(self.net(batch[0]), batch[1])
    self.log("loss", loss, on_step=False, on_epoch=True)
    return loss

lesson.LitCNN.training_step = usual
"""
    path = planted(tmp_path, "PTL_multiGPU", fault)
    flags = ("--data", npz(train=33), "--epochs", 2, "--batch-size", 12, "--prove")
    done = run_script(path, *flags, "--devices", devices, "--out", tmp_path / "o")
    assert f"limit 1e-05: {verdict}" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "verdict"), [(1, "fails"), (2, "holds")])
def test_exercise_2_the_loaders_own_order_is_another_on_one_device(
    tmp_path, npz, devices, verdict
):
    """The Trainer adds a DistributedSampler where there are several ranks."""
    fault = """
def train_dataloader(self):
    return lesson.DataLoader(self.train, self.images_per_rank, shuffle=True)

lesson.DigitsData.train_dataloader = train_dataloader
"""
    path = planted(tmp_path, "PTL_multiGPU", fault)
    flags = ("--data", npz(), *FLAGS, "--prove", "--out", tmp_path / "o")
    done = run_script(path, *flags, "--devices", devices)
    assert f"limit 1e-05: {verdict}" in done.stdout, done.stdout


@pytest.mark.slow
def test_exercise_3_a_callback_stops_both_ranks(tmp_path, npz):
    stop = """
class Stop(L.Callback):
    def on_train_epoch_end(self, trainer, module):
        assert 0 <= trainer.callback_metrics["test_accuracy"] <= 1
        if trainer.current_epoch == 1:
            trainer.should_stop = True


class LitCNN("""
    text = SCRIPT.read_text().replace("class LitCNN(", stop.lstrip())
    path = tmp_path / "exercise.py"
    path.write_text(text.replace("[table, checkpoints]", "[table, checkpoints, Stop()]"))
    flags = ("--data", npz(), "--epochs", 4, "--batch-size", 8, "--devices", 2, "--prove")
    done = run_script(path, *flags, "--out", tmp_path / "o")
    assert "limit 1e-05: holds" in done.stdout, done.stdout
    metrics = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert len(metrics["epochs"]) == 2


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


def test_a_resumed_run_may_have_another_batch(tmp_path, npz):
    """As the page says: lesson 05 refuses it."""
    same = ("--data", npz(), "--out", tmp_path / "o")
    run_script(SCRIPT, *same, "--batch-size", 8, "--epochs", 1)
    done = run_script(SCRIPT, *same, "--batch-size", 12, "--epochs", 2, "--resume")
    assert done.returncode == 0 and "1 epoch done, of 2" in done.stdout, done.stdout


@pytest.mark.parametrize(("device", "works"), [("self.device", True), ("None", False)])
def test_a_tensor_that_a_step_makes_needs_the_device(experiments, request, device, works):
    """The Trainer moves the module and its batches. A virtual GPU raises CUDA's error."""
    L = experiments.multigpu.trainer

    def training_step(self, batch, batch_idx):
        places = {"self.device": self.device, "None": None}
        made = torch.ones(4, device=places[device])
        assert self.first.weight.device.type == batch[0].device.type == "vgpu"
        return self.last(self.first(batch[0]) * made).mean()

    module = experiments.tiny(L, training_step=training_step)
    alone = {"accelerator": "vgpu", "devices": 1, "strategy": "auto", "max_epochs": 1}
    trainer = L.Trainer(**experiments.SETTINGS | alone)
    request.addfinalizer(vgpu.stop)
    with nullcontext() if works else pytest.raises(RuntimeError, match="same device"):
        trainer.fit(module, experiments.numbered_rows(4))


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
    callback = what_moved.statements_in(what_moved.CALLBACK)
    assert "class Table(Callback):" in callback
    last = what_moved.table().splitlines()[-1]
    assert int(last.split()[-1]) == len(lines) + len(callback)
    words, _ = what_moved.SUBJECTS["the table of epochs"]
    others = ("files.writable_folder(args.out)", "real = data.real_rows(total)")
    assert what_moved.count(list(others), words) == 0
    assert what_moved.about_any(["real.to(device)", "x = 1"]) == 1, "counted once"


@pytest.mark.slow
def test_the_picture_is_drawn_from_a_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(PAGE)
    monkeypatch.delitem(sys.modules, "picture", raising=False)
    import picture

    monkeypatch.delitem(sys.modules, "picture")
    first, second = launch.call(picture.recorded, 2)
    assert first == ["prepare_data", *second], "one rank prepares the data"
    assert second[:3] == ["setup", "configure_model", "configure_optimizers"]
    assert second[3:5] == ["on_fit_start", "sanity check"]
    step = ["training_step", "on_before_backward", "on_before_optimizer_step"]
    place = second.index("training_step")
    assert second[place : place + 3] == step
    assert second[-3:] == ["validation_step", "on_validation_end", "on_train_epoch_end"]
    assert picture.draw([first, second], tmp_path / "picture.png").exists()


# ---- this Trainer and Lightning, side by side -----------------------------------------------


@pytest.fixture(scope="module")
def libraries():
    """(this Trainer's findings, Lightning's), by rank."""
    pytest.importorskip("lightning")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PAGE)
        import experiments

        yield experiments.compare()
        del sys.modules["experiments"]


def of_ranks(libraries, name: str) -> tuple[list, list]:
    """What the two ranks found: (with this Trainer, with Lightning)."""
    this, lightning = libraries
    return [rank[name] for rank in this], [rank[name] for rank in lightning]


@pytest.mark.slow
def test_the_real_lightning_trains_the_same_classes(libraries):
    this, lightning = libraries
    assert this[0]["loss"] == pytest.approx(lightning[0]["loss"], abs=1e-6)
    for mine, other in zip(this, lightning, strict=True):
        assert proof.difference(mine["net"], other["net"]) <= 1e-6
    assert of_ranks(libraries, "steps") == ([2, 2], [2, 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "here", "there"),
    [
        ("rows", [7, 7], [8, 8]),
        ("validated rows", [7, 7], [8, 8]),
        ("error", [16 / 7] * 2, [26 / 8] * 2),  # the outlier of 10 counts twice
        ("predicted", [4, 4], [2, 2]),
        ("epoch value", [0.5, 0.5], [0, 1]),
        ("epoch value, sync_dist", [0.5, 0.5], [0.5, 0.5]),
        ("epochs", [9, 9], [3, 3]),
        ("epochs, sync_dist", [9, 9], [9, 9]),
        ("first weight", [0, 1], [0, 0]),  # Lightning copies rank 0's weights earlier
    ],
)
def test_where_it_is_not_lightning(libraries, name, here, there):
    this, lightning = of_ranks(libraries, name)
    assert this == pytest.approx(here) and lightning == pytest.approx(there)


@pytest.mark.slow
def test_a_training_loader_without_shuffle(libraries):
    assert of_ranks(libraries, "order") == (["in order"] * 2, ["shuffled"] * 2)


@pytest.mark.slow
def test_a_layer_that_is_unfrozen_later(libraries):
    this, (first, second) = of_ranks(libraries, "unfrozen")
    assert this == ["refused", "refused"]
    assert (first - second).abs().max() > 1e-3, "each rank has trained it alone"


@pytest.mark.slow
def test_the_table_has_both_libraries(libraries, experiments, capsys):
    experiments.show(*libraries)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 95
    assert any(line.split()[-2:] == ["7", "8"] for line in lines)
    assert lines[-1].endswith("1e-6: True")


def log_on_rank_0() -> list[str]:
    """In Lightning: in which functions a rank fails that alone logs with sync_dist."""
    import experiments

    L = experiments.lightning()

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.log("alone", 1.0, on_step=True, sync_dist=True)

    ddp = L.pytorch.strategies.DDPStrategy(timeout=timedelta(seconds=2))
    trainer = L.Trainer(max_epochs=1, **experiments.SETTINGS | {"strategy": ddp})
    module = experiments.tiny(L, on_train_batch_end=on_train_batch_end)
    try:
        trainer.fit(module, experiments.numbered_rows(8))
    except RuntimeError as error:
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return []


@pytest.mark.slow
def test_in_lightning_a_rank_that_logs_alone_waits_for_the_others(experiments):
    """It waits in a barrier, until the other rank ends or until the timeout.

    This Trainer: tests/trainer/test_logging_on_ranks.py.
    """
    pytest.importorskip("lightning")
    functions = launch.call(log_on_rank_0, 2)[0]
    assert "log" in functions and "barrier" in functions


def test_without_lightning_one_sentence_says_what_to_install(experiments, monkeypatch):
    monkeypatch.setattr(experiments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install 'lightning"):
        experiments.compare()


# ---- the page's own example -----------------------------------------------------------------


def own_example(folder, library: str, sync_dist: bool = True) -> tuple[str, str]:
    """(epochs, steps) of the page's example with a library, with sync_dist or without."""
    text = (PAGE / "README.md").read_text()
    own = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert "import multigpu.trainer as L" in own and ", sync_dist=True)" in own
    own = own.replace("multigpu.trainer", library)
    if not sync_dist:
        own = own.replace(", sync_dist=True)", ")")
    folder.mkdir()
    (folder / "own.py").write_text(own)
    done = run_script(folder / "own.py", cwd=folder)
    assert done.returncode == 0 and (folder / "mine.ckpt").exists(), done.stdout
    assert done.stdout.count("\nNet(") == 1, "the checkpoint makes the module, on rank 0"
    (found,) = re.findall(r"^(\d+) epochs, (\d+) steps$", done.stdout, re.MULTILINE)
    return found


@pytest.mark.slow
def test_the_pages_own_example_trains_as_in_lightning(tmp_path):
    pytest.importorskip("lightning")
    this = own_example(tmp_path / "this", "multigpu.trainer")
    assert this == own_example(tmp_path / "lightning", "lightning") == ("9", "36")


@pytest.mark.slow
def test_without_sync_dist_the_example_stops_earlier_in_lightning(tmp_path):
    """Each rank's EarlyStopping sees its own loss_epoch, and one that stops, stops all."""
    pytest.importorskip("lightning")
    this = own_example(tmp_path / "this", "multigpu.trainer", sync_dist=False)
    lightning = own_example(tmp_path / "lightning", "lightning", sync_dist=False)
    assert (this[0], lightning[0]) == ("9", "6")
