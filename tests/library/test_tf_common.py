"""TensorFlow's part of the library: PyTorch's model and order, devices, refused input."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import ROOT, run, run_script

from multigpu import data, errors, proof
from multigpu.models import CNN

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def tensorflow():
    """Import it before the first test, not with this file: each worker imports all files."""
    global tf, tf_common, PLACES
    pytest.importorskip("tensorflow")
    from multigpu import tf_common
    from multigpu.tf_common import tf

    PLACES = tf_common.devices(4)  # before anything else: TensorFlow starts once in a process


def test_tensorflow_starts_without_scikit_learn_which_can_be_imported_later(tmp_path):
    """Keras imports it if it can, for wrappers that no lesson uses: a second of each start."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from multigpu import tf_common\n"
        "print('sklearn' in sys.modules)\n"
        "from sklearn.datasets import load_digits\n"
        "print(len(load_digits().target))\n"
    )
    assert run_script(script).stdout.split() == ["False", "1797"]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 7, 10)])
def test_the_keras_model_is_the_torch_model(shape):
    """Channels, height and width differ, so a mixed-up axis changes the result."""
    torch.manual_seed(3)
    in_torch = CNN(shape, classes=7)
    images = torch.randn(5, *shape)
    expected = in_torch(images).detach().numpy()
    in_keras = tf_common.cnn(shape, classes=7, seed=3)
    logits = in_keras(images.permute(0, 2, 3, 1).numpy()).numpy()
    assert np.abs(logits - expected).max() < 1e-6


def test_a_nan_in_a_later_weight_is_a_difference():
    """Python's max([0, nan]) is 0: the proof would hold."""
    weights = [np.zeros(3), np.zeros(2)]
    finite = SimpleNamespace(get_weights=lambda: weights)
    broken = SimpleNamespace(get_weights=lambda: [weights[0], np.array([0, np.nan])])
    assert tf_common.difference(finite, finite) == 0
    assert np.isnan(tf_common.difference(finite, broken))


def test_the_first_losses_are_those_of_torch():
    train, _ = data.load(data.fetch(None))
    settings = {"epochs": 1, "batch_size": 64, "lr": 0.05, "seed": 0}
    before = [tensor.clone() for tensor in train.tensors]
    expected = []

    class Recorded(CNN):
        def forward(self, images):
            self.logits = super().forward(images)
            return self.logits

    torch.manual_seed(0)
    order = torch.as_tensor(tf_common.epoch_order(len(train), 0, 0)).split(64)

    def record(step: int, model: Recorded) -> None:
        labels = train.tensors[1][order[step - 1]]
        expected.append(F.cross_entropy(model.logits, labels).item())

    proof.train_serially(Recorded(), train, **settings, after_step=record)
    losses = tf_common.train_serially(tf_common.cnn(), train, **settings)
    assert len(losses) == 23
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(before, train.tensors, strict=True))


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_strategy_makes_an_empty_shard_where_check_shards_refuses(replicas):
    strategy = tf.distribute.MirroredStrategy(PLACES[:replicas])
    for images in range(1, 13):
        one_batch = tf.data.Dataset.range(images).batch(12)
        (batch,) = strategy.experimental_distribute_dataset(one_batch)
        shards = strategy.experimental_local_results(batch)
        empty = any(len(shard) == 0 for shard in shards)
        try:
            tf_common.check_shards(24 + images, 12, replicas)
            assert not empty, images
        except errors.UserError as error:
            assert empty and f"{replicas} replicas" in str(error), images


@pytest.mark.parametrize(("images", "replicas"), [(7, 3), (1, 4), (513, 2), (512, 2)])
def test_padding_has_weight_0_and_every_replica_gets_images(images, replicas):
    dataset = torch.utils.data.TensorDataset(torch.rand(images, 1, 2, 2), torch.arange(images))
    strategy, counted = tf.distribute.MirroredStrategy(PLACES[:replicas]), []
    for batch in strategy.experimental_distribute_dataset(
        tf_common.padded_batches(dataset, 256, replicas)
    ):
        for labels, weights in zip(
            *(strategy.experimental_local_results(part) for part in batch[1:]), strict=True
        ):
            assert len(labels)
            counted += labels.numpy()[weights.numpy() > 0].tolist()
            total = min(256, -(-images // replicas)) * replicas
            assert set((weights.numpy() * total).round(5)) <= {0.0, 1.0}
    assert counted == list(range(images))


@pytest.mark.parametrize(("images", "refused"), [(11, True), (10, False), (13, False)])
def test_fit_cannot_begin_with_an_uneven_batch(images, refused):
    """Refused where Keras's fit fails, and nowhere else: fails once Keras is repaired."""
    strategy = tf.distribute.MirroredStrategy(PLACES[:2])
    with strategy.scope():
        model = tf_common.cnn()
        model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = tf.data.Dataset.from_tensor_slices(
        (np.zeros((images, 8, 8, 1)), np.zeros(images))
    ).batch(12)
    with (
        pytest.raises(errors.UserError, match="--batch-size 10 or less")
        if refused
        else nullcontext()
    ):
        tf_common.check_shards(images, 12, 2, fit=True) if images != 13 else None
    message = r"Inputs to operation .*AddN.* must have the same size and shape"
    failure = pytest.raises(tf.errors.InvalidArgumentError, match=message)
    with failure if refused else nullcontext():
        model.fit(batches.take(1), shuffle=False, verbose=0)


def test_devices_below_one_are_refused():
    with pytest.raises(errors.UserError, match="0 devices asked for"):
        tf_common.devices(0)


def test_devices_asked_for_too_late():
    tf.constant(1) + 1
    assert tf_common.devices(3) == ["CPU:0", "CPU:1", "CPU:2"], "fewer are there"
    with pytest.raises(
        errors.UserError,
        match="has started with 4 CPU devices, so it cannot make 5",
    ):
        tf_common.devices(5)


@pytest.fixture
def two_gpus(monkeypatch):
    """TensorFlow that reports two GPUs; the settings that it was given for them."""
    gpus = [
        tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in (0, 1)
    ]
    settings = {"visible": gpus, "growing": []}
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind: gpus if kind == "GPU" else []
    )
    monkeypatch.setattr(
        tf.config, "set_visible_devices", lambda seen, kind: settings.update(visible=seen)
    )
    monkeypatch.setattr(
        tf.config.experimental,
        "set_memory_growth",
        lambda gpu, how: settings["growing"].append((gpu, how)),
    )
    return gpus, settings


def test_gpus_are_taken_and_the_others_left_alone(two_gpus):
    gpus, settings = two_gpus
    assert tf_common.devices() == ["GPU:0", "GPU:1"] and settings["visible"] == gpus
    assert settings["growing"] == [(gpu, True) for gpu in gpus]
    assert tf_common.devices(1) == ["GPU:0"] and settings["visible"] == gpus[:1]
    with pytest.raises(
        errors.UserError, match="3 devices asked for, but TensorFlow sees 2 GPUs: ask for 2"
    ):
        tf_common.devices(3)


def test_gpus_that_can_no_longer_be_configured_are_used(two_gpus, monkeypatch):
    def late(*_):
        raise RuntimeError("Physical devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", late)
    monkeypatch.setattr(tf.config, "set_visible_devices", late)
    assert tf_common.devices(2) == ["GPU:0", "GPU:1"]


def test_the_classroom_hides_real_gpus(two_gpus, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "multigpu-classroom")
    assert tf_common.gpus() == [] and two_gpus[1]["visible"] == []


@pytest.mark.long
def test_exact_means_no_tf32_and_the_same_way_each_time():
    code = """
from tensorflow.python.framework.config import is_op_determinism_enabled as same
from multigpu.tf_common import devices, tf
fast = tf.config.experimental.tensor_float_32_execution_enabled
devices(2), print(fast(), same())
devices(2, exact=True), print(fast(), same())
"""
    assert run("python", "-c", code).stdout.split() == ["True", "False", "False", "True"]


def test_gpus_that_slurm_gave_and_tensorflow_does_not_see(monkeypatch):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    with pytest.raises(
        errors.UserError, match=r"gave this node 2 GPUs, but TensorFlow \S+ sees none"
    ):
        tf_common.gpus()
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "multigpu-classroom")  # which pretends them
    assert tf_common.gpus() == []


def test_the_library_does_without_tensorflow():
    names = "cli, data, devices, launch, models, proof, trainer, virtual"
    done = run(
        "python",
        "-c",
        f"import sys, multigpu\nfrom multigpu import {names}\nassert 'tensorflow' not in "
        "sys.modules",
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def without_tensorflow(tmp_path):
    (tmp_path / "tensorflow.py").write_text(
        "raise ModuleNotFoundError('hidden', name='tensorflow')\n"
    )
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


def test_a_tensorflow_that_does_not_load_says_why(tmp_path):
    (tmp_path / "tensorflow.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open')\n"
    )
    done = run(
        "python", ROOT / "scripts" / "TF_CNN_MultiGPU.py", PYTHONPATH=f"{tmp_path}:{ROOT}"
    )
    assert "libcudart.so.12: cannot open" in done.stdout and "pip install" not in done.stdout


def test_a_script_without_tensorflow_says_what_to_install(without_tensorflow, tmp_path):
    script = ROOT / "scripts" / "TF_CNN_MultiNode.py"
    done = run("python", script, "--out", tmp_path / "out", **without_tensorflow)
    words = "error: TensorFlow is not installed"
    assert done.returncode == 2 and done.stdout.startswith(words), done.stdout
    assert done.stdout.count("\n") == 1 and "'.[tensorflow]'" in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_start_prints_nothing():
    done = run(
        "python",
        "-c",
        "from multigpu.tf_common import *\ntf.reduce_sum(tf.ones((8, 8)) @ tf.ones((8, 8)))",
    )
    assert (done.returncode, done.stdout) == (0, "")
