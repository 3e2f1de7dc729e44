"""After a run that failed, nothing in its folder says that an earlier run's proof holds."""

import json
from pathlib import Path

import pytest
from commands import planted, run_script

from multigpu import files

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


def proof_holds(folder: Path) -> bool:
    return json.loads((folder / "metrics.json").read_text())["proof"]["holds"]


@pytest.mark.slow
def test_a_failed_run_leaves_no_results_of_an_earlier_one(tmp_path):
    pytest.importorskip("tensorflow")
    out = tmp_path / "results"
    out.mkdir()
    files.write_json(out / "metrics.json", EARLIER)
    (out / "last.pt").write_text("a checkpoint")
    script = planted(tmp_path, "TF_CNN_MultiGPU", BROKEN)
    done = run_script(script, "--out", out)
    assert done.returncode != 0 and "broken on purpose" in done.stdout, done.stdout
    assert not (out / "metrics.json").exists() and proof_holds(out / "earlier")
    assert (out / "last.pt").read_text() == "a checkpoint"
