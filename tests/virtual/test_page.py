"""The outputs on lessons/virtual.md are those of its commands."""

import re
import shlex

import pytest
import torch
from commands import ROOT, torchrun
from virtual_runs import virtual

PAGE = (ROOT / "lessons" / "virtual.md").read_text()
# A command can have several lines: all but the last end with a backslash.
BLOCKS = re.findall(
    r"^```\n\$ multigpu virtual ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)^```$", PAGE, re.M | re.S
)


@pytest.mark.parametrize(("words", "shown"), BLOCKS, ids=lambda text: text.split()[0])
def test_an_output_is_that_of_its_command(words, shown, tmp_path):
    words = words.replace("\\\n", "").replace("/tmp/weights.pt", str(tmp_path / "weights.pt"))
    done = virtual(ROOT, *shlex.split(words), OMP_NUM_THREADS=1)
    lines = iter(line.rstrip() for line in done.stdout.splitlines())
    for line in shown.splitlines():
        # A line that is not shown can stand at each "…", and the end of a line at its "…".
        if line.endswith(" …"):
            start = line.removesuffix("…")
            assert any(found.startswith(start) for found in lines), (line, done.stdout)
        elif line != "…":
            assert line in lines, (line, done.stdout)


def test_ddp_has_the_numbers_of_two_processes_on_the_cpu(tmp_path):
    script = ROOT / "lessons" / "05-ddp-cluster" / "ddp.py"
    on_the_cpu, on_gpus = tmp_path / "cpu.pt", tmp_path / "gpus.pt"
    torchrun(2, script, on_the_cpu)
    command = ("--gpus", "2", "torchrun", "--nproc-per-node=2", script, on_gpus)
    virtual(tmp_path, *command, OMP_NUM_THREADS=1)
    expected = torch.load(on_the_cpu)
    found = torch.load(on_gpus, map_location="cpu")
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-6)
