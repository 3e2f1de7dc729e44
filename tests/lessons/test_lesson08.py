"""Lesson 08: workers learn what one device learns; a lost worker ends a run with an error."""

import json
import re
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import warm
from commands import ROOT, clean_environment, free_ports, planted, run_script, torchrun

from multigpu import tf_config

pytestmark = pytest.mark.skipif(not find_spec("tensorflow"), reason="needs TensorFlow")
STEM = "TF_CNN_MultiNode"
PAGE = ROOT / "lessons" / "08-tf-multi-node"
SCRIPT = ROOT / "scripts" / f"{STEM}.py"
FLAGS = ("--epochs", 2, "--batch-size", 12)  # 35 images: the last batch has 11

# A module as the lesson knows it, with one function replaced.
OTHER = """
class Other:
    def __init__(self, module, **functions):
        self.module = module
        vars(self).update(functions)
    def __getattr__(self, name):
        return getattr(self.module, name)
"""
FAULTS = {
    "no sum of gradients": "from keras.src.backend.tensorflow.optimizer import TFOptimizer\n"
    "TFOptimizer._all_reduce_sum_gradients = lambda self, pairs: list(pairs)",
    "an uneven batch counts as a full one": OTHER
    + "lesson.np = Other(lesson.np, minimum=lambda batch, left: batch)",
}
# One worker ends with the signal just before the 5th step, which is the second of epoch 2.
DEATH = """
made = lesson.train_step
def watched(*parts):
    step, done = made(*parts), []
    def one(*batch):
        done.append(batch)
        if len(done) == 5 and lesson.tf_config.read(os.environ["TF_CONFIG"])[1] == 1:
            os.kill(os.getpid(), int(os.environ["DEATH"]))
            __import__("time").sleep(5)
        return step(*batch)
    return one
lesson.train_step = watched
"""


def configs(ports: list[int]) -> list[str]:
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return [tf_config.write(addresses, rank) for rank in range(len(ports))]


# A cluster's web proxy, which does not answer: gRPC must not ask it for the way to the other
# workers.
PROXY = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def by_hand(
    workers: int,
    script: Path,
    *flags: object,
    cwd: Path,
    last: tuple = (),
    **environment: object,
) -> list[subprocess.Popen]:
    """Start workers with TF_CONFIG, each in its own folder; only the last one gets `last`."""
    started = []
    for index, config in enumerate(configs(free_ports(workers))):
        folder = cwd / f"{index}"
        folder.mkdir(parents=True)
        command = [warm.python(), script, *map(str, flags)]
        if index == workers - 1:
            command += last
        started.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env=clean_environment(TF_CONFIG=config, **PROXY, **environment),
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    return started


def ended(started: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """Each worker's exit code, and what it printed."""
    try:
        printed = [worker.communicate(timeout=200)[0] for worker in started]
    finally:
        for worker in started:
            worker.kill()
    return [(worker.returncode, text) for worker, text in zip(started, printed, strict=True)]


# ---- 50 lines of plain TensorFlow -----------------------------------------------------------


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory) -> Path:
    """The weights of one_machine.py."""
    path = tmp_path_factory.mktemp("one_machine") / "weights.npz"
    done = run_script(PAGE / "one_machine.py", path)
    assert done.returncode == 0, done.stdout
    assert float(re.search(r"test accuracy (\S+)", done.stdout)[1]) > 0.85
    return path


def difference(path: Path, other: Path) -> float:
    """The largest difference between two files of weights."""
    weights, others = np.load(path), np.load(other)
    assert weights.files == others.files and len(others.files) == 4
    return max(np.abs(weights[name] - others[name]).max() for name in weights.files)


@pytest.mark.slow
def test_the_pages_command_gives_the_weights_of_one_machine(tmp_path, one_machine):
    """Really started, as a learner types it, with free ports."""
    page = (PAGE / "README.md").read_text()
    (command,) = re.findall(r"```\n(TF_CONFIG=.*?)\n```", page, re.DOTALL)
    for old, port in zip(("12763", "12764"), free_ports(2), strict=True):
        assert command.count(old) == 1
        command = command.replace(old, str(port))
    assert command.count('"index": 0') == 1
    workers = []
    for index in (0, 1):
        own = command.replace('"index": 0', f'"index": {index}')
        own = own.replace("weights.npz", f"{tmp_path}/{index}.npz")
        workers.append(
            subprocess.Popen(
                ["bash", "-c", own],
                cwd=ROOT,
                env=clean_environment(),
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    (code, printed), (other_code, other_printed) = ended(workers)
    assert (code, other_code) == (0, 0), printed + other_printed
    assert "2 replicas, test accuracy" in printed
    assert "test accuracy" not in other_printed, "only the chief prints"
    assert difference(tmp_path / "0.npz", one_machine) < 1e-6
    assert not (tmp_path / "1.npz").exists()


@pytest.mark.parametrize("name", ["worker.py", "one_machine.py"])
def test_plain_tensorflow_uses_nothing_of_the_course(name):
    assert "multigpu" not in (PAGE / name).read_text()


# ---- the script -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run on two workers: its flags, how each worker ended, its folder."""
    folder = tmp_path_factory.mktemp("whole")
    random = np.random.default_rng(0)
    arrays = {
        f"x_{part}": random.random((n, 8, 8), np.float32)
        for part, n in (("train", 35), ("test", 7))
    }
    np.savez(
        folder / "small.npz", **arrays, y_train=np.arange(35) % 3, y_test=np.arange(7) % 3
    )
    flags = ("--data", folder / "small.npz", *FLAGS)
    workers = by_hand(2, SCRIPT, *flags, "--prove", "--out", folder / "o", cwd=folder)
    return flags, ended(workers), folder / "o"


def test_two_workers_equal_one_device(whole):
    _, ((code, printed), other), folder = whole
    assert (
        code == 0
        and "on 2 replicas equals one device" in printed
        and "limit 1e-05: holds" in printed
    ), printed
    for noise in ("Warning", "WARNING", "TensorFlow binary", "oneDNN", "grpc"):
        assert noise not in printed
    assert other == (0, ""), "only the chief prints"
    written = json.loads((folder / "metrics.json").read_text())
    assert f"loss {written['loss']:.4f}, accuracy {written['accuracy']:.4f}" in printed


def test_three_workers_equal_one_device(tmp_path, npz):
    """The last of the batches of 12 has one image: two of the workers get padding only."""
    settings = ("--data", npz(37), "--batch-size", 12, "--epochs", 1)
    flags = (*settings, "--prove", "--out", tmp_path / "o")
    (code, printed), *others = ended(by_hand(3, SCRIPT, *flags, cwd=tmp_path))
    assert code == 0 and "on 3 replicas equals one device" in printed, printed
    assert others == [(0, ""), (0, "")]


@pytest.mark.parametrize("fault", FAULTS)
def test_with_a_fault_the_proof_fails(tmp_path, npz, fault):
    path = planted(tmp_path, STEM, FAULTS[fault])
    settings = ("--data", npz(), "--batch-size", 12, "--epochs", 1)
    flags = (*settings, "--prove", "--out", tmp_path / "o")
    (code, printed), _ = ended(by_hand(2, path, *flags, cwd=tmp_path))
    assert code == 1 and "limit 1e-05: fails" in printed, printed


def test_a_killed_run_goes_on_as_if_it_had_not_been_killed(tmp_path, whole):
    """To the bit, the optimizer's momentum included."""
    flags, _, uninterrupted = whole
    flags = (*flags, "--out", tmp_path / "o")
    killed = torchrun(2, planted(tmp_path, STEM, DEATH), *flags, DEATH=9)
    assert killed.returncode == 1 and "Signal 9 (SIGKILL)" in killed.stdout, killed.stdout
    assert "another worker is gone" not in killed.stdout, "torchrun has ended the other"
    last = tmp_path / "o" / "ckpt-1"
    assert last.with_suffix(".index").exists()
    assert not last.with_name("ckpt-2.index").exists()
    (code, printed), _ = ended(by_hand(2, SCRIPT, *flags, "--resume", last, cwd=tmp_path))
    assert code == 0 and "epoch 2:" in printed and "epoch 1:" not in printed, printed
    one, other = (saved(path / "ckpt-2") for path in (uninterrupted, tmp_path / "o"))
    assert one.keys() == other.keys()
    assert all((value == other[name]).all() for name, value in one.items())
    losses = [(path / "metrics.json").read_text() for path in (uninterrupted, tmp_path / "o")]
    assert losses[0] == losses[1]


def saved(path: Path) -> dict[str, np.ndarray]:
    """The 8 weights of a checkpoint, and 8 momenta."""
    from multigpu.tf_common import tf

    reader = tf.train.load_checkpoint(str(path))
    names = [name for name, shape in reader.get_variable_to_shape_map().items() if shape]
    assert len(names) == 16, names
    return {name: reader.get_tensor(name) for name in names}


def test_a_worker_that_dies_is_one_sentence_on_the_other(tmp_path, npz):
    """SIGTERM ends a worker, too: TensorFlow would have kept it."""
    path = planted(tmp_path, STEM, DEATH)
    (code, printed), (death, _) = ended(
        by_hand(2, path, "--data", npz(), *FLAGS, cwd=tmp_path, DEATH=15)
    )
    assert (
        (code, death) == (2, -15)
        and printed.count("error: worker 0 stops, because another worker is gone") == 1
        and "--resume" in printed
    ), printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_a_worker_that_stands_still_is_one_sentence_on_the_other(tmp_path, npz):
    """Its connection stays open, but it sends no heartbeat."""
    path = planted(tmp_path, STEM, DEATH)
    settings = ("--data", npz(), *FLAGS)
    workers = by_hand(2, path, *settings, cwd=tmp_path, DEATH=int(signal.SIGSTOP))
    try:
        printed = workers[0].communicate(timeout=200)[0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert workers[0].returncode == 2, printed
    assert printed.count("error: worker 0 stops, because another worker is gone") == 1


def test_only_the_chief_writes_and_two_runs_stay_apart(tmp_path, npz):
    """Each worker has a folder of its own, and --out is relative to it. Two runs at a time."""
    flags = ("--data", npz(), *FLAGS, "--prove", "--out", "o")
    runs = []
    for seed in (0, 1):
        folder = tmp_path / f"{seed}"
        runs.append(by_hand(2, SCRIPT, *flags, "--seed", seed, cwd=folder))
    for seed, workers in enumerate(runs):
        (code, printed), other = ended(workers)
        assert code == 0 and "limit 1e-05: holds" in printed and other == (0, ""), (
            printed,
            other,
        )
        names = {path.name for path in (tmp_path / f"{seed}/0/o").iterdir()}
        assert {"ckpt-2.index", "metrics.json", "model.keras"} <= names
        assert not list((tmp_path / f"{seed}/1").iterdir())


def test_workers_that_were_given_different_flags(tmp_path, npz):
    """Else the one would wait for the other for ever."""
    flags = ("--data", npz(), "--out", "o")
    workers = by_hand(2, SCRIPT, *flags, cwd=tmp_path, last=("--epochs", "3"))
    for code, printed in ended(workers):
        assert (code, printed.count("\n")) == (2, 1), printed
        assert "the command line of rank 1 differs from rank 0's" in printed, printed


@pytest.mark.parametrize(
    ("more", "file", "words"),
    [
        (("--lr", 0.1), "ckpt-2", "was written with --batch-size 12 --lr 0.05 --seed 0"),
        ((), "ckpt-2", "has 2 epochs: give more"),
        ((), "ckpt-7", "is no checkpoint of this model"),
    ],
    ids=["other settings", "nothing to do", "no file"],
)
def test_a_checkpoint_that_does_not_fit(tmp_path, whole, more, file, words):
    flags, _, folder = whole
    done = run_script(
        SCRIPT, *flags, *more, "--out", tmp_path / "o", "--resume", folder / file
    )
    assert (
        done.returncode == 2 and done.stdout.count("error: ") == 1 and words in done.stdout
    ), done.stdout
