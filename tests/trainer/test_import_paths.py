"""Lightning's import paths work with this library's name, or name what does the same."""

import importlib

import lightnings
import pytest

from multigpu.errors import UserError
from multigpu.trainer.lightning_paths import TABLE, UNSUPPORTED


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
    with pytest.raises(UserError, match="does not support Anything"):
        _ = module.Anything
