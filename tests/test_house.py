"""The promises of the front page and of the house: links lead somewhere, files stay readable, layers stay layers."""

import ast
import json
import re
from pathlib import Path

import pytest

from conftest import ROOT, run

PAGES = [ROOT / "README.md", *(p for p in (ROOT / "lessons").rglob("*.md") if ".ipynb_checkpoints" not in p.parts)]
MODULES = sorted((ROOT / "multigpu").rglob("*.py"))
# A module may import what stands before it, never what stands after it.
LAYERS = (
    ("errors", "files"),
    ("world",),
    ("launch", "rendezvous", "devices", "data", "models", "plots", "flags", "slurm_conf", "probes"),
    ("metrics", "proof", "checkpoint", "slurm_processes", "probes_software"),
    ("classroom", "doctor", "notebooks"),
    ("cli",),
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link


def test_the_front_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 70


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_a_lesson_has_all_its_parts_and_its_script_is_short(script):
    assert len(script.read_text().splitlines()) <= 250
    assert (ROOT / "notebooks" / f"{script.stem}.ipynb").exists() and (ROOT / "slurm" / f"{script.stem}.slurm").exists()
    syllabus = (ROOT / "lessons" / "README.md").read_text()
    assert re.search(rf"\| {script.stem} \| \[notebook\]", syllabus), "the syllabus says that the lesson is there"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_a_lower_layer_never_imports_a_higher_one(module):
    if module.stem.startswith("__"):
        return
    assert module.stem in {name for names in LAYERS for name in names}, "a new module has a place in LAYERS"
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    for node in ast.walk(ast.parse(module.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("multigpu.")]
        elif isinstance(node, ast.ImportFrom) and node.module == "multigpu":
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("multigpu."):
            names = [node.module.split(".")[1]]
        for name in set(names) & set(level):
            assert level[name] <= level[module.stem], f"{module.stem} imports {name}"


def test_a_file_holds_one_idea():
    code = [path for folder in ("multigpu", "tests", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py")]
    long = {path.name: lines for path in code if (lines := len(path.read_text().splitlines())) > 300}
    assert not long


def test_importing_the_library_imports_no_torch():
    done = run("python", "-c", "import sys, multigpu, multigpu.cli; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0


def test_the_benchmarks_figures_on_the_front_page_are_the_measured_ones():
    page = (ROOT / "README.md").read_text()
    for row in json.loads((ROOT / "benchmarks" / "lesson05.json").read_text())["rows"]:
        assert f"{row['what']}: {row['median']:.2f}" in page


def test_what_make_run_prints_is_what_the_front_page_says(tmp_path):
    """The two commands' promise: the lines, the accuracy and the proof, without the speeds."""
    flags = ("--spawn", "auto", "--prove", "--out", tmp_path)
    done = run("python", ROOT / "scripts" / "PT_CNN_MultiGPU.py", *flags)
    assert done.returncode == 0, done.stdout
    assert re.match(r"device: \d+ × ", done.stdout)
    for words in ("epoch      loss  test accuracy   images/s", "limit 1e-05: holds", "figure: ", "metrics: "):
        assert words in done.stdout
    assert float(re.search(r"test accuracy: (\S+)", done.stdout)[1]) >= 0.97
    assert {path.name for path in tmp_path.iterdir()} == {"last.pt", "metrics.json", "training.png"}
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads((tmp_path / "metrics.json").read_text())
    assert told["proof"]["holds"] and len(told["epochs"]) == 10


def test_job_files_of_all_lessons_are_read_by_slurm():
    for job_file in sorted(Path(ROOT / "slurm").glob("*.slurm")):
        assert not re.search(r"^#\s+SBATCH", job_file.read_text(), re.MULTILINE), "Slurm ignores '# SBATCH'"
