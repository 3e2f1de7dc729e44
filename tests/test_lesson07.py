"""Lesson 07: MirroredStrategy learns what one device learns, by fit and by hand."""

import importlib
import json
import re

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from conftest import ROOT, planted, run
from multigpu import data, tensorflow
from multigpu.models import CNN
from multigpu.tensorflow import tf

STEMS = ("TF_CNN_MultiGPU", "TF_CNN_CustomLoop")
FLAGS = ("--epochs", 2, "--batch-size", 12, "--prove")

# Each replica updates with its own gradients alone.
SILENT = "lesson.tf.keras.optimizers.SGD._all_reduce_sum_gradients = lambda self, pairs: list(pairs)"
# Each replica's images weigh one over its own piece, as if it were the whole batch.
OWN_MEAN = """
of_all = lesson.read_data
lesson.read_data = lambda *args: of_all(*args).map(lambda images, labels, weights: (images, labels, 2 * weights))
"""


def lesson(stem: str, *flags: object, **more: object):
    return run("python", ROOT / "scripts" / f"{stem}.py", *flags, **more)


@pytest.mark.parametrize(("stem", "devices"), [*((stem, 3) for stem in STEMS), (STEMS[0], 1)])
def test_the_run_equals_one_device(stem, devices, tmp_path, npz):
    """35 images in batches of 12: the last one has 11, which 3 replicas share unevenly."""
    source = npz()
    done = lesson(stem, "--data", source, *FLAGS, "--devices", devices, "--out", tmp_path / "o")
    assert done.returncode == 0 and "limit 1e-05: holds" in done.stdout, done.stdout
    told = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert told["devices"] == devices and told["proof"]["holds"]
    assert not [path for path in (tmp_path / "o").iterdir() if path.name.startswith(".")], "nothing half-written stays"
    # Saved under the strategy, loaded without it: plain variables, the same accuracy.
    model = tf.keras.models.load_model(tmp_path / "o" / "model.keras")
    images, labels = tensorflow.arrays(data.load(source)[1])
    accuracy = (model.predict(images, verbose=0).argmax(1) == labels).mean()
    assert accuracy == pytest.approx(told["test_accuracy"], abs=1e-6)
    assert not any("Mirrored" in type(variable.value).__name__ for variable in model.trainable_variables)


@pytest.mark.parametrize("fault", [SILENT, OWN_MEAN], ids=["silent", "own mean"])
@pytest.mark.parametrize("stem", STEMS)
def test_a_fault_makes_the_proof_fail(stem, fault, tmp_path, npz):
    script = planted(tmp_path, stem, fault)
    done = run("python", script, "--data", npz(36), *FLAGS, "--devices", 2, "--out", tmp_path / "o")
    assert done.returncode == 1 and "limit 1e-05: fails" in done.stdout, done.stdout
    assert float(re.search(r"max difference (\S+),", done.stdout)[1]) > 1e-4


@pytest.mark.parametrize("stem", STEMS)
def test_the_images_are_not_copied_into_a_graph(stem, monkeypatch):
    """It may not exceed 2 GiB, and with MNIST's 0.2 the first batch took 3 GiB and seconds."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module = importlib.import_module(stem)
    dataset = TensorDataset(torch.zeros(1000, 1, 50, 50), torch.zeros(1000, dtype=torch.long))
    args = module.parse(["--batch-size", "64"])
    made = module.read_data(dataset, 2, 64, 0) if stem == STEMS[0] else module.read_data(dataset, 0, args)
    graph = made._input_dataset._map_func.function.graph.as_graph_def()
    assert graph.ByteSize() < 100_000 < dataset.tensors[0].nbytes


def test_fit_leaves_a_log_for_tensorboard_and_keeps_an_older_one(tmp_path, npz):
    old = tmp_path / "o" / "tensorboard" / "20000101-000000"
    old.mkdir(parents=True)
    done = lesson("TF_CNN_MultiGPU", "--data", npz(), "--epochs", 2, "--batch-size", 6, "--out", tmp_path / "o")
    assert done.returncode == 0, done.stdout
    first, new = sorted((tmp_path / "o" / "tensorboard").iterdir())
    assert first == old and {path.name for path in new.iterdir()} == {"train", "validation"}


def test_sixteen_bit_trains_and_is_another_run(tmp_path, npz):
    source = npz(36)
    settings = ("--epochs", 1, "--batch-size", 6, "--lr", 0.05, "--amp")
    done = lesson("TF_CNN_MultiGPU", "--data", source, *settings, "--out", tmp_path / "o")
    train, _ = data.load(source)
    model = tensorflow.cnn((1, 8, 8), classes=3)
    exact = np.mean(tensorflow.serial(model, train, epochs=1, batch_size=6, lr=0.05, seed=0))
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "o" / "metrics.json").read_text())["loss"]
    assert 1e-5 < abs(found - exact) < 0.05


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--batch-size", 7, "--devices", 2), "--batch-size 7 cannot be split evenly over 2 replicas: give 8"),
        (("--batch-size", 34, "--devices", 2), "the last batch of an epoch has 1 image, too few for 2 replicas"),
        (("--devices", 2), "the first batch has all 35 images, which 2 replicas cannot share evenly"),
        (("--lr", 1e38, "--batch-size", 6), "lower --lr"),
        (("--data", "nowhere.npz"), "there is no data file nowhere.npz"),
    ],
)
def test_bad_input_gets_a_sentence(flags, sentence, tmp_path, npz):
    source = () if "--data" in flags else ("--data", npz())
    done = lesson("TF_CNN_MultiGPU", *source, *flags, "--out", tmp_path / "o")
    assert done.returncode == 2 and sentence in done.stdout and "Traceback" not in done.stdout, done.stdout


def test_a_launcher_that_starts_several_is_refused(tmp_path):
    several = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    done = lesson(STEMS[0], "--out", tmp_path / "o", **several)
    assert done.returncode == 2 and f"{STEMS[0]} is one process, and torchrun started 2" in done.stdout, done.stdout


def test_the_weights_are_the_ones_of_torch_after_ten_epochs(tmp_path):
    """Mirrored, on the digits, beside lesson 01's script: two frameworks, one result."""
    one = run("python", ROOT / "scripts" / "PT_CNN_SingleGPU.py", "--out", tmp_path / "torch")
    many = lesson("TF_CNN_CustomLoop", "--out", tmp_path / "tf")
    assert one.returncode == many.returncode == 0, one.stdout + many.stdout
    theirs = CNN()
    theirs.load_state_dict(torch.load(tmp_path / "torch" / "model.pt"))
    ours = tf.keras.models.load_model(tmp_path / "tf" / "model.keras").get_weights()
    assert max(np.abs(a - b).max() for a, b in zip(ours, tensorflow.weights(theirs), strict=True)) < 1e-5
