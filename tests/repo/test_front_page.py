"""The README's commands do what it says."""

import json
import re
import subprocess
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from zipfile import ZipFile

import pytest
from commands import ROOT, clean_environment, run

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()
BENCHMARKS = ROOT / "benchmarks"


def test_figures_are_those_of_the_reports():
    """The page of benchmarks is made from them, and has the front page's figures."""
    made = run(sys.executable, "-c", "import page; print(page.page(), end='')", cwd=BENCHMARKS)
    page = (BENCHMARKS / "README.md").read_text()
    assert made.stdout == page, "python benchmarks/page.py"
    lesson = (ROOT / "lessons" / "virtual.md").read_text()
    code = "import page; print(page.with_figures(page.LESSON.read_text()), end='')"
    made = run(sys.executable, "-c", code, cwd=BENCHMARKS)
    assert made.stdout == lesson, "python benchmarks/page.py"
    assert lesson.count("<!--= ") > 5
    figures = README.partition("## Five figures")[2].partition("\n\n")[0]
    numbers = re.findall(r"\d[\d,.]*[×%]|\b\d+ of \d+", figures)
    assert len(numbers) == 6
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}", page), number
    scripts, equal, differ = re.search(
        r"Of (\d+) public CUDA scripts, (\d+) .*\n?.*and (\d+) print", figures
    ).groups()
    assert f"{equal} of {scripts} equal, {differ} different" in page


def test_make_run_prints_what_the_front_page_says(tmp_path):
    """On a machine without GPUs; the environment is installed."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    installed = f"{sys.prefix}/installed"
    command = ("make", "-f", ROOT / "Makefile", "run", f"VENV={sys.prefix}", "-o", installed)
    # The tests hide a machine's GPUs by a variable with which prove uses no virtual ones.
    done = run("env", "-u", "CUDA_VISIBLE_DEVICES", *command, cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stdout
    shown = README[README.index("2 × cpu") :]
    shown = shown[: shown.index("```")]
    for line in shown.splitlines():
        if line.startswith("proof: "):
            words = r"2 ranks equal 1 GPU in 25 steps: .*: holds"
            assert re.search(f"^proof: {words}$", done.stdout, re.MULTILINE)
        elif line.strip() != "…":
            assert line in done.stdout.splitlines()
    written = {path.name for path in (tmp_path / "results/PT_CNN_MultiGPU").iterdir()}
    assert written == {"last.pt", "metrics.json", "model.pt"}
    metrics = json.loads((tmp_path / "results/PT_CNN_MultiGPU/metrics.json").read_text())
    assert f"{metrics['accuracy']:.4f}" in shown and len(metrics["epochs"]) == 10


# ---- make install --------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path):
    """The address of a stand-in for an index of CPU builds: its torch is an empty package."""
    folder = tmp_path / "index" / "torch"
    folder.mkdir(parents=True)
    name = "torch-2.13.0+cpu-py3-none-any.whl"
    info = "torch-2.13.0+cpu.dist-info"
    with ZipFile(folder / name, "w") as wheel:
        wheel.writestr("torch_stand_in.py", "")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path / "index"))

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def make(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """`make` with pip cut off from every index but the ones that a test names."""
    own = {"PIP_NO_INDEX": "0", "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""}
    return run("make", *arguments, cwd=ROOT, **(own | environment))


def installed(venv: Path) -> str:
    return run(venv / "bin" / "pip", "list", "--format=freeze").stdout


@pytest.mark.parametrize("by", ["TORCH=cpu", "PIP_EXTRA_INDEX_URL"])
def test_the_cpu_build_comes_from_its_index(by, index, tmp_path):
    """Both pip's main index and PyTorch's are the stand-in, so nothing else can be taken."""
    venv = tmp_path / "an absolute folder".replace(" ", "-") / "venv"
    arguments = ["install", f"VENV={venv}", "PACKAGES=--no-deps torch==2.13.0", "TORCH=cpu"]
    environment = {"PIP_INDEX_URL": f"{index}/empty"}
    if by == "TORCH=cpu":
        arguments.append(f"TORCH_CPU_INDEX={index}")
    else:  # the user's own index wins over the Makefile's
        arguments.append("TORCH_CPU_INDEX=http://127.0.0.1:9/never-asked")
        environment["PIP_EXTRA_INDEX_URL"] = index
    done = make(*arguments, **environment)
    assert done.returncode == 0, done.stdout
    assert "CPU build" in done.stdout and index in done.stdout
    assert "torch==2.13.0+cpu" in installed(venv)
    if by == "TORCH=cpu":  # without an answer it says what to do, and does not try again
        (venv / "installed").unlink()
        (tmp_path / "pip.conf").write_text("[global]\nindex-url = http://mine\n")
        arguments[-1] = "TORCH_CPU_INDEX=http://127.0.0.1:9/none"
        done = make(*arguments, PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))
        assert done.returncode != 0 and "Retrying" not in done.stdout
        (sentence,) = (one for one in done.stdout.splitlines() if one.startswith("error: "))
        assert "http://127.0.0.1:9/none, which has" in sentence
        assert "PIP_EXTRA_INDEX_URL" in sentence and "index-url='http://mine'" in sentence


@pytest.mark.long
def test_make_says_how_much_it_will_bring(tmp_path):
    """Before pip runs, which here fails at once: nothing answers at its index."""
    environment = {k: v for k, v in clean_environment().items() if k != "PIP_EXTRA_INDEX_URL"}
    done = subprocess.run(
        ["make", "install", f"VENV={tmp_path}/venv", "PACKAGES=--no-deps no-such-package"],
        cwd=ROOT,
        env=environment | {"PIP_NO_INDEX": "1"},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert re.search(r"CUDA build, [\d.]+ GB.*TORCH=cpu", done.stdout)
    assert not (tmp_path / "venv" / "installed").exists(), "a failed install is repeated"


@pytest.mark.long
def test_an_environment_elsewhere_from_a_folder_of_wheels(index, tmp_path):
    """Without a network, and with an absolute VENV, as on a cluster's scratch disk."""
    venv = tmp_path / "scratch" / "venv"
    wheels = tmp_path / "index" / "torch"
    done = make(
        *("install", f"VENV={venv}", "PACKAGES=--no-deps torch==2.13.0"),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(wheels),
    )
    assert done.returncode == 0, done.stdout
    assert "torch==2.13.0+cpu" in installed(venv)
    assert f"COURSE_ENV={venv}" in done.stdout, "what job files need to find it"


def test_an_old_python_is_refused_with_a_sentence(tmp_path):
    """A Python that says that it is 3.9 when the Makefile asks it."""
    old = tmp_path / "python3.9"
    code = "import sys; sys.version_info = (3, 9, 0); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$2"\n')
    old.chmod(0o755)
    done = run("make", "install", f"VENV={tmp_path}/venv", f"PYTHON={old}", cwd=ROOT)
    assert done.returncode != 0
    assert "3.11" in done.stdout and "3.9" in done.stdout and "PYTHON=" in done.stdout
    assert not (tmp_path / "venv").exists()
