"""A pytest plugin: tests that import Lightning's public names get this library's.

PEER_LIBRARY    "multigpu" replaces the names; "lightning" leaves them, to try a test there
PEER_OUTCOMES   the folder for the outcomes, one JSON line a test; see outcomes.Outcome
"""

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from own_words import OwnWords

# Lightning's module → this library's module, and the names (default: Lightning's __all__).
NAMES: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "lightning.pytorch": ("multigpu.trainer", None),
    "lightning.pytorch.accelerators": (
        "multigpu.strategies.accelerators",
        ("CPUAccelerator", "CUDAAccelerator"),
    ),
    "lightning.pytorch.callbacks": ("multigpu.trainer.callbacks", None),
    "lightning.pytorch.callbacks.early_stopping": (
        "multigpu.trainer.callbacks.early_stopping",
        ("EarlyStopping",),
    ),
    "lightning.pytorch.cli": ("multigpu.trainer", ("LightningCLI",)),
    "lightning.pytorch.core.mixins.hparams_mixin": (
        "multigpu.trainer.hyperparameters",
        ("HyperparametersMixin",),
    ),
    "lightning.pytorch.core.optimizer": (
        "multigpu.trainer.step",
        ("LightningOptimizer",),
    ),
    "lightning.pytorch.loggers": ("multigpu.trainer.loggers", None),
    "lightning.pytorch.loggers.logger": (
        "multigpu.trainer.loggers.logger",
        ("DummyLogger",),
    ),
    "lightning.pytorch.profilers": (
        "multigpu.trainer",
        ("AdvancedProfiler", "PyTorchProfiler", "SimpleProfiler"),
    ),
    "lightning.pytorch.strategies": ("multigpu.strategies", None),
    "lightning.pytorch.tuner": ("multigpu.trainer", ("Tuner",)),
    "lightning.pytorch.utilities": (
        "multigpu.trainer.utilities",
        ("AttributeDict", "CombinedLoader", "rank_zero_info", "rank_zero_only"),
    ),
    "lightning.pytorch.utilities.grads": ("multigpu.trainer.utilities", ("grad_norm",)),
    "lightning.pytorch.utilities.types": (
        "multigpu.trainer.optimizers",
        ("LRSchedulerConfig",),
    ),
}
# Modules whose classes derive from replaced ones: they are imported again.
DERIVED = ("lightning.pytorch.demos.boring_classes",)


def replace_names() -> None:
    """Bind this library's classes and functions wherever Lightning binds its own."""
    for place in NAMES:
        importlib.import_module(place)
    for place, (own, names) in NAMES.items():
        theirs = sys.modules[place]
        for name in names or theirs.__all__:
            real = getattr(theirs, name, None)
            if real is not None and not isinstance(real, ModuleType):
                _bind_everywhere(real, _own(own, name, real))
    for place in DERIVED:
        importlib.reload(importlib.import_module(place))


def share_machine() -> None:
    """Let this library see the number of cores that tests give to Lightning."""
    from lightning.fabric.utilities import data

    from multigpu import devices

    devices.available_cores = lambda: data._num_cpus_available()


def _own(module: str, name: str, real: Any) -> Any:
    """This library's `name`; a class that raises its error, if it has none."""
    from multigpu.errors import UserError

    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError, UserError) as error:
        if not isinstance(real, type):
            return real
        missing = f"MISSING {name}: {error}"

    def refuse(self: object, *args: Any, **keywords: Any) -> None:
        raise AssertionError(missing)

    return type(name, (), {"__init__": refuse})


def _bind_everywhere(real: Any, own: Any) -> None:
    for name, module in list(sys.modules.items()):
        if module is not None and name.startswith("lightning.pytorch"):
            for key in [key for key, value in vars(module).items() if value is real]:
                setattr(module, key, own)


LIBRARY = os.environ["PEER_LIBRARY"]
WORDS = OwnWords()
if LIBRARY == "multigpu":
    replace_names()
    share_machine()
    WORDS.install()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """A KeyboardInterrupt or SystemExit that leaves a test fails it, and not the whole run."""
    WORDS.used = False
    try:
        return (yield)
    except (KeyboardInterrupt, SystemExit) as error:
        raise AssertionError(f"{type(error).__name__} left the test") from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """Append the test's outcome to this worker's file."""
    report = yield
    if report.when != "call" and report.passed:
        return report
    outcome = {"test": item.nodeid, "result": report.outcome}
    if report.passed:
        outcome["other_words"] = WORDS.used
    if report.failed and call.excinfo is not None:
        value = call.excinfo.value
        outcome["error"] = f"{type(value).__name__}: {value}"[:600]
        lines = [entry for entry in call.excinfo.traceback if entry.path == item.path]
        outcome["line"] = " ".join(str(lines[-1].statement).split()) if lines else ""
    _write(outcome)
    return report


@pytest.hookimpl
def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported counts as one failed test."""
    if report.failed and os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        error = str(report.longrepr)[-600:]
        _write({"test": report.nodeid, "result": "failed", "error": error})


def _write(outcome: dict[str, Any]) -> None:
    folder = Path(os.environ["PEER_OUTCOMES"])
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(outcome) + "\n")
