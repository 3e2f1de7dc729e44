"""The loggers write what Lightning's loggers write: both get the same calls."""

import csv
import pickle
import sys
from types import ModuleType

import lightnings
import plain_net
import pytest
import torch
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu import launch
from multigpu.errors import UserError
from multigpu.trainer.loggers import CSVLogger, TensorBoardLogger

pytestmark = pytest.mark.filterwarnings("ignore")
# If this module exists, TensorBoard does not import TensorFlow.
NOTF = "tensorboard.compat.notf"


@pytest.fixture(scope="module")
def lightning():
    """Lightning's package, and TensorBoard without TensorFlow, whose import takes seconds."""
    pytest.importorskip("tensorboard")
    sys.modules.setdefault(NOTF, ModuleType(NOTF))
    yield lightnings.package().pytorch
    sys.modules.pop(NOTF)


def files(root):
    """The files except TensorBoard's and hparams.yaml: the text of CSV files, else None."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(root)): path.read_text() if path.suffix == ".csv" else None
        for path in paths
        if not path.name.startswith(("events", "hparams"))
    }


def log(logger):
    """Call the logger as a run does."""
    logger.log_hyperparams(
        {"lr": 0.02, "name": "a", "widths": [3, 4], "bias": True, "none": None}
    )
    logger.save()
    for step in range(7):
        logger.log_metrics({"loss": torch.tensor(1.5 - step), "epoch": 0}, step=step)
        if step == 4:
            logger.log_metrics({"b": 2, "acc": 0.25}, step=step)
    logger.finalize("success")


def test_where_loggers_write(lightning, tmp_path):
    for number in ("1", "12", "x"):
        (tmp_path / "lightning_logs" / f"version_{number}").mkdir(parents=True)
    (tmp_path / "lightning_logs" / "version_40").write_text("a file")
    for cls in (CSVLogger, TensorBoardLogger):
        logger = cls(tmp_path)
        expected = getattr(lightning.loggers, cls.__name__)(tmp_path)
        for name in ("version", "log_dir", "root_dir", "save_dir", "name"):
            assert getattr(logger, name) == getattr(expected, name), name
        assert logger.version == 13
        assert logger.log_dir.endswith("version_13")


@pytest.mark.parametrize("cls", [CSVLogger, TensorBoardLogger])
def test_only_rank_0_writes_and_all_ranks_have_its_version(tmp_path, cls):
    logger = cls(tmp_path / "logs")
    logger.is_global_zero = False
    logger.set_version(7)
    log(logger)
    logger.experiment.add_image("a", [1])
    assert logger.log_dir.endswith("version_7")
    assert not (tmp_path / "logs").exists()


def test_loggers_can_be_pickled(tmp_path):
    for logger in (CSVLogger(tmp_path), TensorBoardLogger(tmp_path)):
        assert pickle.loads(pickle.dumps(logger)).log_dir == logger.log_dir


@pytest.mark.parametrize("arguments", [{}, {"name": None}, {"version": "mine"}])
@pytest.mark.parametrize("every", [1, 3])
def test_csv_files_are_lightnings(lightning, tmp_path, arguments, every):
    for folder, cls in (("a", lightning.loggers.CSVLogger), ("b", CSVLogger)):
        # Two runs: the second gets a new version, or replaces the files.
        for _ in range(2):
            log(cls(tmp_path / folder, flush_logs_every_n_steps=every, **arguments))
    assert files(tmp_path / "a") == files(tmp_path / "b") != {}


@pytest.mark.parametrize("cls", [CSVLogger, TensorBoardLogger])
def test_a_prefix_is_refused(tmp_path, cls):
    with pytest.raises(UserError, match=f"prefix in {cls.__name__}"):
        cls(tmp_path, prefix="p")


def test_a_run_that_logs_nothing_leaves_no_folder(tmp_path):
    CSVLogger(tmp_path / "none").finalize("success")
    assert not (tmp_path / "none").exists()


def test_a_late_column_is_empty_in_earlier_rows(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    for step, row in enumerate(({"b": 1}, {"a": 2, "c,d": 'x"y'}, {"b": 3})):
        logger.log_metrics(row, step)
    with open(tmp_path / "lightning_logs/version_0/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"a": "", "b": "1", "c,d": "", "step": "0"},
        {"a": "2", "b": "", "c,d": 'x"y', "step": "1"},
        {"a": "", "b": "3", "c,d": "", "step": "2"},
    ]


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def events(folder):
    """The scalars, as (step, value) by tag."""
    accumulator = read_events(folder)
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_the_same(lightning, tmp_path):
    expected = lightning.loggers.TensorBoardLogger(tmp_path / "a", default_hp_metric=False)
    logger = TensorBoardLogger(tmp_path / "b")
    log(expected)
    log(logger)
    scalars = events(logger.log_dir)
    assert scalars == events(expected.log_dir) and len(scalars["loss"]) == 7
    texts = read_events(logger.log_dir).Tensors("hparams/text_summary")
    assert b"lr: 0.02" in texts[0].tensor_proto.string_val[0]


def test_mistakes_with_tensorboard(lightning, tmp_path):
    with pytest.raises(UserError, match=r"must be a number.*'high'"):
        TensorBoardLogger(tmp_path).log_metrics({"a": "high"}, 1)
    for name in ("log_graph", "default_hp_metric", "sub_dir"):
        with pytest.raises(UserError, match=f"{name} in|{name}:"):
            TensorBoardLogger(tmp_path, **{name: True})
        TensorBoardLogger(tmp_path, **{name: False}).log_metrics({"a": 1.0}, 1)


def test_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    logger = TensorBoardLogger(tmp_path)
    with pytest.raises(UserError, match="pip install tensorboard"):
        logger.log_metrics({"a": 1}, 0)


def test_a_trial_has_a_logger_that_keeps_nothing(tmp_path):
    class Draws(plain_net.Net):
        def on_train_start(self):
            self.logger.experiment.add_scalar("x", 1)

    run = plain_net.trainer(
        tmp_path, fast_dev_run=True, logger=True, callbacks=[L.callbacks.LearningRateMonitor()]
    )
    run.fit(Draws(), DataLoader(plain_net.rows(), 4))
    assert not any(tmp_path.iterdir()) and run.log_dir == str(tmp_path)


def test_a_hook_may_replace_the_logger(tmp_path):
    class Replaces(plain_net.Net):
        def on_train_start(self):
            self.trainer.logger = CSVLogger(tmp_path, "second")

    loader = DataLoader(plain_net.rows(), 4)
    plain_net.trainer(tmp_path, logger=CSVLogger(tmp_path, "first")).fit(
        Replaces(), loader, loader
    )
    assert [path.parts[-3] for path in tmp_path.rglob("metrics.csv")] == ["second"]


class Other:
    """It has what Lightning calls, and no method of this library's base class."""

    name, version, save_dir, log_dir = "other", 0, ".", "."

    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step=None):
        self.logged.append(metrics)

    def log_hyperparams(self, params): ...
    def save(self): ...
    def finalize(self, status): ...


def logged_by_another(folder: str) -> list[set]:
    logger = Other()
    run = plain_net.trainer(folder, logger=logger, strategy="ddp")
    loader = DataLoader(plain_net.rows(), 4)
    run.fit(plain_net.Net(), loader, loader)
    return [set(metrics) for metrics in logger.logged]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_logger_of_another_library(tmp_path, ranks):
    assert launch.call(logged_by_another, ranks, str(tmp_path)) == [[{"epoch", "v"}]] * ranks
