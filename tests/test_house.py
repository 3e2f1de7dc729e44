"""The promises of the front page and of the house: links lead somewhere, files stay readable, layers stay layers."""

import ast
import io
import json
import re
import tokenize
from pathlib import Path

import pytest

from conftest import ROOT, run

PAGES = [ROOT / "README.md", *(p for p in (ROOT / "lessons").rglob("*.md") if ".ipynb_checkpoints" not in p.parts)]
MODULES = sorted((ROOT / "multigpu").rglob("*.py"))
# A module may import what stands before it, never what stands after it. A package stands in one place, whole: from
# outside it is one name, and its modules may import one another, in an order that test_a_package_has_an_order knows.
LAYERS = (
    ("errors", "files", "nested"),
    ("world",),
    ("launch", "rendezvous", "devices", "data", "models", "plots", "flags", "slurm_conf", "probes", "ranks", "wire"),
    ("metrics", "proof", "checkpoint", "slurm_processes", "probes_software", "tf_config", "horovodrun", "slow_link"),
    ("tf_common",),
    ("vgpu",),
    ("strategies",),
    ("trainer",),
    ("comparison",),
    ("classroom", "doctor", "notebooks"),
    ("cli",),
)
PACKAGES = {
    "vgpu": (
        ("presets", "memory", "engine", "pinned", "plans"),
        ("clock", "cost"),
        ("machine",),
        ("generators", "tensor"),
        ("moving", "refusals", "resizing", "shapes", "usage", "device_module", "timeline"),
        ("dispatch", "comm"),
        ("transfer", "kernels", "autocast", "loading", "process_group"),
        ("backend", "hooks"),
        ("__init__",),
        ("choice",),
    ),
    "strategies": (
        ("accelerators", "flat", "gather", "launchers", "quantise", "steps"),
        (
            "base",
            "horovod_averages",
            "async_average",
            "bytegrad",
            "decentralized",
            "gradient_allreduce",
            "low_precision",
        ),
        ("single", "dp", "ddp", "pipeline", "horovod", "qadam"),
        ("spawn", "ddp2", "horovod_strategy", "bagua"),
        ("names",),
        ("costs",),
        ("__init__",),
    ),
    "trainer": (
        (
            "callback",
            "watched",
            "checkpoint_files",
            "checkpoint_io",
            "attribute_dict",
            "log_rules",
            "utilities",
            "yaml_text",
            "profiler",
            "table",
        ),
        ("anomaly", "hooks", "optimizers", "precision", "results", "seed", "signals", "summary"),
        ("checkpoint_times", "early_stopping", "lr_monitor", "progress", "timer", "hyperparameters", "logger"),
        ("model_checkpoint", "csv_logger", "tensorboard_logger", "dataloaders", "datamodule", "module", "transfer"),
        ("callbacks", "loggers", "hooking"),
        ("arguments", "evaluate", "learning", "parts"),
        ("fit",),
        ("stages",),
        ("spawned",),
        ("trainer",),
        ("__init__",),
    ),
}
# What a package may import of the library beside itself.
MAY_IMPORT = {"vgpu": {"errors", "files", "plots", "devices", "world"}}


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


def imported(module: Path) -> set[str]:
    """The library's modules that a module imports anywhere in its text, as dotted names without "multigpu."."""
    names = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the library, so that they can be found"
            if node.module == "multigpu" or (node.module or "").startswith("multigpu."):
                within = node.module.removeprefix("multigpu").removeprefix(".")
                found = [f"{within}.{alias.name}".removeprefix(".") for alias in node.names]
                names.update(name if is_module(name) else within for name in found)
        elif isinstance(node, ast.Import):
            names.update(a.name.removeprefix("multigpu.") for a in node.names if a.name.startswith("multigpu."))
    return names - {""}


def is_module(name: str) -> bool:
    path = ROOT / "multigpu" / Path(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT / "multigpu")))
def test_a_lower_layer_never_imports_a_higher_one(module):
    name = module.relative_to(ROOT / "multigpu").with_suffix("").parts[0]
    if name.startswith("__"):
        return
    level = {name: i for i, names in enumerate(LAYERS) for name in names}
    assert name in level, "a new module, or package, has a place in LAYERS"
    for other in {name.split(".")[0] for name in imported(module)} - {name}:
        assert level.get(other, 0) <= level[name], f"{name} imports {other}"
        assert other in MAY_IMPORT.get(name, {other}), f"{name} imports {other}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_an_order(package):
    level = {name: i for i, names in enumerate(PACKAGES[package]) for name in names}
    modules = sorted((ROOT / "multigpu" / package).glob("*.py"))
    assert {module.stem for module in modules} == set(level), "a new module has a place in PACKAGES"
    for module in modules:
        for name in imported(module):
            top, _, inner = name.partition(".")
            if top == package:
                inner = inner or "__init__"
                assert level[inner] <= level[module.stem], f"{module.stem} imports {inner}"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT / "multigpu")))
def test_a_module_says_which_question_it_answers(module):
    if text := module.read_text().strip():
        assert ast.get_docstring(ast.parse(text)), "a module has a docstring"


def test_a_file_holds_one_idea():
    code = [path for folder in ("multigpu", "tests", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py")]
    long = {path.name: lines for path in code if (lines := len(path.read_text().splitlines())) > 300}
    assert not long


def lines_of_code(path: Path) -> int:
    """Without blank lines, comments and docstrings."""
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_the_trainers_core_can_be_read_in_an_evening():
    """Without the callbacks, loggers, profiler, checkpoints' files and progress bar, which stand beside it."""
    package = ROOT / "multigpu" / "trainer"
    core = re.findall(r"(\w+)\.py", ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or "")
    assert {"trainer", "fit", "learning", "module"} <= set(core)
    assert sum(lines_of_code(package / f"{name}.py") for name in core) <= 1500


def test_importing_the_library_imports_no_torch():
    done = run("python", "-c", "import sys, multigpu, multigpu.cli; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0


def test_the_benchmarks_figures_on_the_front_page_are_the_measured_ones():
    page = (ROOT / "README.md").read_text()
    for row in json.loads((ROOT / "benchmarks" / "lesson05.json").read_text())["rows"]:
        assert f"{row['what']}: {row['median']:.2f}" in page


def test_the_virtual_gpus_figures_too():
    page = (ROOT / "README.md").read_text()
    speed = [row["median"] for row in json.loads((ROOT / "benchmarks" / "vgpu_speed.json").read_text())["rows"]]
    apart, together = f"{speed[0]:.2f} with one thread, {speed[1]:.2f} with two", f"two threads: {speed[2]:.2f};"
    assert f"own process: {apart};\n  within one process, {together}" in page
    rows = json.loads((ROOT / "benchmarks" / "vgpu_fidelity.json").read_text())["rows"]
    first, second, *_ = (row["error"] for row in rows)
    ddp = [row["error"] for row in rows if "DDP" in row["what"]]
    assert f"{first:+.0%} and {second:+.0%} for model" in page and f"{min(ddp):+.0%} to {max(ddp):+.0%} for DDP" in page
    assert f"{min(row['error'] for row in rows):+.0%} at worst" in page and len(rows) == 11


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
