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
from commands import ROOT, clean_environment, run, run_script

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()
BENCHMARKS = ROOT / "benchmarks"


def test_the_front_page_is_a_screen():
    assert len(README.splitlines()) <= 65
    assert README.count("<!--") == 2, "only the table of lessons is generated"


def test_figures_are_those_of_the_reports():
    """The page of benchmarks is made from them, and has the front page's figures."""
    made = run(sys.executable, "-c", "import page; print(page.page(), end='')", cwd=BENCHMARKS)
    page = (BENCHMARKS / "README.md").read_text()
    assert made.stdout == page, "python benchmarks/page.py"
    figures = README.partition("## Five figures")[2].partition("\n\n")[0]
    numbers = re.findall(r"\d[\d,.]*[×%]|\b\d+ of \d+|\b\d\d+ public|, \d+ print", figures)
    assert len(numbers) >= 8
    for number in numbers:
        digits = re.search(r"\d[\d,.]*(?:[×%]| of \d+)?", number)[0]
        assert digits in page, number


def test_make_run_prints_what_the_front_page_says(tmp_path):
    """The lines, the accuracy and the proof, without the speeds."""
    flags = ("--spawn", "auto", "--prove", "--out", tmp_path)
    done = run_script(ROOT / "scripts" / "PT_CNN_MultiGPU.py", *flags)
    assert done.returncode == 0, done.stdout
    shown = README[README.index("device: 2 ×") :]
    shown = shown[: shown.index("```")]
    for line in filter(str.strip, shown.splitlines()):
        if line.startswith("device: "):
            assert re.search(r"^device: \d+ × ", done.stdout, re.M)
        elif line.startswith("proof: "):
            what = line[: line.index("max difference")]
            assert re.search(
                re.escape(what) + r"max difference \S+, limit 1e-05: holds", done.stdout
            )
        elif re.match(r"\s+\d+ ", line):
            epoch, loss, accuracy, _ = line.split()
            assert re.search(rf"^\s+{epoch}\s+{loss}\s+{accuracy}\s", done.stdout, re.M)
        elif line.strip() != "…":
            assert line in done.stdout
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"last.pt", "metrics.json", "training.png"}
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["proof"]["holds"] and len(metrics["epochs"]) == 10


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
