"""hparams.yaml: yaml.safe_load and Lightning's reader read back what our loggers write."""

import datetime
import math
import os
from argparse import Namespace
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path

import lightnings
import numpy as np
import pytest
import torch
import yaml

from multigpu.trainer.loggers import CSVLogger, TensorBoardLogger


class Colour(Enum):
    RED = "#f00"


class Size(IntEnum):
    SMALL = 1


@dataclass
class Point:
    x: int = 1
    y: tuple = (2, 3)


def write(folder, params):
    """The path of the hparams.yaml with these hyperparameters."""
    logger = CSVLogger(folder)
    logger.log_hyperparams(params)
    return Path(logger.log_dir) / "hparams.yaml"


def read_back(folder, params):
    return yaml.safe_load(write(folder, params).read_text(encoding="utf-8"))


TEXTS = [
    "plain", "with space", "", "yes", "No", "null", "1", "1e5", ".5", "a: b", "- a", "#x",
    "'q'", 'say "x"', "a\\b", "two\nlines", "tab\t", "\x7f\x85\u2028", "äöü €", "\U0001f600",
    "\ud800", "~", "a#b", "{a}", "on", "Y", "2020-01-01", "0x1F", "1_000", "=", "<<", "!tag",
    "&a", "*a", "@x", "%d", "|", ">", "?", "true ", "a\ufeffb",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_texts_stay_texts(tmp_path, text):
    params = {"a": text, text: [text, {text: 1}]}
    assert read_back(tmp_path, params) == params


NUMBERS = [
    0, -3, 10**30, True, False, None, 0.1, 1e-5, -1e-5, 1e22, 1.5e300, 123456.0, math.inf,
    -math.inf,
]  # fmt: skip


def test_numbers_keep_value_and_type(tmp_path):
    params = {f"n{i}": value for i, value in enumerate(NUMBERS)}
    saved = read_back(tmp_path, params)
    assert saved == params
    assert {name: type(v) for name, v in saved.items()} == {
        name: type(v) for name, v in params.items()
    }


def test_nan_stays_nan(tmp_path):
    assert math.isnan(read_back(tmp_path, {"a": math.nan})["a"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2,)), [1, [2]]),
        ({4}, {4}),
        (frozenset([4]), {4}),
        (datetime.date(2020, 1, 2), datetime.date(2020, 1, 2)),
        (OrderedDict(b=1, a=[2]), {"b": 1, "a": [2]}),
        (defaultdict(list, a=[2]), {"a": [2]}),
        (Colour.RED, "RED"),
        ([Size.SMALL], ["SMALL"]),
        (Path("a/b"), "a/b"),
        (Namespace(a=Namespace(b=1)), {"a": {"b": 1}}),
        (Point(), {"x": 1, "y": [2, 3]}),
        (torch.tensor(2.5), 2.5),
        (torch.nn.Parameter(torch.tensor(2.5)), 2.5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        ({3: {"k": {4}}}, {3: {"k": {4}}}),
    ],
    ids=repr,
)
def test_common_objects_become_plain_values(tmp_path, value, expected):
    saved = read_back(tmp_path, {"a": value})["a"]
    assert saved == expected
    assert type(saved) is type(expected)


@pytest.mark.parametrize(
    "value", [print, os, Point, torch.ones(2), torch.nn.Linear(1, 1), [print]], ids=repr
)
def test_other_objects_are_left_out_with_a_warning(tmp_path, value):
    with pytest.warns(UserWarning, match=f"'broken'.*{type(value).__name__}"):
        assert read_back(tmp_path, {"a": 1, "broken": value}) == {"a": 1}


def test_no_hyperparameters(tmp_path):
    assert read_back(tmp_path, {}) == {}


def test_lightnings_reader_reads_equal_values(tmp_path):
    lightnings.package()
    from lightning.pytorch.core.saving import load_hparams_from_yaml

    params = {"b": (1, 2), "a": {"x": Colour.RED, 3: None}, "c": 1e-5, "d": "no", "e": {1, 2}}
    path = write(tmp_path, params)
    saved = load_hparams_from_yaml(str(path))
    assert saved == {
        "b": [1, 2],
        "a": {"x": "RED", 3: None},
        "c": 1e-5,
        "d": "no",
        "e": {1, 2},
    }
    assert saved == yaml.safe_load(path.read_text())
    assert list(saved) == sorted(params), "sorted by name, as Lightning writes"


@pytest.mark.parametrize("logger_class", [CSVLogger, TensorBoardLogger])
def test_a_subclass_can_give_the_file_another_name(tmp_path, logger_class):
    class Renamed(logger_class):
        NAME_HPARAMS_FILE = "settings.yaml"

    logger = Renamed(tmp_path)
    logger.log_hyperparams({"a": 1})
    logger.save()
    folder = Path(logger.log_dir)
    assert yaml.safe_load((folder / "settings.yaml").read_text()) == {"a": 1}
    assert not (folder / "hparams.yaml").exists()
