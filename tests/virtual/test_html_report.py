"""`multigpu virtual --report FILE.html`: its numbers are those of the trace and the meter.

tests/site/browser.py opens one in a browser.
"""

import json
import re
from html import unescape
from itertools import pairwise
from pathlib import Path

from virtual_runs import virtual, write

from multigpu.virtual import page
from multigpu.virtual.sim.event import Event
from multigpu.virtual.sim.timeline import Timeline

PROGRAM = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.ones(256, 512, device="cuda").relu()).relu().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def data_of(text: str | Path) -> dict:
    text = text.read_text() if isinstance(text, Path) else text
    return json.loads(re.search(r"^const RUN = (.*);$", text, re.M).group(1))


def test_it_has_the_events_of_the_trace_and_the_peak_of_the_meter(tmp_path):
    files = ("--report", "r.html", "--trace", "t.json", "--json", "n.json")
    done = virtual(tmp_path, "--gpus", 1, *files, write(tmp_path, PROGRAM))
    assert done.returncode == 0 and "report: r.html\n" in done.stdout, done.stdout
    run = data_of(tmp_path / "r.html")
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    traced = [row for row in rows if row["ph"] == "X"]
    assert len(run["events"]["start"]) == len(traced) > 50
    assert max(run["events"]["start"]) / 1e3 == max(round(row["ts"], 3) for row in traced)
    (gpu,) = json.loads((tmp_path / "n.json").read_text())["gpus"]
    (memory,) = run["memory"]
    totals = [sum(parts) for parts in zip(*memory["bytes"], strict=True)]
    assert max(totals) == gpu["peak_bytes"]
    weights = 4 * (512 * 512 + 512)
    most = dict(zip(run["kinds"], map(max, memory["bytes"]), strict=True))
    assert most["parameters"] == most["gradients"] == weights
    assert most["optimizer state"] >= 2 * weights and most["activations"] > 4 * 256 * 512
    # Gradients come and go in each step.
    gradients = memory["bytes"][run["kinds"].index("gradients")]
    assert sum(a > b == 0 for a, b in pairwise(gradients)) == 3
    assert {"addmm [256, 512]", "relu [256, 512]"} <= set(run["events"]["names"])
    assert [256, 512] in [row.get("args", {}).get("shape") for row in traced]
    text = (tmp_path / "r.html").read_text()
    assert "$ program.py</pre>" in text and "not as on a GPU:" in text


def test_what_a_program_names_cannot_end_the_script():
    event = Event(0, "compute", "forward", "</script><b>", 0.0, 1e-6)
    timeline = Timeline([event], ["cuda:0"], 0.0, 1e-6, "simulated")
    text = page.html("a <b> &", "text <i>", timeline, {}, {"cuda:0": 2**30})
    assert text.count("</script>") == 1 and "a &lt;b&gt; &amp;" in text
    assert data_of(text)["events"]["names"] == ["</script><b>"]


def test_a_notebook_shows_a_part_of_the_time():
    events = [Event(0, "compute", "forward", str(i), float(i), i + 0.5) for i in range(5)]
    shown = Timeline(events, ["cuda:0"], 2.0, 4.0, "simulated")._repr_html_()
    (whole,) = re.findall(r'srcdoc="([^"]*)"', shown)
    run = data_of(unescape(whole))
    assert run["events"]["names"] == ["2", "3"] and run["end"] == 2e9
    assert run["events"]["start"] == [0, 1e9]


def test_a_long_run_has_at_most_so_many_points_and_keeps_the_peak():
    lives = [(i * 1e-6, (i + 3) * 1e-6, 512 + i % 7, "activations") for i in range(20_000)]
    lives.append((5e-3, 6e-3, 2**20, "other"))
    timeline = Timeline([], ["cuda:0"], 0.0, 1.0, "simulated")
    text = page.html("", "", timeline, {"cuda:0": lives}, {"cuda:0": 2**30})
    (memory,) = data_of(text)["memory"]
    assert len(memory["times"]) <= page.MOST_POINTS
    assert max(map(sum, zip(*memory["bytes"], strict=True))) > 2**20 + 3 * 512
