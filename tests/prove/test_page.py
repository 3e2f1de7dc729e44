"""The outputs on lessons/prove.md are those of its commands."""

import re
import shlex

import pytest
from commands import ROOT

from multigpu import prove

PAGE = (ROOT / "lessons" / "prove.md").read_text()
EXAMPLES = re.findall(r"```\n\$ multigpu prove (.*)\n((?:.*\n)+?)```", PAGE)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "output"), EXAMPLES, ids=["holds", "fails", "unknown"])
def test_an_example_prints_what_the_page_shows(
    in_forks, monkeypatch, tmp_path, command, output
):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    words[1:1] = ["--standalone", "--local-addr=127.0.0.1"]
    words = [str(tmp_path / "w.pt") if word.startswith("/tmp") else word for word in words]
    proof = prove.run(words, timeout=100)
    assert _without_rounding(str(proof)) == _without_rounding(output.strip())


def _without_rounding(text: str) -> str:
    """How far two runs are apart depends on the machine's kernels."""
    return re.sub(r"\de[-+]\d\d|\d\.\de[-+]\d\d", "…", text)


def test_there_is_an_example_of_each_verdict():
    endings = [output.strip().splitlines()[-1] for _, output in EXAMPLES]
    assert endings[0].endswith(": holds") and endings[1].endswith(": fails")
    assert "nothing can be said" in endings[2] and len(endings) == 3
