"""The loggers write what Lightning's loggers write: both get the same calls."""

import csv
import pickle
import sys
from argparse import Namespace
from types import ModuleType

import lightnings
import plain_net
import pytest
import torch
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu.errors import UserError
from multigpu.trainer.loggers import CSVLogger, Logger, TensorBoardLogger, tensorboard_logger

pytestmark = pytest.mark.filterwarnings("ignore")


TEXT_FILES = (".csv", ".yaml")


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
    """The files except TensorBoard's: the text of CSV and YAML files, None for others."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(root)): path.read_text() if path.suffix in TEXT_FILES else None
        for path in paths
        if not path.name.startswith("events")
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


# ---- what all loggers do --------------------------------------------------------------------


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
    logger.experiment["x"] = logger.experiment["y"].z()
    assert logger.log_dir.endswith("version_7")
    assert not (tmp_path / "logs").exists()


def test_loggers_can_be_pickled(tmp_path):
    for logger in (CSVLogger(tmp_path), TensorBoardLogger(tmp_path)):
        assert pickle.loads(pickle.dumps(logger)).log_dir == logger.log_dir


def test_a_users_logger():
    class Last(Logger):
        def log_metrics(self, metrics, step=None):
            self.last = metrics

    logger = Last()
    logger.log_metrics({"a": 1}, 0)
    logger.finalize("success")
    assert logger.last == {"a": 1}
    assert logger.name is logger.version is logger.save_dir is logger.log_dir is None


# ---- CSVLogger ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [{}, {"name": ""}, {"name": None}, {"version": "mine"}, {"prefix": "p"}]
)
@pytest.mark.parametrize("every", [1, 3, 100])
def test_csv_files_are_lightnings(lightning, tmp_path, arguments, every):
    for folder, cls in (("a", lightning.loggers.CSVLogger), ("b", CSVLogger)):
        # Two runs: the second gets a new version, or replaces the files.
        for _ in range(2):
            log(cls(tmp_path / folder, flush_logs_every_n_steps=every, **arguments))
    assert files(tmp_path / "a") == files(tmp_path / "b") != {}


def test_a_csv_of_another_run_is_replaced(tmp_path):
    for _ in range(2):
        logger = CSVLogger(tmp_path, version=0)
        logger.log_metrics({"a": 1})
        logger.finalize("success")
    text = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()
    assert text.split() == ["a,step", "1,0"]


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


def test_csv_rows_are_written_every_n_steps(tmp_path):
    path = tmp_path / "lightning_logs/version_0/metrics.csv"
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=3)
    for step in range(3):
        assert not path.exists()
        logger.log_metrics({"a": 1}, step)
    assert path.exists()


# ---- TensorBoardLogger ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"sub_dir": "s"},
        {"version": "v", "name": ""},
        {"version": 3, "sub_dir": "~/$HOME"},
    ],
)
def test_where_tensorboard_writes(lightning, tmp_path, arguments):
    logger = TensorBoardLogger(tmp_path, **arguments)
    expected = lightning.loggers.TensorBoardLogger(tmp_path, **arguments)
    assert (logger.log_dir, logger.sub_dir) == (expected.log_dir, expected.sub_dir)


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def events(folder):
    """The scalars, as (step, value) by tag, and the names of the summaries of hparams."""
    accumulator = read_events(folder)
    scalars = {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }
    names = [name for name in accumulator.summary_metadata if name.startswith("_hparams_")]
    return scalars, sorted(names)


def test_tensorboard_reads_the_same(lightning, tmp_path):
    expected = lightning.loggers.TensorBoardLogger(tmp_path / "a")
    logger = TensorBoardLogger(tmp_path / "b")
    log(expected)
    log(logger)
    assert events(logger.log_dir) == events(expected.log_dir)
    assert files(tmp_path / "b") == files(tmp_path / "a")
    scalars, _ = events(logger.log_dir)
    assert scalars["hp_metric"] == [(0, -1.0)]
    assert len(scalars["loss"]) == 7
    assert list(files(tmp_path / "b")) == ["lightning_logs/version_0/hparams.yaml"]


@pytest.mark.parametrize(
    ("arguments", "metrics"),
    [
        ({"default_hp_metric": False}, None),
        ({}, {"acc": 0.5}),
        ({}, 0.25),
        ({"prefix": "p"}, None),
    ],
)
def test_hyperparameters_of_tensorboard(lightning, tmp_path, arguments, metrics):
    params = Namespace(lr=0.1, inner={"a": [1], "b": Namespace(c=2.0)}, f=print)
    logged = []
    for folder, cls in (("a", lightning.loggers.TensorBoardLogger), ("b", TensorBoardLogger)):
        logger = cls(tmp_path / folder, **arguments)
        logger.log_hyperparams(params, metrics)
        logger.save()
        logger.finalize("failed")
        logged.append(events(logger.log_dir))
    assert logged[0] == logged[1]


def test_curves_in_one_diagram(lightning, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"both": {"train": 1.0, "val": 2.0}, "a": 3.0}, 0)
    logger.save()
    assert events(logger.log_dir)[0] == {"a": [(0, 3.0)]}
    assert {path.name for path in (tmp_path / "lightning_logs/version_0").iterdir()} >= {
        "both_train",
        "both_val",
    }


def test_mistakes_with_tensorboard(lightning, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"a": "high"}, 1)
    with pytest.raises(UserError, match=r"must be a number.*'high'"):
        logger.save()
    with pytest.raises(UserError, match="example_input_array"):
        TensorBoardLogger(tmp_path, log_graph=True).log_graph(torch.nn.Linear(1, 1))


def test_tensorboard_writes_after_100_steps_or_10_seconds(lightning, tmp_path, monkeypatch):
    logger = TensorBoardLogger(tmp_path)

    def steps_in_file():
        logger.experiment.flush()
        return len(events(logger.log_dir)[0].get("a", []))

    for step in range(250):
        logger.log_metrics({"a": step}, step)
    assert steps_in_file() == 200
    monkeypatch.setattr(tensorboard_logger, "MAX_SECONDS_IN_MEMORY", -1.0)
    logger.log_metrics({"a": 1}, 250)
    assert steps_in_file() == 251


def test_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"a": 1}, 0)
    with pytest.raises(UserError, match="pip install tensorboard"):
        logger.save()


def test_tensorboard_keeps_the_time_of_the_step(lightning, tmp_path, monkeypatch):
    logger = TensorBoardLogger(tmp_path)
    monkeypatch.setattr(tensorboard_logger.time, "time", lambda: 1000.0)
    logger.log_metrics({"a": 1}, 0)
    monkeypatch.undo()
    logger.finalize("success")
    assert [event.wall_time for event in read_events(logger.log_dir).Scalars("a")] == [1000.0]


def test_tensorboard_keeps_an_existing_hparams_file(lightning, tmp_path):
    logger = TensorBoardLogger(tmp_path, version=0)
    logger.log_hyperparams({"lr": 1})
    path = tmp_path / "lightning_logs/version_0/hparams.yaml"
    path.write_text("edited: 1\n")
    logger.finalize("success")
    assert path.read_text() == "edited: 1\n"


# ---- in a run -------------------------------------------------------------------------------


def test_lightnings_trainer_runs_with_our_logger(lightning, tmp_path):
    """The same run under Lightning's Trainer, once with its CSV logger and once with ours."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    rows = torch.utils.data.TensorDataset(torch.ones(8, 2))
    for folder, cls in (("a", lightning.loggers.CSVLogger), ("b", CSVLogger)):
        trainer = lightning.Trainer(
            accelerator="cpu",
            logger=cls(tmp_path / folder),
            max_epochs=2,
            log_every_n_steps=2,
            **quiet,
        )
        data = torch.utils.data.DataLoader(rows, batch_size=2)
        trainer.fit(lightnings.model((0.5, 0.5, 0.25)), data, data)
    written = files(tmp_path / "b")
    assert written == files(tmp_path / "a")
    checkpoints = [name for name in written if name.endswith(".ckpt")]
    assert checkpoints == ["lightning_logs/version_0/checkpoints/epoch=1-step=8.ckpt"]


def test_a_trial_has_a_logger_that_keeps_nothing(tmp_path):
    class Draws(plain_net.Net):
        def on_train_start(self):
            self.logger.experiment.add_scalar("x", 1)

    run = plain_net.trainer(
        tmp_path, fast_dev_run=True, logger=True, callbacks=[L.callbacks.LearningRateMonitor()]
    )
    run.fit(Draws(), DataLoader(plain_net.rows(), 4))
    assert not any(tmp_path.iterdir()) and run.log_dir == str(tmp_path)


def test_a_logger_of_another_library(tmp_path):
    class Other:
        """It has what Lightning calls, and no method of this library's base class."""

        name, version, save_dir, log_dir = "other", 0, str(tmp_path), str(tmp_path)

        def __init__(self):
            self.logged = []

        def log_metrics(self, metrics, step=None):
            self.logged.append(metrics)

        def log_hyperparams(self, params): ...
        def log_graph(self, model): ...
        def after_save_checkpoint(self, checkpoint_callback): ...
        def save(self): ...
        def finalize(self, status): ...

    logger = Other()
    run = plain_net.trainer(tmp_path, logger=logger)
    loader = DataLoader(plain_net.rows(), 4)
    run.fit(plain_net.Net(), loader, loader)
    assert [set(metrics) for metrics in logger.logged] == [{"epoch", "v"}]
