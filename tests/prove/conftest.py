"""Fixtures of the tests of `multigpu prove`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from wrong_cases import TORCHRUN

from multigpu import prove


@pytest.fixture
def proved(
    in_forks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., prove.Proof]:
    """Writes a program and proves it under torchrun; `ranks` is the number of ranks."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *flags: str, ranks: int = 2, **options: object) -> prove.Proof:
        (tmp_path / "program.py").write_text(text)
        words = [*TORCHRUN, f"--nproc-per-node={ranks}", "program.py", *flags]
        return prove.run(words, **{"timeout": 60, **options})

    return run
