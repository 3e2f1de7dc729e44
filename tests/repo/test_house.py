"""The promises of the front page and of the house: links lead somewhere, files stay readable, layers stay layers."""

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
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link


@pytest.mark.parametrize(
    "script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem
)
def test_a_lesson_has_all_its_parts(script):
    assert (ROOT / "notebooks" / f"{script.stem}.ipynb").exists() and (
        ROOT / "slurm" / f"{script.stem}.slurm"
    ).exists()
    syllabus = (ROOT / "lessons" / "README.md").read_text()
    assert re.search(rf"\| {script.stem} \| \[notebook\]", syllabus), (
        "the syllabus says that the lesson is there"
    )


def test_a_lower_layer_never_imports_a_higher_one():
    """The layers are those of pyproject.toml, [tool.importlinter]; a new module has a place there."""
    done = run("lint-imports", "--no-cache", cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_imports_name_the_library():
    relative = [
        path for path in MODULES for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]  # fmt: skip
    assert not relative, "import multigpu.x.y, so that a search for the name finds it"


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
def test_a_module_says_which_question_it_answers(module):
    if text := module.read_text().strip():
        assert ast.get_docstring(ast.parse(text)), "a module has a docstring"


def test_importing_the_library_imports_no_torch():
    done = run(
        "python", "-c", "import sys, multigpu, multigpu.cli; sys.exit('torch' in sys.modules)"
    )
    assert done.returncode == 0


def test_the_benchmarks_figures_on_the_front_page_are_the_measured_ones():
    page = (ROOT / "README.md").read_text()
    for row in json.loads((ROOT / "benchmarks" / "lesson05.json").read_text())["rows"]:
        assert f"{row['what']}: {row['median']:.2f}" in page


def test_the_virtual_gpus_figures_too():
    page = (ROOT / "README.md").read_text()
    speed = [
        row["median"]
        for row in json.loads((ROOT / "benchmarks" / "vgpu_speed.json").read_text())["rows"]
    ]
    apart, together = (
        f"{speed[0]:.2f} with one thread, {speed[1]:.2f} with two",
        f"two threads: {speed[2]:.2f};",
    )
    assert f"own process: {apart};\n  within one process, {together}" in page
    rows = json.loads((ROOT / "benchmarks" / "vgpu_fidelity.json").read_text())["rows"]
    first, second, *_ = (row["error"] for row in rows)
    ddp = [row["error"] for row in rows if "DDP" in row["what"]]
    assert (
        f"{first:+.0%} and {second:+.0%} for model" in page
        and f"{min(ddp):+.0%} to {max(ddp):+.0%} for DDP" in page
    )
    assert f"{min(row['error'] for row in rows):+.0%} at worst" in page and len(rows) == 11


def test_what_make_run_prints_is_what_the_front_page_says(tmp_path):
    """The two commands' promise: the lines, the accuracy and the proof, without the speeds."""
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
    assert {path.name for path in tmp_path.iterdir()} == {
        "last.pt",
        "metrics.json",
        "training.png",
    }
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads((tmp_path / "metrics.json").read_text())
    assert told["proof"]["holds"] and len(told["epochs"]) == 10


def test_job_files_of_all_lessons_are_read_by_slurm():
    for job_file in sorted(Path(ROOT / "slurm").glob("*.slurm")):
        assert not re.search(r"^#\s+SBATCH", job_file.read_text(), re.MULTILINE), (
            "Slurm ignores '# SBATCH'"
        )
