"""gpu-check without a GPU: its whole code runs, and what it finds is kept and not mistaken."""

import importlib
import json
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from commands import ROOT, clean_environment, run_script

from multigpu import GPUS
from multigpu.errors import UserError

GPU_CHECK = ROOT / "benchmarks" / "gpu_check.py"
REPORTS = ROOT / "benchmarks" / "gpu"


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
    done = run_script(GPU_CHECK, "--device", "cpu", "--out", tmp_path)
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
    rows = {name: section["rows"] for name, section in report["sections"].items()}
    for row in rows["steps"]:
        assert row["error"] == row["simulated"] / row["measured"]["median"] - 1, row
    assert all(row["simulated"] for row in rows["memory"])
    assert all(row["virtual"] for row in rows["same"])
    assert [row["ok"] for row in rows["same"] if "losses" in row["case"]] == [True, True]
    assert [row["expected"] for row in rows["prove"] if row["ok"]] == [
        "holds",
        "fails: not_averaged",
    ]
    assert report["rehearsal"] and report["gpu"] is None and report["complete"]
    assert "rehearsal" in (tmp_path / "rehearsal-cpu.md").read_text().splitlines()[0].lower()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rehearsal-cpu.json",
        "rehearsal-cpu.md",
    ]
    assert sorted(REPORTS.glob("*")) == reports


@pytest.mark.slow
def test_a_virtual_gpu_in_the_gpus_place_equals_the_virtual_one(tmp_path):
    # conftest.py hides all GPUs, and so virtual ones, too.
    command = [sys.executable, "-m", "multigpu.cli", "virtual", "--gpus", "1"]
    command += ["--gpu", "H100-80GB", GPU_CHECK, "--quick", "--gpu", "H100-80GB"]
    command += ["--out", tmp_path, "--only", "steps", "memory", "allocator", "same"]
    environment = clean_environment()
    for name in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES"):
        environment.pop(name, None)
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    report = json.loads((tmp_path / "rehearsal-cuda.partial.json").read_text())
    rows = {name: section["rows"] for name, section in report["sections"].items()}
    for row in rows["memory"]:
        assert row["error"] == row["simulated"] / (row["allocated"] - row["before"]) - 1
        assert abs(row["error"]) < 0.01, row
    assert all(0 < row["error"] < 0.5 for row in rows["steps"])
    assert rows["same"] and all(row["ok"] for row in rows["same"])
    found = {row["case"]: row for row in rows["allocator"]}
    h100 = json.loads((REPORTS / "NVIDIA-H100-80GB-HBM3.json").read_text())
    cases = [row for row in h100["sections"]["allocator"]["rows"] if "bytes" in row]
    assert [found[row["case"]]["bytes"] for row in cases] == [row["bytes"] for row in cases]


def test_memory_is_compared_without_what_was_held_before(monkeypatch):
    memory = importlib.import_module("memory")
    monkeypatch.setattr(memory, "train", lambda *args: None)
    found = {"memory_allocated": 10, "max_memory_allocated": 30, "max_memory_reserved": 40}
    for name in ("empty_cache", "reset_peak_memory_stats", *found):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: found.get(name))
    rows = []
    section = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        quick=True,
        gpu=GPUS["H200"],
        item=nullcontext,
        virtual=lambda: {"cnn fp32 2": {"allocated": 25}},
        row=lambda **values: rows.append(values),
    )
    memory.real(section)
    assert (rows[0]["case"], rows[0]["error"], rows[0]["reserved"]) == ("cnn fp32 2", 0.25, 40)


def test_a_proof_with_another_verdict_than_expected_fails(monkeypatch):
    prove = importlib.import_module("prove")
    found = SimpleNamespace(verdict="holds", cause=None, line="proof: holds", tail="")
    monkeypatch.setattr(prove.session, "run", lambda command, timeout: found)
    rows = []
    section = SimpleNamespace(
        device=torch.device("cpu"),
        quick=True,
        item=nullcontext,
        row=lambda **values: rows.append((values["expected"], values["ok"])),
    )
    prove.real(section)
    assert rows == [("holds", True), ("fails: not_averaged", False)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path):
    done = run_script(GPU_CHECK, "--out", tmp_path)
    assert done.returncode == 1
    assert len(done.stdout.strip().splitlines()) == 1
    assert "no NVIDIA GPU" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags", [["--device", "cpu", "--out", str(REPORTS)], ["--quick", "--out", str(REPORTS)]]
)
def test_a_rehearsal_goes_elsewhere(flags):
    with pytest.raises(SystemExit):
        importlib.import_module("gpu_check").parse(flags)


# ---- sections that end badly ---------------------------------------------------------------

FOUND = '{"rows": [{"case": "first", "ok": true}], "units": {"case": "", "ok": ""}}'
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
    monkeypatch.setattr(gpu_check, "SECTIONS", tmp_path)
    card = {"name": "NVIDIA Test/1", "facts": {}, "gpu": "H200"}
    monkeypatch.setattr(gpu_check.Run, "find_card", lambda run: card)
    return gpu_check


def planned_run(gpu_check, tmp_path, *names: str):
    """A run of these sections, whose report is in tmp_path/out."""
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    return gpu_check.Run(gpu_check.parse(["--out", str(out), "--only", *names]), tmp_path)


def test_a_section_that_ends_badly_keeps_its_rows_and_the_next_ones_run(planned, tmp_path):
    assert planned_run(planned, tmp_path, *ENDS).all() == 1
    report = json.loads((tmp_path / "out" / "NVIDIA-Test-1.json").read_text())
    found = {
        name: (len(section["rows"]), section["status"])
        for name, section in report["sections"].items()
    }
    assert found == {
        "good": (1, "done"),
        "crash": (1, f"ended with exit code {-signal.SIGABRT}"),
        "raises": (0, "ended with exit code 1"),
        "hang": (1, "was stopped at its time limit of 2 s"),
        "last": (1, "done"),
    }
    page = (tmp_path / "out" / "NVIDIA-Test-1.md").read_text()
    assert "ValueError: a typing error" in page and "| first | holds |" in page
    child = int((tmp_path / "hang.py.child").read_text())
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


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
            planned_run(planned, tmp_path, "good", "hang").all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (out / "NVIDIA-Test-1.json").read_text() == "of an earlier run"
    report = json.loads((out / "NVIDIA-Test-1.partial.json").read_text())
    assert not report["complete"]
    assert report["sections"]["good"]["status"] == "done"


def test_a_signal_ends_all_processes(tmp_path):
    process = subprocess.Popen(
        [warm.python(), GPU_CHECK, "--device", "cpu", "--out", tmp_path],
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_lessons_accept_the_flags(ranks, monkeypatch):
    lessons = importlib.import_module("lessons")
    for _, text in lessons.RUNS:
        words = lessons.command(text, ranks)
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        module, flags = importlib.import_module(Path(words[script]).stem), words[script + 1 :]
        if hasattr(module, "parse"):
            module.parse(flags)
        else:
            source = Path(words[script]).read_text()
            assert all(f'"{flag}"' in source for flag in flags if flag.startswith("--")), text
    seen = {Path(text.split()[1]).stem for _, text in lessons.RUNS}
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert {stem[:3] for stem in scripts - seen} == {"TF_"}


def test_a_card_is_simulated_by_its_preset_or_by_one_that_is_given():
    card = importlib.import_module("card")
    known = {
        "NVIDIA A100-SXM4-80GB": "A100-80GB",
        "NVIDIA A100-PCIE-40GB": None,
        "Tesla V100-SXM2-16GB": "V100-16GB",
        "NVIDIA H100 80GB HBM3": "H100-80GB",
        "NVIDIA A10G": "A10G",
        "NVIDIA GeForce RTX 4090": "RTX4090",
        "NVIDIA GeForce RTX 4090 D": None,
        "NVIDIA H200": "H200",
        "NVIDIA H200 MIG 1g.18gb": None,
        "NVIDIA GH200 480GB": None,
    }
    for name, preset in known.items():
        if preset:
            assert card.preset_of(name) == preset
        else:
            with pytest.raises(UserError, match="--gpu"):
                card.preset_of(name)
    assert card.simulated("H200", 123).memory == 123


def test_other_answers_of_a_virtual_gpu_are_not_the_same():
    same = importlib.import_module("same").same
    assert same([2.0, 1.0], [2.0, 1.000001]) and not same([2.0, 1.0], [2.0, 1.0001])
    assert same("float32", "float32") and not same("float16", "float32")
    assert not same([1.0], None)


def test_a_page_has_units_and_a_new_table_where_the_fields_change():
    page = importlib.import_module("page")
    times = {"median": 2e-3, "low": 1e-3, "high": 3e-3}
    section = {"title": "T", "says": "S.", "status": "done", "skipped": [], "failed": []}
    section["units"] = {"case": "", "measured": "ms", "error": "%", "bytes": "MiB"}
    section["rows"] = [
        {"case": "a", "kind": "k", "measured": times, "error": -0.25},
        {"case": "b", "bytes": 2**21},
    ]
    text = "\n\n".join(page.section_of(section))
    assert "| case | measured, ms | error, % |\n| --- | --- | --- |\n" in text
    assert "| a | 2.00 (1.00 to 3.00) | -25.0 |" in text
    assert "| case | bytes, MiB |\n| --- | --- |\n| b | 2.00 |" in text
    assert "| k | 1 | 25.0 | -25.0 |" in text


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
