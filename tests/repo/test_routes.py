"""The table of all routes has the notebooks' results and the simulation's times."""

import re
import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import routes

pytestmark = pytest.mark.slow


def rows() -> dict[str, str]:
    lines = [
        line for line in routes.PAGE.read_text().splitlines() if re.match(r"\| \d\d ", line)
    ]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def test_every_script_is_a_route_and_every_route_has_a_row():
    assert sorted(stem for _, stem, _ in routes.ROUTES.values()) == sorted(
        p.stem for p in (ROOT / "scripts").glob("*.py") if p.stem not in routes.NO_ROUTES
    )
    assert list(rows()) == list(routes.ROUTES)


def test_a_row_of_a_script_of_plain_torch_is_what_a_run_gives():
    """Of one of them; all have the same curve (tests/lessons/test_same_curve.py)."""
    assert rows()["01 one GPU"].startswith(
        routes.trained_line("01 one GPU", "PT_CNN_SingleGPU")
    )


def test_all_routes_agree():
    assert len({tuple(row.split(" | ")[2:4]) for row in rows().values()}) == 1
    proofs = [row.split(" | ")[4] for row in rows().values()]
    assert proofs == ["the reference"] + ["proof holds"] * (len(proofs) - 1)


def test_all_routes_of_the_gpt_agree():
    rows = [row.removeprefix("| ").split(" | ") for row in routes.stored_gpt_rows()]
    assert [row[0] for row in rows] == list(routes.GPT_ROUTES)
    losses = [float(row[2]) for row in rows]
    assert max(losses) - min(losses) < 2e-4
    used = {ROOT / words.split()[0] for _, words in routes.GPT_ROUTES.values()}
    assert used >= {*(ROOT / "scripts").glob("PT_GPT_*.py")}


def test_the_page_is_what_the_command_writes():
    """Except for the measured column, which is kept; simulated times are equal everywhere."""
    assert routes.page(0) == routes.PAGE.read_text()
