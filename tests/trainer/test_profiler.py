"""The profilers: what they count, their table, and their files, compared with Lightning's."""

import lightnings
import pytest
from numbered_rows import Rows, changed, trainer
from torch.utils.data import DataLoader

from multigpu.errors import UserError
from multigpu.trainer.profiler import PassThroughProfiler, SimpleProfiler


def table(text):
    """The title, and the cells of each row."""
    lines = text.splitlines()
    rows = [line.split("|")[1:-1] for line in lines if "|" in line]
    return lines[0], [[cell.strip() for cell in row] for row in rows]


# ---- SimpleProfiler -------------------------------------------------------------------------


def test_the_profilers_table(capsys):
    profiler = SimpleProfiler()
    profiler.setup("fit", 0)
    for _ in range(3):
        with profiler.profile("short"):
            pass
    with pytest.raises(ZeroDivisionError), profiler.profile("fails"):
        raise ZeroDivisionError
    assert len(profiler.recorded_durations["short"]) == 3
    assert min(profiler.recorded_durations["short"]) > 0
    profiler.recorded_durations["long"] = [20.0, 30.0]
    profiler.start_time -= 100
    profiler.describe()
    title, rows = table(capsys.readouterr().out)
    assert title == "FIT Profiler Report"
    assert rows[0] == [
        "Action",
        "Mean duration (s)",
        "Num calls",
        "Total time (s)",
        "Percentage %",
    ]
    assert rows[1][:3] == ["Total", "-", "6"]
    assert rows[1][4] == "100 %"
    assert rows[2][:4] == ["long", "25", "2", "50"]
    assert 49 < float(rows[2][4]) <= 50
    assert {row[0]: row[2] for row in rows[3:]} == {"short": "3", "fails": "1"}


def test_the_short_table_has_means_and_totals_only():
    profiler = SimpleProfiler(extended=False)
    profiler.recorded_durations = {"a": [0.25, 0.75]}
    _, rows = table(profiler.summary())
    assert rows == [["Action", "Mean duration (s)", "Total time (s)"], ["a", "0.5", "1"]]


def test_a_profiler_without_actions():
    assert "no action" in SimpleProfiler().summary()


@pytest.fixture(scope="module")
def lightning():
    return lightnings.package().pytorch


def test_a_profilers_file_is_named_as_lightnings(lightning, tmp_path):
    for folder, cls in (("a", lightning.profilers.SimpleProfiler), ("b", SimpleProfiler)):
        profiler = cls(dirpath=tmp_path / folder, filename="a b:c")
        profiler.setup("fit", local_rank=1)
        with profiler.profile("x"):
            pass
        profiler.describe()
    expected = [path.name.replace(" ", "_") for path in (tmp_path / "a").iterdir()]
    assert [path.name for path in (tmp_path / "b").iterdir()] == expected


def test_a_profiler_used_wrongly():
    profiler = SimpleProfiler()
    profiler.start("a")
    with pytest.raises(UserError, match="'a' has started already"):
        profiler.start("a")
    with pytest.raises(UserError, match="'b' has not started"):
        profiler.stop("b")


# ---- PassThroughProfiler --------------------------------------------------------------------


def test_the_pass_through_profiler_does_nothing(capsys):
    profiler = PassThroughProfiler()
    with profiler.profile("a"), profiler.profile("a"):
        profiler.start("b")
    profiler.describe()
    profiler.teardown("fit")
    assert profiler.summary() == ""
    assert capsys.readouterr().out == ""


# ---- in a run -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_the_simple_profiler_prints_a_table(tmp_path, capsys):
    net = changed(on_train_batch_end=lambda self, *_: None)
    trainer(tmp_path, profiler="simple").fit(net, DataLoader(Rows(10), 2))
    reported = capsys.readouterr().out
    assert "on_train_batch_end" in reported and "training_step" in reported
