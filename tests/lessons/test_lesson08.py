"""Lesson 08: workers learn what one device learns; a lost worker ends a run with an error."""

import json
import re
import signal
import socket
import subprocess
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from commands import ROOT, clean_environment, free_ports, planted, run_script

from multigpu import launch, tf_common, tf_config
from multigpu.models.resnet import resnet
from multigpu.scaling import predict
from multigpu.vgpu.sim.network import Network, collective_seconds
from multigpu.vgpu.sim.presets import NETWORKS

pytest.importorskip("tensorflow")
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
    "the mean of each replica's own shard": OTHER + "tf = lesson.tf\n"
    "lesson.tf = Other(tf, reduce_sum=lambda x: 2 * tf.reduce_sum(x) if x.dtype == "
    "tf.float32 else tf.reduce_sum(x))",
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
            lesson.time.sleep(5)
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
DIRECT = {"no_grpc_proxy": "127.0.0.1"}  # the script sets this variable, worker.py does not


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


@pytest.mark.slow
def test_three_workers_give_the_weights_of_one_machine(tmp_path, one_machine):
    path = tmp_path / "weights.npz"
    workers = by_hand(3, PAGE / "worker.py", path, cwd=tmp_path, **DIRECT)
    for code, printed in ended(workers):
        assert code == 0, printed
    assert difference(path, one_machine) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tf.reduce_sum(losses) / 120", "tf.reduce_mean(losses)"),  # over its own rows
        # No sum of gradients: step runs without the strategy, on the worker's shard.
        ("strategy.run(step, args=batch)", "step(*[value.values[0] for value in batch])"),
        ("strategy.experimental_distribute_dataset(batches)", "batches"),  # all read all
        ("seed=0", "seed=int(is_chief)"),  # they divide different orders
    ],
)
def test_with_a_fault_the_weights_are_others(tmp_path, one_machine, right, wrong):
    text = (PAGE / "worker.py").read_text()
    assert text.count(right) == 1
    script = tmp_path / "fault.py"
    script.write_text(text.replace(right, wrong))
    path = tmp_path / "weights.npz"
    for code, printed in ended(by_hand(2, script, path, cwd=tmp_path, **DIRECT)):
        assert code == 0, printed
    assert difference(path, one_machine) > 1e-4


@pytest.mark.parametrize("name", ["worker.py", "one_machine.py"])
def test_plain_tensorflow_uses_nothing_of_the_course(name):
    assert "multigpu" not in (PAGE / name).read_text()


def catches(process: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    status = Path(f"/proc/{process}/status").read_text()
    caught = int(re.search(r"^SigCgt:\s+(\w+)", status, re.M)[1], 16)
    return bool(caught >> (number - 1) & 1)


@pytest.mark.slow
def test_a_plain_worker_waits_for_the_other_without_a_message(tmp_path):
    """Really started. Neither SIGTERM nor Ctrl-C ends it: the script's deadline does."""
    ports = free_ports(2)
    printed = tmp_path / "printed"
    with printed.open("w") as file:
        worker = subprocess.Popen(
            ["python", PAGE / "worker.py", tmp_path / "weights.npz"],
            env=clean_environment(
                TF_CONFIG=configs(ports)[0], TF_CPP_MIN_LOG_LEVEL=2, TF_ENABLE_ONEDNN_OPTS=0
            ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        while worker.poll() is None:  # until it listens, so that the others can connect
            with suppress(OSError), socket.create_connection(("127.0.0.1", ports[0]), 1):
                break
            time.sleep(0.1)
        # TensorFlow's handler of SIGTERM can come after its socket.
        while worker.poll() is None and not catches(worker.pid, signal.SIGTERM):
            time.sleep(0.1)
        for number in (signal.SIGTERM, signal.SIGINT):
            worker.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                worker.wait(timeout=3)
        assert printed.read_text() == ""
    finally:
        worker.kill()
        worker.wait()


# ---- the notebook's experiments -------------------------------------------------------------


@pytest.mark.slow
def test_who_reads_what_the_first_weights_and_fit(experiments):
    functions = (
        experiments.images_read,
        experiments.steps_made,
        experiments.first_weights,
        experiments.try_fit,
    )
    read, steps, weights, errors = zip(
        *launch.call(experiments.on_worker, 2, *functions), strict=True
    )
    assert read[0]["AUTO"] == [[0, 1], [4, 5]], "half of each batch"
    assert read[1]["AUTO"] == [[2, 3], [6, 7]]
    assert read[0]["OFF"] == read[1]["OFF"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [worker["DATA"] for worker in read] == [worker["AUTO"] for worker in read]
    assert [worker["FILE"] for worker in read] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [worker["AUTO, files"] for worker in read] == [worker["FILE"] for worker in read]
    both = [*chain(*read[0]["AUTO, two seeds"], *read[1]["AUTO, two seeds"])]
    assert len(both) == 8 and len(set(both)) < 8, "an image twice, another one not at all"
    # The worker with fewer images makes as many steps as the other one.
    assert steps == ([10] * 10, [10] * 4 + [4] + [0] * 5)
    assert (weights[0]["drawn"] == weights[1]["drawn"]).all()
    assert (weights[0]["drawn"] != 0).any()
    assert np.abs(weights[0]["assigned"] - weights[1]["assigned"]).max() > 0.1
    for error in errors:
        assert error.startswith("Attempt to convert a value (PerReplica:{…}) with")
        assert error.endswith("to a Tensor.")


@pytest.mark.slow
def test_own_tensors_wait_for_the_other_worker_and_one_file_is_not_enough(
    experiments, tmp_path
):
    (tmp_path / "numbers.txt").write_text("0\n1\n2\n3")

    def second_step(strategy, world) -> tuple[float, float]:
        """When this worker begins its second step, and when it has made it."""
        tf = experiments.tf

        def total(number):
            own = tf.identity(number)
            return tf.distribute.get_replica_context().all_reduce("SUM", own)

        step = tf.function(lambda number: strategy.run(total, args=(number,)))
        assert float(step(tf.constant(1.0))) == 2
        if world.rank == 1:
            time.sleep(2)
        began = time.monotonic()
        assert float(step(tf.constant(1.0))) == 2
        return began, time.monotonic()

    def one_file(strategy, world) -> str:
        tf = experiments.tf
        lines = tf.data.TextLineDataset([str(tmp_path / "numbers.txt")]).batch(4)
        try:
            list(strategy.experimental_distribute_dataset(lines))
        except tf.errors.OpError as error:
            return str(error)
        return ""

    found = launch.call(experiments.on_worker, 2, second_step, one_file)
    ((began, ended), error), ((began_late, _), other_error) = found
    assert began < began_late < ended
    assert "not enough for the required 2 shards/workers" in error + other_error


def test_the_times_that_the_notebook_gives_for_resnet_50():
    """81 ms of computing, and an all-reduce of bytes ÷ bandwidth between two machines."""
    (one,) = predict("resnet50", "A100-80GB", link="NVLink3", gpus=(1,)).rows
    assert one.estimates[0].seconds == pytest.approx(0.081, rel=0.01)
    network = NETWORKS["Ethernet10"]
    weights = sum(weight.numel() for weight in resnet(50).parameters())
    seconds = collective_seconds("allreduce", 4 * weights, Network(network).group(2))
    assert seconds == pytest.approx(4 * 25.6e6 / network.bandwidth, rel=0.01)


@pytest.mark.slow
def test_an_all_reduce_has_as_many_numbers_as_the_gradients_of_the_cnn(experiments):
    ((one,), (other,)) = launch.call(experiments.on_worker, 2, experiments.all_reduce_seconds)
    assert list(one)[1] == sum(weights.size for weights in tf_common.cnn().get_weights())
    assert one.keys() == other.keys()
    for seconds in (*one.values(), *other.values()):
        assert len(seconds) == 20 and min(seconds) > 0


@pytest.mark.slow
def test_batch_norm_has_the_statistics_of_a_worker_or_synchronized_of_all(experiments):
    """Half of the digits on each worker. The chief's copy is the whole model if it syncs."""
    ((serial, synced_serial),) = experiments.on_worker(experiments.batch_norm)
    ((plain, synced),), ((other, synced_other),) = launch.call(
        experiments.on_worker, 2, experiments.batch_norm
    )

    def apart(one: dict, two: dict, name: str) -> float:
        return np.abs(one[name] - two[name]).max()

    assert apart(serial, synced_serial, "weights") < 1e-6
    assert apart(plain, other, "weights") == 0
    assert apart(plain, other, "moving mean") > 0.1
    assert apart(plain, serial, "weights") > 1e-3
    copies = zip(plain["accuracies"], other["accuracies"], strict=True)
    for both, alone in zip(copies, serial["accuracies"], strict=True):
        assert max(both) < alone
    assert plain["accuracies"][0] < serial["accuracies"][0] - 0.02
    assert plain["accuracies"][0] != other["accuracies"][0]
    for copy in (synced, synced_other):
        assert apart(copy, serial, "weights") < 1e-5
        assert apart(copy, serial, "moving mean") < 1e-5
        assert copy["accuracies"] == pytest.approx(serial["accuracies"], abs=0.01)


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
    assert (written["devices"], written["world_size"], written["launcher"]) == (
        2,
        2,
        "TF_CONFIG",
    )


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
    killed = run_script(planted(tmp_path, STEM, DEATH), *flags, "--spawn", 2, DEATH=9)
    assert killed.returncode == 128 + 9, killed.stdout
    assert "error: process 1 terminated with signal SIGKILL" in killed.stdout, (
        "the report names the rank that died, not the one that noticed"
    )
    assert "another worker is gone" not in killed.stdout
    assert torch.load(tmp_path / "o" / "last.pt", weights_only=True)["position"]["epoch"] == 1
    (code, printed), _ = ended(by_hand(2, SCRIPT, *flags, "--resume", cwd=tmp_path))
    assert code == 0 and "1 epoch done, of 2" in printed, printed
    one, other = (
        torch.load(path / "last.pt", weights_only=True)["parts"]
        for path in (uninterrupted, tmp_path / "o")
    )
    assert one.keys() == other.keys() == {"model", "optimizer"} and len(one["optimizer"]) == 10
    for part in one:
        assert one[part].keys() == other[part].keys()
        assert all(torch.equal(value, other[part][name]) for name, value in one[part].items())
    rows = [
        json.loads((path / "metrics.json").read_text())["epochs"]
        for path in (uninterrupted, tmp_path / "o")
    ]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]


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
        assert {path.name for path in (tmp_path / f"{seed}/0/o").iterdir()} == {
            "last.pt",
            "metrics.json",
            "training.png",
        }
        assert not list((tmp_path / f"{seed}/1").iterdir())


def test_a_worker_that_never_joins(tmp_path):
    path = planted(tmp_path, STEM, "lesson.tf_config.JOIN_TIMEOUT = 2")
    done = run_script(path, "--out", tmp_path / "o", TF_CONFIG=configs(free_ports(2))[0])
    assert done.returncode == 2 and done.stdout.count("error: ") == 1, done.stdout
    assert (
        "rank 1" in done.stdout
        and "Traceback" not in done.stdout
        and not (tmp_path / "o").exists()
    )


def test_a_worker_that_dies_between_the_rendezvous_and_the_strategy(tmp_path):
    """TensorFlow would wait an hour for it, deaf to SIGTERM and to Ctrl-C."""
    fault = """
config = lesson.tf_config
config.JOIN_TIMEOUT = 8
connect = config.connect_workers

def dies(world, gpus):
    addresses = connect(world, gpus)
    return addresses if world.rank == 0 else os._exit(9)

config.connect_workers = dies
"""
    (code, printed), (death, _) = ended(
        by_hand(2, planted(tmp_path, STEM, fault), cwd=tmp_path)
    )
    assert (code, death) == (-14, 9), printed


def test_a_port_of_tf_config_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as held:
        (config,) = configs([held.getsockname()[1]])
        done = run_script(SCRIPT, "--out", tmp_path / "o", TF_CONFIG=config)
    assert (
        done.returncode == 2
        and "but the port is in use" in done.stdout
        and "Traceback" not in done.stdout
    )


def test_a_batch_that_the_replicas_cannot_share(tmp_path):
    """By hand, each worker has a terminal of its own, so each of them says it."""
    for code, printed in ended(
        by_hand(2, SCRIPT, "--batch-size", 9, "--out", "o", cwd=tmp_path)
    ):
        assert code == 2 and printed.startswith(
            "error: --batch-size 9 cannot be split evenly over 2"
        ), printed
        assert printed.count("\n") == 1


@pytest.mark.parametrize("flags", [("--epochs", "3"), ("--resume",)])
def test_workers_that_were_given_different_flags(tmp_path, npz, flags):
    """Else the one would wait for the other for ever."""
    path = npz()
    workers = by_hand(2, SCRIPT, "--data", path, "--out", "o", cwd=tmp_path, last=flags)
    for code, printed in ended(workers):
        assert (code, printed.count("\n")) == (2, 1), printed
        assert f"{flags[0]} of rank 1" in printed and "rank 0" in printed, printed


def test_a_loss_that_is_no_number(tmp_path):
    done = run_script(SCRIPT, "--lr", "3e38", "--out", tmp_path)
    assert (
        done.returncode == 2
        and done.stdout.count("error: ") == 1
        and "lower --lr" in done.stdout
    ), done.stdout
    assert "Traceback" not in done.stdout and not list(tmp_path.iterdir())


def test_a_tf_config_that_is_wrong(tmp_path):
    config = '{"cluster": {"worker": ["a:1"]}}'
    done = run_script(SCRIPT, "--out", tmp_path / "out", TF_CONFIG=config)
    assert done.returncode == 2 and done.stdout.startswith(
        "error: TF_CONFIG does not say which worker this is"
    ), done.stdout
    assert done.stdout.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--lr", 0.1), "was written with --lr 0.05, this run has 0.1"),
        (("--data",), "6.kernel is (64, 3) in the file and (64, 10)"),
    ],
)
def test_a_checkpoint_that_does_not_fit(tmp_path, whole, more, words):
    """Other settings, and another model: the digits have 10 classes. One worker reads it."""
    flags, _, folder = whole
    flags = flags[2:] if more == ("--data",) else (*flags, *more)
    done = run_script(SCRIPT, *flags, "--out", tmp_path / "o", "--resume", folder / "last.pt")
    assert (
        done.returncode == 2 and done.stdout.count("error: ") == 1 and words in done.stdout
    ), done.stdout


RESOLVER = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NODELIST": "n[2,10]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def test_what_the_page_says_of_slurm_cluster_resolver(monkeypatch):
    from multigpu.tf_common import tf

    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver
    for name, value in (RESOLVER | {"SLURM_STEP_NUM_TASKS": "2"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolver().num_accelerators() == {"GPU": 1}, "an empty list of GPUs counts as one"
    assert resolver(auto_set_gpu=False).cluster_spec().as_dict() == {
        "worker": ["n10:8888", "n2:8888"]
    }
    with pytest.raises(ValueError, match=r"range\(\) arg 3 must not be zero"):
        resolver(gpus_per_node=0).cluster_spec()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(FileNotFoundError, match="nvidia-smi"):
        resolver()
