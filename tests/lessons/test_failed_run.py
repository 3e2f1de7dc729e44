"""After a run that failed, nothing in its folder says that an earlier run's proof holds."""

import re
from pathlib import Path

import pytest
from commands import ROOT, planted, run_script

from multigpu import files, metrics
from multigpu.errors import UserError

EARLIER = {
    "devices": 2,
    "device": "cpu",
    "loss": 0.04,
    "test_accuracy": 0.99,
    "proof": {"holds": True},
}
# The script fails while it reads the data, after the processes have started.
BROKEN = """
def broken(*arguments, **keywords):
    raise ValueError("broken on purpose")

lesson.data.load = broken
"""


def is_refused(folder: Path) -> bool:
    try:
        metrics.route_row("a route", folder)
    except UserError as error:
        return "no finished run" in str(error)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("stem", "flags"), [("TF_CNN_MultiGPU", ())], ids=["TensorFlow"])
def test_a_failed_run_leaves_no_results_of_an_earlier_one(tmp_path, stem, flags):
    if stem.startswith("TF"):
        pytest.importorskip("tensorflow")
    out = tmp_path / "results"
    out.mkdir()
    files.write_json(out / "metrics.json", EARLIER)
    (out / "last.pt").write_text("a checkpoint")
    assert "proof holds" in metrics.route_row("a route", out)
    script = planted(tmp_path, stem, BROKEN)
    done = run_script(script, *flags, "--out", out)
    assert done.returncode != 0 and "broken on purpose" in done.stdout, done.stdout
    assert is_refused(out)
    assert "proof holds" in metrics.route_row("a route", out / "earlier")
    assert (out / "last.pt").read_text() == "a checkpoint"


WITH_LIBRARY = [
    path
    for path in sorted((ROOT / "scripts").glob("*.py"))
    if re.search(r"^(from|import) multigpu", path.read_text(), re.MULTILINE)
    and "\n# %%" in path.read_text()
]


@pytest.mark.parametrize("path", WITH_LIBRARY, ids=lambda path: path.stem)
def test_every_script_begins_by_launch_start_which_sets_results_aside(path: Path):
    assert re.search(r'if __name__ == "__main__":\n    launch\.start\(', path.read_text())
