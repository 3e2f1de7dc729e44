"""Lesson 07: MirroredStrategy learns what one device learns, by fit and by hand."""

import importlib
import json
import re

import numpy as np
import pytest
import torch
from commands import ROOT, planted, run_script
from torch.utils.data import TensorDataset

from multigpu import data
from multigpu.models import CNN

STEMS = ("TF_CNN_MultiGPU", "TF_CNN_CustomLoop")
FLAGS = ("--epochs", 2, "--batch-size", 12, "--prove")

# Each replica updates with its own gradients alone.
SILENT = """
sgd = lesson.tf.keras.optimizers.SGD
sgd._all_reduce_sum_gradients = lambda self, pairs: list(pairs)
"""
# Each replica's images weigh one over its own shard, as if it were the whole batch.
OWN_MEAN = """
original = lesson.read_data
double = lambda images, labels, weights: (images, labels, 2 * weights)
lesson.read_data = lambda *args: original(*args).map(double)
"""


@pytest.fixture(scope="module", autouse=True)
def tensorflow():
    """Import it before the first test, not with this file: each worker imports all files."""
    global tf, tf_common, DEVICES
    pytest.importorskip("tensorflow")
    from multigpu import tf_common
    from multigpu.tf_common import tf

    # Before TensorFlow's first operation. Four, because another test file in this process
    # needs four.
    DEVICES = tf_common.devices(4)[:2]


def lesson(stem: str, *flags: object, **more: object):
    return run_script(ROOT / "scripts" / f"{stem}.py", *flags, **more)


@pytest.mark.parametrize("stem", STEMS)
def test_the_run_equals_one_device(stem, tmp_path, npz):
    """35 images in batches of 12: the last one has 11, which 3 replicas share unevenly.

    The model is saved under the strategy and loads without it, with the same accuracy.
    """
    source = npz()
    done = lesson(stem, "--data", source, *FLAGS, "--devices", 3, "--out", tmp_path / "o")
    assert done.returncode == 0 and "limit 1e-05: holds" in done.stdout, done.stdout
    metrics = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert f"loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.4f}" in done.stdout
    model = tf.keras.models.load_model(tmp_path / "o" / "model.keras")
    images, labels = tf_common.arrays(data.load(source)[1])
    accuracy = (model.predict(images, verbose=0).argmax(1) == labels).mean()
    assert accuracy == pytest.approx(metrics["accuracy"], abs=1e-6)
    assert not any(
        "Mirrored" in type(variable.value).__name__ for variable in model.trainable_variables
    )


@pytest.mark.parametrize(
    ("stem", "fault"),
    [(STEMS[0], SILENT), (STEMS[1], SILENT), (STEMS[1], OWN_MEAN)],
    ids=["fit", "loop", "own mean"],
)
def test_a_fault_makes_the_proof_fail(stem, fault, tmp_path, npz):
    script = planted(tmp_path, stem, fault)
    done = run_script(
        script, "--data", npz(36), *FLAGS, "--devices", 2, "--out", tmp_path / "o"
    )
    assert done.returncode == 1 and "limit 1e-05: fails" in done.stdout, done.stdout
    assert float(re.search(r"max difference (\S+),", done.stdout)[1]) > 1e-4


@pytest.mark.parametrize("stem", STEMS)
def test_the_images_are_not_copied_into_a_graph(stem, monkeypatch):
    """It may not exceed 2 GiB, and with MNIST's 0.2 the first batch took 3 GiB and seconds."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module = importlib.import_module(stem)
    dataset = TensorDataset(torch.zeros(1000, 1, 50, 50), torch.zeros(1000, dtype=torch.long))
    if stem == STEMS[0]:
        batches = module.read_data(dataset, 2, 64, 0)
    else:
        images, labels = tf_common.tensors(dataset)
        batches = module.read_data(images, labels, 0, 64, 0)
    graph = batches._input_dataset._map_func.function.graph.as_graph_def()
    assert graph.ByteSize() < 100_000 < dataset.tensors[0].nbytes


def test_hits_do_not_count_padding(monkeypatch):
    """Seven images, all hit, on two replicas: eight would be counted if padding were."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module = importlib.import_module("TF_CNN_CustomLoop")
    dataset = TensorDataset(torch.zeros(7, 1, 2, 2), torch.zeros(7, dtype=torch.long))
    strategy = tf.distribute.MirroredStrategy(DEVICES)

    def always_zero(images):
        return tf.one_hot(tf.zeros(tf.shape(images)[0], tf.int32), 3)

    count = module.test_step(strategy, always_zero)
    assert module.count_hits(strategy, count, tf_common.padded_batches(dataset, 256, 2)) == 7


def test_tensorboard_shows_losses_that_can_be_compared(tmp_path, npz):
    """Both are means over images, though the loss is a sum."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = ("--data", npz(36, 12), "--epochs", 1, "--batch-size", 6)
    done = lesson("TF_CNN_MultiGPU", *settings, "--out", tmp_path / "o")
    assert done.returncode == 0, done.stdout
    (folder,) = (tmp_path / "o" / "tensorboard").iterdir()
    for part in ("train", "validation"):
        (event,) = (
            accumulator.EventAccumulator(str(folder / part)).Reload().Tensors("epoch_loss")
        )
        assert 0.5 < float(tf.make_ndarray(event.tensor_proto)) < 3  # a sum: 12


def test_the_weights_are_the_ones_of_torch_after_ten_epochs(tmp_path):
    """Mirrored, on the digits, beside lesson 01's script: two frameworks, one result."""
    one = run_script(ROOT / "scripts" / "PT_CNN_SingleGPU.py", "--out", tmp_path / "torch")
    many = lesson("TF_CNN_CustomLoop", "--out", tmp_path / "tf")
    assert one.returncode == many.returncode == 0, one.stdout + many.stdout
    in_torch = CNN()
    in_torch.load_state_dict(torch.load(tmp_path / "torch" / "model.pt"))
    weights = tf.keras.models.load_model(tmp_path / "tf" / "model.keras").get_weights()
    pairs = zip(weights, tf_common.keras_weights(in_torch), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) < 1e-5


# ---- when it goes wrong ---------------------------------------------------------------------


def edited(folder, stem: str, *replaced: tuple[str, str]):
    """A copy of a lesson's script with other lines."""
    text = (ROOT / "scripts" / f"{stem}.py").read_text()
    for old, new in replaced:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "edited.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("images", "holds"), [(35, False), (36, True)])
def test_keras_usual_loss_is_right_for_even_shards(images, holds, tmp_path, npz):
    """35 images in batches of 12: two replicas get 6 and 5 of the last 11."""
    script = edited(
        tmp_path,
        "TF_CNN_MultiGPU",
        (", tf.gather(labels, rows), sample_weights\n", ", tf.gather(labels, rows)\n"),
        (', reduction="sum"', ""),
    )
    more = ("--devices", 2, "--out", tmp_path / "o")
    done = run_script(script, "--data", npz(images), *FLAGS, *more)
    verdict = "holds" if holds else "fails"
    assert f"limit 1e-05: {verdict}" in done.stdout, done.stdout


def test_an_optimizer_that_is_not_built_outside_is_an_error(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module = importlib.import_module("TF_CNN_CustomLoop")
    strategy = tf.distribute.MirroredStrategy(DEVICES)
    model, _ = module.make(strategy, (8, 8, 1), lr=0.1, seed=0)
    step = module.train_step(strategy, model, tf.keras.optimizers.SGD(0.1, momentum=0.9))
    train, _ = data.load(data.fetch(None))
    batches = module.read_data(*tf_common.tensors(train), 0, 64, 0).take(1)
    with pytest.raises(RuntimeError, match=r"Mixing different tf\.distribute\.Strategy"):
        module.train_epoch(strategy, step, batches)


def one_weight() -> "tf.keras.Model":
    """A model with one weight, compiled with a large learning rate."""
    dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = tf.keras.Sequential([tf.keras.Input((1,)), dense])
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    return model


def batches_of(*numbers: float) -> "tf.data.Dataset":
    """One batch per number, from which the model should learn the number."""
    rows = (np.ones((len(numbers), 1)), np.array(numbers))
    return tf.data.Dataset.from_tensor_slices(rows).batch(1)


def test_fit_warns_of_a_data_set_that_is_too_short(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module = importlib.import_module("TF_CNN_MultiGPU")
    dataset = TensorDataset(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.long))
    batches = module.read_data(dataset, 1, 2, 0)
    model = tf_common.cnn()
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        model.fit(batches, epochs=2, steps_per_epoch=2, shuffle=False, verbose=0)


def test_a_restored_fit_begins_the_data_set_again(tmp_path):
    """Each epoch has its own order, so the losses are not those of a run without a stop."""

    class Stop(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    settings = {"epochs": 2, "steps_per_epoch": 1, "shuffle": False, "verbose": 0}
    backup = tf.keras.callbacks.BackupAndRestore(tmp_path / "backup")
    whole = one_weight().fit(batches_of(1, 5), **settings).history["loss"]
    with pytest.raises(KeyboardInterrupt):
        one_weight().fit(batches_of(1, 5), callbacks=[backup, Stop()], **settings)
    resumed = one_weight().fit(batches_of(1, 5), callbacks=[backup], **settings)
    # One step has learned the first number. The second number's loss is missing.
    assert whole == [1.0, 16.0]
    assert resumed.history["loss"] == [0.0]


TWO_STRATEGIES = """
from multigpu import tf_common
from multigpu.tf_common import tf

devices = tf_common.devices(2)
for size in (32, 2):
    strategy = tf.distribute.MirroredStrategy(devices)

    def inside():
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones(size))

    tf.function(strategy.run)(inside)
    print("strategy with", size, "done", flush=True)
"""


def test_a_second_strategy_of_a_process_fails_with_other_shapes(tmp_path):
    """On CPUs: TensorFlow numbers the all-reduces of both strategies from the same number."""
    (tmp_path / "two.py").write_text(TWO_STRATEGIES)
    done = run_script(tmp_path / "two.py")
    assert done.returncode != 0
    assert "strategy with 32 done" in done.stdout and "with 2 done" not in done.stdout
    assert "Shape mismatch in the collective instance" in done.stdout
