"""Does the profiler count, and does yaml.safe_load read what is written without a YAML library?"""

import os
from argparse import Namespace
from dataclasses import dataclass
from enum import Enum

import lightnings
import pytest
import torch
import yaml

from multigpu.errors import UserError
from multigpu.trainer.profiler import PassThroughProfiler, SimpleProfiler
from multigpu.trainer.yaml_text import yaml_text


@pytest.fixture(scope="module")
def real():
    return lightnings.package().pytorch


def test_the_profilers_table(real, capsys):
    profiler = SimpleProfiler()
    profiler.setup("fit", 0)
    for _ in range(3):
        with profiler.profile("short"):
            pass
    with pytest.raises(ZeroDivisionError), profiler.profile("fails"):
        raise ZeroDivisionError
    profiler.totals["long"] = [2, 50.0]
    profiler.start_time -= 100
    profiler.describe()
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["FIT Profiler Report"]
    cells = [[cell.strip() for cell in line[1:-1]] for line in lines if len(line) > 1]
    assert cells[0] == [
        "Action",
        "Mean duration (s)",
        "Num calls",
        "Total time (s)",
        "Percentage %",
    ]
    assert cells[1][:3] == ["Total", "-", "6"] and cells[1][4] == "100 %"
    assert cells[2][:4] == ["long", "25", "2", "50"] and 49 < float(cells[2][4]) <= 50
    assert {row[0]: row[2] for row in cells[3:]} == {"short": "3", "fails": "1"}
    short = SimpleProfiler(extended=False)
    short.totals = {"a": [2, 1.0]}
    assert (
        "| a      | 0.5               | 1" in short.summary()
        and "calls" not in short.summary()
    )
    assert "no action" in SimpleProfiler().summary()


def test_a_profilers_file_is_named_as_lightnings(real, tmp_path):
    for kind, who in (("a", real.profilers.SimpleProfiler), ("b", SimpleProfiler)):
        profiler = who(dirpath=tmp_path / kind, filename="a b:c")
        profiler.setup("fit", local_rank=1)
        with profiler.profile("x"):
            pass
        profiler.describe()
    assert [p.name.replace(" ", "_") for p in (tmp_path / "a").iterdir()] == [
        p.name for p in (tmp_path / "b").iterdir()
    ]


def test_a_profiler_used_wrongly():
    profiler = SimpleProfiler()
    profiler.start("a")
    with pytest.raises(UserError, match="has started already"):
        profiler.start("a")
    with pytest.raises(UserError, match="has not started"):
        profiler.stop("b")


def test_no_profiler_does_nothing(capsys):
    profiler = PassThroughProfiler()
    with profiler.profile("a"), profiler.profile("a"):
        profiler.start("b")
    profiler.describe()
    profiler.teardown("fit")
    assert profiler.summary() == capsys.readouterr().out == ""


class Colour(Enum):
    RED = 1


@dataclass
class Point:
    x: int = 1


TEXTS = [
    *(
        "plain",
        "with space",
        "",
        "yes",
        "No",
        "null",
        "1",
        "1e5",
        ".5",
        "a: b",
        "- a",
        "#x",
        "'q'",
        'say "x"',
        "a\\b",
    ),
    *(
        "two\nlines",
        "tab\t",
        "\x7f\x85\u2028",
        "äöü €",
        "\U0001f600",
        "\ud800",
        "~",
        "a#b",
        "{a}",
        "on",
        "Y",
        "2020-01-01",
    ),
    *(
        "0x1F",
        "1_000",
        "=",
        "<<",
        "!tag",
        "&a",
        "*a",
        "@x",
        "%d",
        "|",
        ">",
        "?",
        "true ",
        "a\ufeffb",
    ),
]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_texts_come_back_from_yaml(text):
    assert yaml.safe_load(yaml_text({"a": text, text: [text, {text: 1}]})) == {
        "a": text,
        text: [text, {text: 1}],
    }


NUMBERS = [
    0,
    -3,
    10**30,
    True,
    False,
    None,
    0.1,
    1e-5,
    -1e-5,
    1e22,
    1.5e300,
    123456.0,
    float("inf"),
    -float("inf"),
]


def test_numbers_come_back_from_yaml():
    values = {f"n{i}": value for i, value in enumerate(NUMBERS)}
    back = yaml.safe_load(yaml_text(values))
    assert {k: (type(v), v) for k, v in back.items()} == {
        k: (type(v), v) for k, v in values.items()
    }
    assert str(yaml.safe_load(yaml_text({"a": float("nan")}))["a"]) == "nan"


def test_other_things_become_what_yaml_can_say():
    values = {
        "t": (1, 2),
        "e": Colour.RED,
        "n": Namespace(a=1),
        "d": Point(),
        "x": torch.tensor(2.5),
        3: {"k": {4}},
    }
    values |= {"p": os.path, "f": torch.ones(1).numpy()[0], "c": Point}
    back = yaml.safe_load(yaml_text(values))
    assert (
        back["t"] == [1, 2]
        and back["e"] == "RED"
        and back["n"] == {"a": 1}
        and back["d"] == {"x": 1}
    )
    assert (
        back["x"] == 2.5 and back["f"] == 1.0 and back["3" if "3" in back else 3] == {"k": [4]}
    )
    assert (
        "module" in back["p"] and "Point" in back["c"] and yaml.safe_load(yaml_text({})) == {}
    )
