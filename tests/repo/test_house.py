"""Links work, lessons are complete, imports follow the layers, figures are measured."""

import ast
import json
import re
from pathlib import Path

import pytest
from commands import ROOT, run

PAGES = [
    ROOT / "README.md",
    *(p for p in (ROOT / "lessons").rglob("*.md") if ".ipynb_checkpoints" not in p.parts),
]
MODULES = sorted((ROOT / "multigpu").rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_work(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link


@pytest.mark.parametrize(
    "script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem
)
def test_a_lesson_has_all_its_parts(script):
    assert (ROOT / "notebooks" / f"{script.stem}.ipynb").exists()
    assert (ROOT / "slurm" / f"{script.stem}.slurm").exists()
    syllabus = (ROOT / "lessons" / "README.md").read_text()
    assert re.search(rf"\| {script.stem} \| \[notebook\]", syllabus), "the syllabus lists it"


def test_a_lower_layer_never_imports_a_higher_one():
    """The layers are in pyproject.toml, [tool.importlinter], with a place for every module."""
    done = run("lint-imports", "--no-cache", cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_imports_name_the_library():
    """import multigpu.x.y, never a relative import: a search for the name then finds it."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path


def test_a_test_file_imports_no_other_test_file():
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    names = {path.stem for path in tests}
    for path in tests:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in names, (
                    f"{path.name}: move what both need to tests/support/"
                )


@pytest.mark.parametrize(
    "module", MODULES, ids=lambda path: str(path.relative_to(ROOT / "multigpu"))
)
def test_a_module_has_a_docstring(module):
    if text := module.read_text().strip():
        assert ast.get_docstring(ast.parse(text))


def test_importing_the_library_imports_no_torch():
    program = "import sys, multigpu, multigpu.cli; sys.exit('torch' in sys.modules)"
    assert run("python", "-c", program).returncode == 0


def assert_figures(page: Path, *figures: str) -> None:
    """The page has each of these numbers, not as a part of a longer one."""
    text = page.read_text()
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", text), (page, figure)


def measured(name: str) -> list[dict]:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())["rows"]


def test_the_readme_has_the_measured_speeds():
    medians = [f"{row['median']:.2f}" for row in measured("lesson05")]
    assert_figures(ROOT / "README.md", *medians)


def test_the_readme_has_the_measured_cost_and_fidelity_of_virtual_gpus():
    readme = ROOT / "README.md"
    medians = [f"{row['median']:.2f}" for row in measured("vgpu_speed")]
    assert_figures(readme, *medians[:3])
    errors = [row["error"] for row in measured("vgpu_fidelity")]
    with_ddp = [row["error"] for row in measured("vgpu_fidelity") if "DDP" in row["what"]]
    assert len(errors) == 11
    named = (errors[0], errors[1], min(with_ddp), max(with_ddp), min(errors))
    assert_figures(readme, *(f"{error:+.0%}" for error in named))


def test_make_run_prints_what_the_readme_shows(tmp_path):
    """The lines, the accuracy and the proof, without the speeds."""
    flags = ("--spawn", "auto", "--prove", "--out", tmp_path)
    done = run("python", ROOT / "scripts" / "PT_CNN_MultiGPU.py", *flags)
    assert done.returncode == 0, done.stdout
    assert re.match(r"device: \d+ × ", done.stdout)
    for words in (
        "epoch      loss  test accuracy   images/s",
        "limit 1e-05: holds",
        "figure: ",
        "metrics: ",
    ):
        assert words in done.stdout
    assert float(re.search(r"test accuracy: (\S+)", done.stdout)[1]) >= 0.97
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"last.pt", "metrics.json", "training.png"}
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["proof"]["holds"] and len(metrics["epochs"]) == 10


def test_slurm_reads_every_option_in_the_job_files():
    for job_file in sorted(Path(ROOT / "slurm").glob("*.slurm")):
        assert not re.search(r"^#\s+SBATCH", job_file.read_text(), re.MULTILINE), (
            "Slurm ignores '# SBATCH'"
        )
