"""Do our loggers write what Lightning's write? Both get the same calls, and the files are compared."""

import csv
import pickle
import sys
import warnings
from argparse import Namespace

import lightnings
import pytest
import torch
import yaml

from multigpu.errors import UserError
from multigpu.trainer.loggers import CSVLogger, Logger, TensorBoardLogger, tensorboard_logger

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def real():
    """Lightning's package; and TensorBoard without TensorFlow, whose import alone takes seconds."""
    pytest.importorskip("tensorboard")
    sys.modules.setdefault("tensorboard.compat.notf", type(sys)("tensorboard.compat.notf"))
    yield lightnings.package().pytorch
    sys.modules.pop("tensorboard.compat.notf")


def files(root):
    """Every file but TensorBoard's, with its text; of YAML what it says, since ours writes a list in one line."""
    read = {
        ".csv": lambda path: path.read_text(),
        ".yaml": lambda path: list(yaml.safe_load(path.read_text()).items()),
    }
    return {
        str(path.relative_to(root)): read.get(path.suffix, lambda path: None)(path)
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith("events")
    }


def log(logger):
    """What a run does with its logger."""
    logger.log_hyperparams(
        {"lr": 0.02, "name": "a", "widths": [3, 4], "bias": True, "none": None}
    )
    logger.save()
    for step in range(7):
        logger.log_metrics({"loss": torch.tensor(1.5 - step), "epoch": 0}, step=step)
        if step == 4:
            logger.log_metrics({"b": 2, "acc": 0.25}, step=step)
    logger.finalize("success")


@pytest.mark.parametrize(
    "arguments", [{}, {"name": ""}, {"name": None}, {"version": "mine"}, {"prefix": "p"}]
)
@pytest.mark.parametrize("every", [1, 3, 100])
def test_csv_files_are_lightnings(real, tmp_path, arguments, every):
    for kind, who in (("a", real.loggers.CSVLogger), ("b", CSVLogger)):
        for _ in range(2):  # a second run
            log(who(tmp_path / kind, flush_logs_every_n_steps=every, **arguments))
    assert files(tmp_path / "a") == files(tmp_path / "b") != {}


def test_where_loggers_write(real, tmp_path):
    for number in ("1", "12", "x"):
        (tmp_path / "lightning_logs" / f"version_{number}").mkdir(parents=True)
    (tmp_path / "lightning_logs" / "version_40").write_text("a file")
    for name in ("CSVLogger", "TensorBoardLogger"):
        mine = {"CSVLogger": CSVLogger, "TensorBoardLogger": TensorBoardLogger}[name](tmp_path)
        theirs = getattr(real.loggers, name)(tmp_path)
        for what in ("version", "log_dir", "root_dir", "save_dir", "name"):
            assert getattr(mine, what) == getattr(theirs, what), what
        assert mine.version == 13 and mine.log_dir.endswith("version_13")
    for given in (
        {"sub_dir": "s"},
        {"version": "v", "name": ""},
        {"version": 3, "sub_dir": "~/$HOME"},
    ):
        mine, theirs = (
            TensorBoardLogger(tmp_path, **given),
            real.loggers.TensorBoardLogger(tmp_path, **given),
        )
        assert (mine.log_dir, mine.sub_dir) == (theirs.log_dir, theirs.sub_dir)


def test_only_rank_0_writes_and_all_know_its_version(tmp_path):
    for who in (CSVLogger, TensorBoardLogger):
        logger = who(tmp_path / who.__name__)
        logger.is_global_zero = False
        logger.set_version(7)
        log(logger)
        logger.experiment.add_image("a", [1])
        logger.experiment["x"] = logger.experiment["y"].z()
        assert logger.log_dir.endswith("version_7") and not (tmp_path / who.__name__).exists()


def test_a_csv_of_another_run_is_written_anew(tmp_path):
    for _ in range(2):
        logger = CSVLogger(tmp_path, version=0)
        logger.log_metrics({"a": 1})
        with warnings.catch_warnings(record=True):
            logger.finalize("success")
    assert (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().split() == [
        "a,step",
        "1,0",
    ]
    CSVLogger(tmp_path / "none").finalize("success")
    assert not (tmp_path / "none").exists(), "who logs nothing leaves no folder"


def test_columns_that_come_late_fill_the_rows_before_with_nothing(tmp_path):
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


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    tags = read.Tags()["scalars"]
    hparams = {
        k: str(v.plugin_data.content)
        for k, v in read.summary_metadata.items()
        if k.startswith("_hparams_")
    }
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in tags}, sorted(
        hparams
    )


def test_tensorboard_reads_the_same(real, tmp_path):
    seen = []
    for kind, who in (("a", real.loggers.TensorBoardLogger), ("b", TensorBoardLogger)):
        logger = who(tmp_path / kind)
        log(logger)
        seen.append((*events(logger.log_dir), files(tmp_path / kind)))
    assert seen[0] == seen[1]
    assert seen[1][0]["hp_metric"] == [(0, -1.0)] and len(seen[1][0]["loss"]) == 7
    assert list(seen[1][2]) == ["lightning_logs/version_0/hparams.yaml"]


@pytest.mark.parametrize(
    ("arguments", "metrics"),
    [
        ({"default_hp_metric": False}, None),
        ({}, {"acc": 0.5}),
        ({}, 0.25),
        ({"prefix": "p"}, None),
    ],
)
def test_hyperparameters_of_tensorboard(real, tmp_path, arguments, metrics):
    seen = []
    params = Namespace(lr=0.1, inner={"a": [1], "b": Namespace(c=2.0)}, f=print)
    for kind, who in (("a", real.loggers.TensorBoardLogger), ("b", TensorBoardLogger)):
        logger = who(tmp_path / kind, **arguments)
        logger.log_hyperparams(params, metrics)
        logger.save()
        logger.finalize("failed")
        seen.append(events(logger.log_dir))
    assert seen[0] == seen[1]


def test_curves_in_one_diagram_and_what_is_no_number(real, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"both": {"train": 1.0, "val": 2.0}, "a": 3.0}, 0)
    logger.save()
    assert events(logger.log_dir)[0] == {"a": [(0, 3.0)]}
    assert {path.name for path in (tmp_path / "lightning_logs/version_0").iterdir()} >= {
        "both_train",
        "both_val",
    }
    logger.log_metrics({"a": "high"}, 1)
    with pytest.raises(UserError, match="a metric is a number"):
        logger.save()
    with pytest.raises(UserError, match="example_input_array"):
        TensorBoardLogger(tmp_path, log_graph=True).log_graph(torch.nn.Linear(1, 1))


def test_rows_wait_in_memory_but_not_for_ever(real, tmp_path, monkeypatch):
    logger, written = TensorBoardLogger(tmp_path), []
    monkeypatch.setattr(
        logger, "_write", lambda: written.append(len(logger._rows)) or logger._rows.clear()
    )
    for step in range(250):
        logger.log_metrics({"a": step}, step)
    assert written == [100, 100]
    monkeypatch.setattr(tensorboard_logger, "MAX_SECONDS_IN_MEMORY", -1.0)
    logger.log_metrics({"a": 1}, 251)
    assert written == [100, 100, 51]


def test_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"a": 1}, 0)
    with pytest.raises(UserError, match="pip install tensorboard"):
        logger.save()


def test_loggers_can_be_pickled(tmp_path):
    for logger in (CSVLogger(tmp_path), TensorBoardLogger(tmp_path)):
        assert pickle.loads(pickle.dumps(logger)).log_dir == logger.log_dir


def test_a_logger_of_ones_own():
    class Mine(Logger):
        def log_metrics(self, metrics, step=None):
            self.last = metrics

    logger = Mine()
    logger.log_metrics({"a": 1}, 0)
    logger.finalize("success")
    assert (
        logger.last == {"a": 1}
        and logger.name is logger.version is logger.save_dir is logger.log_dir is None
    )


def test_lightnings_trainer_takes_our_loggers(real, tmp_path):
    """The same run under its Trainer, once with its CSV logger and once with ours."""
    for kind, who in (("a", real.loggers.CSVLogger), ("b", CSVLogger)):
        quiet = {
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "accelerator": "cpu",
        }
        trainer = real.Trainer(
            logger=who(tmp_path / kind), max_epochs=2, log_every_n_steps=2, **quiet
        )
        data = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2
        )
        trainer.fit(lightnings.model((0.5, 0.5, 0.25)), data, data)
    names = sorted(
        str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*.ckpt")
    )
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert names == ["lightning_logs/version_0/checkpoints/epoch=1-step=8.ckpt"]


def test_when_rows_reach_the_file(real, tmp_path, monkeypatch):
    path, logger = (
        tmp_path / "lightning_logs/version_0/metrics.csv",
        CSVLogger(tmp_path, flush_logs_every_n_steps=3),
    )
    for step in range(3):
        assert not path.exists()
        logger.log_metrics({"a": 1}, step)
    assert path.exists()
    monkeypatch.setattr(tensorboard_logger.time, "time", lambda: 1000.0)
    board = TensorBoardLogger(tmp_path, version=0)
    board.log_metrics({"a": 1}, 0)
    (tmp_path / "lightning_logs/version_0/hparams.yaml").write_text("mine: 1\n")
    monkeypatch.undo()
    board.finalize("success")
    assert (tmp_path / "lightning_logs/version_0/hparams.yaml").read_text() == "mine: 1\n", (
        "once written it stays"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(board.log_dir).Reload()
    assert [event.wall_time for event in read.Scalars("a")] == [1000.0], (
        "the time of the step, not of the writing"
    )
