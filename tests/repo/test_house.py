"""Links work, lessons are complete, imports follow the layers, figures are measured."""

import ast
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
    link = rf"\| {script.stem} \| \[[^\]]+\]\(\.\./notebooks/{script.stem}\.ipynb\)"
    assert re.search(link, syllabus), "the syllabus lists it"


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


def test_slurm_reads_every_option_in_the_job_files():
    for job_file in sorted(Path(ROOT / "slurm").glob("*.slurm")):
        assert not re.search(r"^#\s+SBATCH", job_file.read_text(), re.MULTILINE), (
            "Slurm ignores '# SBATCH'"
        )
