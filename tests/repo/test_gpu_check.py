"""gpu-check without a GPU: its whole code runs, and what it finds is kept and not mistaken."""

import argparse
import importlib
import inspect
import json
import signal
import subprocess
import sys
import time
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import warm
from commands import ROOT, clean_environment, run_script

GPU_CHECK = ROOT / "benchmarks" / "gpu_check.py"
REPORTS = ROOT / "benchmarks" / "gpu"
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """Make gpu_check.py and its sections importable, without leaving their modules behind."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu_sections"))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.long
@pytest.mark.slow
def test_a_rehearsal_runs_every_section_and_is_no_gpus_report(tmp_path):
    reports = sorted(REPORTS.glob("*"))
    done = run_script(GPU_CHECK, "--device", "cpu", "--quick", "--out", tmp_path)
    report = json.loads((tmp_path / "rehearsal-cpu.json").read_text())
    failed = {
        name: (section["status"], section["failed"], section.get("log"))
        for name, section in report["sections"].items()
        if section["status"] != "done" or section["failed"]
    }
    assert not failed, done.stdout
    assert done.returncode == 0, done.stdout
    names = {plan.name for plan in importlib.import_module("gpu_check").PLANS}
    # The allocator is the GPU's: that section is skipped.
    with_rows = {name for name, section in report["sections"].items() if section["rows"]}
    assert with_rows == names - {"allocator"}
    for name in ("steps", "sweep", "launches", "memory"):
        rows = report["sections"][name]["rows"]
        assert all(row["simulated"] for row in rows), name
    assert report["rehearsal"] and report["gpu"] is None and report["complete"]
    assert "rehearsal" in (tmp_path / "rehearsal-cpu.md").read_text().splitlines()[0].lower()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rehearsal-cpu.json",
        "rehearsal-cpu.md",
    ]
    assert sorted(REPORTS.glob("*")) == reports


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path):
    done = run_script(GPU_CHECK, "--out", tmp_path)
    assert done.returncode == 1
    assert len(done.stdout.strip().splitlines()) == 1
    assert "no NVIDIA GPU" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags", [["--device", "cpu"], ["--device", "cpu", "--quick", "--out", str(REPORTS)]]
)
def test_a_rehearsal_is_asked_for_and_goes_elsewhere(flags):
    with pytest.raises(SystemExit):
        importlib.import_module("gpu_check").parse(flags)


# ---- sections that end badly ---------------------------------------------------------------

FOUND = '{"rows": [{"case": "first", "ok": true}], "skipped": [], "failed": [], "notes": []}'
WRITE = f"import sys; open(sys.argv[sys.argv.index('--out') + 1], 'w').write('{FOUND}')\n"
# It is in a process group of its own, as the ranks of a lesson's script are.
GRANDCHILD = """
import subprocess
child = subprocess.Popen(["sleep", "1000"], process_group=0)
open(__file__ + ".child", "w").write(str(child.pid))
child.wait()
"""
ENDS = {
    "good": WRITE,
    "crash": WRITE + "import os; os.abort()\n",
    "raises": "raise ValueError('a typing error')\n",
    "hang": WRITE + GRANDCHILD,
    "last": WRITE,
}


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """gpu_check with the sections of ENDS, on a GPU that a test invents."""
    gpu_check = importlib.import_module("gpu_check")
    for name, text in ENDS.items():
        (tmp_path / f"{name}.py").write_text(text)
    plans = tuple(gpu_check.Plan(name, name, 2 if name == "hang" else 60) for name in ENDS)
    monkeypatch.setattr(gpu_check, "PLANS", plans)
    monkeypatch.setattr(gpu_check, "SECTIONS_FOLDER", tmp_path)
    card = {"name": "NVIDIA Test/1", "facts": {}, "source": "a test"}
    monkeypatch.setattr(gpu_check, "find_card", lambda *args: card)
    return gpu_check


def arguments(out, names=tuple(ENDS)) -> argparse.Namespace:
    return argparse.Namespace(
        device="cuda", quick=False, rehearsal=False, only=list(names), out=out
    )


def test_a_stopped_run_keeps_what_it_found_and_the_earlier_report(planned, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "NVIDIA-Test-1.json").write_text("of an earlier run")

    def stop(number, frame):
        raise planned.Stopped(number)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.5)
        with pytest.raises(planned.Stopped):
            planned.run_all(arguments(out, ("good", "hang")), tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (out / "NVIDIA-Test-1.json").read_text() == "of an earlier run"
    report = json.loads((out / "NVIDIA-Test-1.partial.json").read_text())
    assert not report["complete"]
    assert report["sections"]["good"]["status"] == "done"


def test_a_signal_ends_all_processes(tmp_path):
    process = subprocess.Popen(
        [warm.python(), GPU_CHECK, "--device", "cpu", "--quick", "--out", tmp_path],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    partial = tmp_path / "rehearsal-cpu.partial.json"
    while not partial.exists() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert not json.loads(partial.read_text())["complete"]


# ---- parts that a rehearsal does not reach -------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """A torch.cuda whose calls take no time and whose events are a second apart."""
    ticks = count()

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.time = next(ticks)

        def elapsed_time(self, later: "Event") -> float:
            return 1e3 * (later.time - self.time)

    slept = []
    properties = SimpleNamespace(clock_rate=1_000_000)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    return slept


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_lessons_accept_the_flags(gpus, monkeypatch):
    lessons = importlib.import_module("lessons")
    seen = set()
    for run in lessons.runs(gpus):
        words = [str(word) for word in lessons.command(run, ROOT, quick=True)]
        script = next(i for i, word in enumerate(words) if word.endswith(f"{run.stem}.py"))
        monkeypatch.syspath_prepend(str(ROOT / run.folder))
        module = importlib.import_module(run.stem)
        flags = words[script + 1 :]
        if hasattr(module, "parse"):
            module.parse(flags)
        else:
            # A lesson's program by hand passes other flags on to the script.
            parts = [module, *filter(None, [getattr(module, "script", None)])]
            text = "".join(map(inspect.getsource, parts))
            for flag in (flag for flag in flags if flag.startswith("--")):
                # A flag by its name, or by that of its value in a dict of defaults.
                assert f'"{flag}"' in text or f"{flag[2:].replace('-', '_')}=" in text
        seen.add(run.stem)
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert {stem[:3] for stem in scripts - seen} == {lessons.TENSORFLOW}


def properties(name: str, **more: object) -> SimpleNamespace:
    values = {
        "name": name,
        "total_memory": 150_000_000_000,
        "multi_processor_count": 132,
        "clock_rate": 1_980_000,
        "memory_clock_rate": 3_201_000,
        "memory_bus_width": 6144,
        "major": 9,
        "minor": 0,
    }
    return SimpleNamespace(**values | more)


def test_a_card_is_simulated_by_a_preset_a_sheet_or_an_estimate():
    card = importlib.import_module("card")
    gpu, preset, source = card.simulated(properties("NVIDIA A100-SXM4-80GB"))
    assert (gpu.fp16, gpu.memory, preset) == (312e12, 150_000_000_000, "A100-80GB")
    assert "preset" in source
    assert card.simulated(properties("NVIDIA A10G"))[1] == "A10G"
    gpu, _, source = card.simulated(properties("NVIDIA H100 PCIe"))
    assert (gpu.name, gpu.bandwidth, gpu.fp16) == ("NVIDIA H100 PCIe", 2e12, 756.5e12)
    assert "data sheet" in source
    gpu, preset, _ = card.simulated(properties("NVIDIA H200"))
    assert preset == "H200"
    for name in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 NVL", "NVIDIA GH200", "a new one"):
        assert "estimate" in card.simulated(properties(name))[2]
    # H200's own figures from its units and clocks: the data sheet's, to 15%.
    estimate, _ = card.estimated(properties("NVIDIA H200"))
    for field in ("bandwidth", "fp32", "tf32", "fp16"):
        assert getattr(estimate, field) == pytest.approx(getattr(gpu, field), rel=0.15), field


# ---- what the lessons need -----------------------------------------------------------------

BLOCKED = """
import runpy, sys
for name in list(sys.modules):
    if name.partition(".")[0] in ("multigpu", "cloudpickle", "tqdm", "yaml", "typer", "rich"):
        del sys.modules[name]
for name in ("tqdm", "yaml", "typer", "rich", "tensorboard", "submitit", "IPython"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, {scripts!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["PTL_multiGPU", "PTL_Strategies"])
def test_lessons_need_torch_scikit_learn_and_matplotlib_alone(stem, tmp_path):
    """No tqdm, typer, rich, PyYAML or tensorboard: not on a machine with a GPU for minutes."""
    program = BLOCKED.format(scripts=str(ROOT / "scripts"))
    path = ROOT / "scripts" / f"{stem}.py"
    flags = [] if stem != "PTL_Strategies" else ["--strategy", "dp"]
    done = run_script("-c", program, path, "--epochs", 1, "--out", tmp_path, *flags)
    assert done.returncode == 0, done.stdout
    assert "epoch 1: loss" in done.stdout
