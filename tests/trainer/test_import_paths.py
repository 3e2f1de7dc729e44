"""Lightning's import paths work with this library's name, or name what does the same."""

import importlib
from functools import reduce

import lightnings
import pytest

import multigpu.trainer as L
from multigpu.errors import UserError
from multigpu.trainer.lightning_paths import OLD, TABLE, UNSUPPORTED


@pytest.mark.parametrize("path", TABLE)
def test_a_path_of_lightnings_has_its_names(path):
    lightnings.package()
    theirs = importlib.import_module(f"lightning.pytorch.{path}")
    this = importlib.import_module(f"multigpu.trainer.{path}")
    for names in TABLE[path].values():
        for name in names:
            assert hasattr(this, name)
            assert hasattr(theirs, name) or name in ("grad_norm", "summarize")


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_an_unsupported_path_names_the_alternative(path):
    module = importlib.import_module(f"multigpu.trainer.{path}")
    imported = module.Anything  # a program can import what it does not use
    with pytest.raises(UserError, match="does not support Anything"):
        imported(1, name="b")


@pytest.mark.parametrize("path", OLD)
def test_a_path_of_lightning_1_has_its_names(path):
    module = importlib.import_module(f"multigpu.trainer.{path}")
    assert all(hasattr(module, name) for names in OLD[path].values() for name in names)


@pytest.mark.parametrize("path", [*TABLE, *OLD, *UNSUPPORTED])
def test_a_path_is_also_an_attribute(path):
    module = importlib.import_module(f"multigpu.trainer.{path}")
    assert reduce(getattr, path.split("."), L) is module


def test_a_strategys_path_is_that_of_the_same_class():
    path = importlib.import_module("multigpu.trainer.strategies.ddp")
    assert path.DDPStrategy is L.strategies.DDPStrategy


def test_a_callback_that_is_not_here_says_what_is_also_below_its_own_path():
    path = importlib.import_module("multigpu.trainer.callbacks.progress.rich_progress")
    with pytest.raises(UserError, match="RichProgressBarTheme: leave out theme"):
        path.RichProgressBarTheme()
