"""Measure a script's steps over a slow link."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from multigpu import slow_link
from multigpu.errors import UserError


def measure_link(
    rows: dict[str, dict],
    script: str,
    names: Sequence[str],
    flags: Sequence[object],
    megabits: float,
) -> None:
    """Add `link_seconds_measured` to the rows of `names`: seconds per step of `script`.

    The two ranks run in two network namespaces, which a link of `megabits` Mbit/s joins.
    Raises UserError if the link cannot be made, if there is nothing to measure, or if a rank
    fails.
    """
    if not names:
        raise UserError(
            "--measure-link: none of these strategies has ranks that a launcher starts, "
            "as ddp has."
        )
    if rows[names[0]]["ranks"] != 2:
        raise UserError(
            f"--measure-link: the link joins two ranks, but there are "
            f"{rows[names[0]]['ranks']}: give --ranks 2."
        )
    if why_not := slow_link.unavailable_reason():
        raise UserError(
            f"--measure-link: {why_not}. Leave the flag out: the times are then predicted."
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, "--strategy", *names, *map(str, flags)]
        silent = ["sh", "-c", 'exec "$@" >/dev/null', "sh"]
        failed = slow_link.run(
            [*silent, *command, "--out", folder],
            megabits,
            OMP_NUM_THREADS="1",
            TORCH_CPP_LOG_LEVEL="ERROR",
        )
        if failed:
            raise UserError("a rank on the slow link has failed: see its message above.")
        results = json.loads((Path(folder) / "metrics.json").read_text())["strategies"]
    for name in names:
        rows[name]["link_seconds_measured"] = results[name]["seconds"]
