"""`multigpu prove`: its output, its files, what it refuses, and what it leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import alive, clean_environment, free_ports
from typer.testing import CliRunner
from wrong_cases import FAULTS, PROGRAMS, RIGHT_PROGRAMS, TORCHRUN

from multigpu import prove
from multigpu.cli import app
from multigpu.errors import UserError
from multigpu.prove import processes

DDP = (PROGRAMS / "ddp.py").read_text()
# What a page would load from elsewhere.
LOADS = re.compile(r"""(src|href)=["'](?!#|data:)|@import|url\((?!#)""")
BY_HAND = (PROGRAMS / "by_hand.py").read_text()
# One batch for each rank, whose size is a flag.
OWN_BATCH = (
    BY_HAND.replace("import torch\n", "import sys\n\nimport torch\n", 1)
    .replace(
        "ROWS, BATCH, EPOCHS = 128, 32, 3", "ROWS, BATCH, EPOCHS = 128, int(sys.argv[2]), 3"
    )
    .replace("order.split(BATCH)", "order.split(BATCH * world)")
)


def source(name: str) -> str:
    return next(fault for fault in FAULTS if fault.name == name).source()


def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, *options: str):
    """Run `multigpu prove OPTIONS torchrun … program.py` in this process."""
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(text)
    words = ["prove", *options, *TORCHRUN, "--nproc-per-node=2", "program.py"]
    return CliRunner().invoke(app, words)


@pytest.mark.slow
def test_a_program_that_starts_its_ranks_at_a_fixed_port(tmp_path, monkeypatch, in_forks):
    """Two runs of it at a time would meet, and a run compared with itself always holds."""
    text = (RIGHT_PROGRAMS / "spawn.py").read_text()
    for old, new in (
        ("free_port())", f"{free_ports(1)[0]})"),
        ("int(sys.argv[1]) if len(sys.argv) > 1", "int(sys.argv[2]) if sys.argv[2:]"),
        ("loss.backward()", "(loss / world).backward()"),
    ):
        assert old in text
        text = text.replace(old, new)
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(text)
    proof = prove.run(["program.py", "--ranks", "2"], timeout=60)
    assert proof.cause.kind == "divided_by_ranks", str(proof)
    assert proof.notes == ["the reference ran as program.py --ranks 1"]


def test_a_port_that_torchrun_itself_does_not_get_is_seen(tmp_path):
    """The agent of torchrun fails, and no rank of the program: the run is made once more."""
    (tmp_path / "output.txt").write_text(
        'Traceback (most recent call last):\n  File "torch/distributed/elastic/agent/api.py"\n'
        "DistNetworkError: the server socket has failed: address already in use\n"
    )
    assert processes.Run("one", [], tmp_path, tmp_path).port_in_use


@pytest.mark.slow
def test_a_proof_and_its_files(tmp_path, monkeypatch, in_forks):
    files = ("--json", "n.json", "--picture", "p.svg", "--report", "p.html")
    done = command(tmp_path, monkeypatch, DDP, *files, "--steps", "5")
    assert done.exit_code == 0, done.output
    last = done.stdout.splitlines()[-1]
    assert last.startswith("proof: 2 ranks equal 1 rank in 5 steps: largest difference ")
    assert last.endswith(": holds")
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert numbers["verdict"] == "holds" and numbers["cause"] is None
    assert [step["step"] for step in numbers["steps"]] == [1, 2, 3, 4, 5]
    weight = numbers["steps"][0]["parameters"]["head.weight"]["gradients"]
    assert 0 < weight["difference"] < weight["limit"] < 1e-4
    assert "head.weight" in (tmp_path / "p.svg").read_text()
    page = (tmp_path / "p.html").read_text()
    assert "<h1>multigpu prove: holds</h1>" in page and last in page and "<svg" in page
    assert "<td>head.weight<td>gradients" in page and not LOADS.search(page)
    # Nothing else is left in the program's folder.
    assert sorted(os.listdir(tmp_path)) == ["n.json", "p.html", "p.svg", "program.py"]


@pytest.mark.slow
def test_a_failed_proof_names_parameter_step_and_rank(tmp_path, monkeypatch, in_forks):
    text = source("rank_0_clamps_weights")
    done = command(tmp_path, monkeypatch, text, "--json", "n.json")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1].startswith(
        "proof: 2 ranks differ from 1 rank from step 2 on: "
    )
    assert done.stdout.splitlines()[-2].startswith("to do: ")
    cause = json.loads((tmp_path / "n.json").read_text())["cause"]
    assert (cause["kind"], cause["step"], cause["rank"]) == ("update", 2, 1)
    assert cause["parameter"] == "hidden.weight"


@pytest.mark.slow
def test_a_batch_of_each_rank_is_compared_with_a_batch_as_large_as_theirs(proved):
    proof = proved(DDP.replace("BATCH // world", "BATCH"))
    assert proof.verdict == "holds", str(proof)
    assert "with one rank the program reads 32 rows a step, 2 ranks read 64" in str(proof)


@pytest.mark.slow
def test_without_a_loader_the_reference_to_give_is_printed(proved):
    proof = proved(OWN_BATCH, "--batch-size", "16")
    assert (proof.exit_code, proof.cause.kind) == (2, "fewer_rows")
    assert '--batch-size 32"' in str(proof)
    reference = f"{' '.join(TORCHRUN)} --nproc-per-node=1 program.py --batch-size 32"
    proof = proved(OWN_BATCH, "--batch-size", "16", reference=reference)
    assert proof.verdict == "holds" and "2 ranks equal the reference" in proof.line


@pytest.mark.slow
def test_a_program_that_starts_its_ranks_needs_the_command_for_one(proved, monkeypatch):
    spawned = (PROGRAMS.parent / "right" / "spawn.py").read_text()
    Path("spawn.py").write_text(spawned.replace("sys.argv[1]", 'sys.argv[-1].split("=")[1]'))
    words = [sys.executable, "spawn.py", "--many=2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    proof = prove.run(words, timeout=60)
    assert (proof.exit_code, proof.cause.kind) == (2, "same_ranks"), str(proof)


@pytest.mark.slow
def test_without_torchrun_the_launcher_is_named(tmp_path, monkeypatch, in_forks):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os\nimport torch\n\nos.environ['LOCAL_RANK']\n")
    proof = prove.run("python train.py", timeout=60)
    assert "KeyError: 'LOCAL_RANK'" in proof.line
    assert "torchrun --nproc-per-node=2" in proof.cause.remedy


@pytest.mark.slow
def test_a_program_that_says_nowhere_that_it_needs_gpus(proved):
    proof = proved("import torch\n\ngetattr(torch, 'cu' + 'da').set_device(0)\n")
    assert proof.cause.remedy == "the program needs GPUs: give --gpus 2 for virtual ones"


def test_a_crash_shows_its_own_traceback(proved):
    proof = proved(source("crash_of_rank_1"))
    assert (proof.exit_code, proof.cause.rank) == (2, 1)
    assert "the command failed in step 1 on rank 1: IndexError" in proof.line
    assert 'program.py", line' in str(proof) and "ChildFailedError" not in str(proof)
    proof = proved(source("one_rank_refused"))
    assert "the reference failed in step 1 on rank 0: AssertionError" in proof.line


@pytest.mark.slow
def test_a_hang_says_which_rank_waits_where(proved):
    proof = proved(source("barrier_of_rank_0"), timeout=6)
    assert (proof.exit_code, proof.cause.kind) == (2, "hang")
    assert "rank 0 waits at program.py:" in proof.line and "(dist.barrier())" in proof.line
    assert "rank 1 waits at program.py:" in proof.line and "(loss.backward())" in proof.line


@pytest.mark.slow
def test_one_process_is_no_proof(proved, monkeypatch):
    Path("one.py").write_text(
        "import torch\nmodel = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(3, 2)).sum().backward()\noptimizer.step()\n"
    )
    proof = prove.run([sys.executable, "one.py"], timeout=60)
    assert (proof.exit_code, proof.cause.kind) == (2, "one_rank")


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path):
    """Really started, in a session of its own as at a terminal."""
    (tmp_path / "program.py").write_text(
        DDP
        + f"\nimport os, time\nopen(f'{tmp_path}/{{os.getpid()}}.pid', 'w')\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [
            *["multigpu", "prove", "--steps", "99", "--json", "n.json"],
            *TORCHRUN,
            "--nproc-per-node=2",
            "program.py",
        ],
        cwd=tmp_path,
        env=clean_environment(TMPDIR=tmp_path),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    started = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert started and all(map(alive, started))
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in text
    assert not any(map(alive, started))
    left = [path.name for path in tmp_path.iterdir() if path.suffix != ".pid"]
    assert left == ["program.py"]


@pytest.mark.parametrize(
    ("words", "options", "sentence"),
    [
        ("", {}, "there is no command"),
        ("missing.py", {}, "there is no script missing.py"),
        ("--stepz 3 missing.py", {}, "--stepz is no flag of this command"),
        ("torchrun x.py", {}, "torchrun starts one process, unless you say how many"),
        ("torchrun --nproc-per-node=1 x.py", {}, "a proof compares several with one"),
        (
            "torchrun --nproc-per-node=4 x.py",
            {"gpus": 2},
            "the command starts 4 ranks, and --gpus is 2: give --gpus 4",
        ),
        ("torchrun --nproc-per-node=2 x.py", {"steps": 0}, "--steps is 0"),
        ("torchrun --nproc-per-node=2 x.py", {"timeout": 0}, "--timeout is 0"),
        ("torchrun --nproc-per-node=2 x.py", {"against": 2}, "--against is 2"),
        ("python x.py", {"against": 1}, "give it with torchrun"),
        ("python x.py", {"gpus": 0}, "--gpus is 0"),
        (
            "torchrun --nproc-per-node=2 x.py",
            {"self_check": True, "reference": "x"},
            "--self needs no reference",
        ),
    ],
)
def test_what_makes_no_proof_is_refused_before_anything_runs(
    tmp_path, monkeypatch, words, options, sentence
):
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("print('ran')")
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
        prove.run(words, **options)


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, monkeypatch):
    for options in (
        ["--json", "no/n.json"],
        ["--picture", "p.txt"],
        ["--report", "no/p.html"],
    ):
        done = command(tmp_path, monkeypatch, "1/0", *options)
        assert done.exit_code == 1 and isinstance(done.exception, UserError)
        assert options[0] in str(done.exception)
