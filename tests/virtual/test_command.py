"""`multigpu virtual`: the program's input, signals and exit code are its own."""

import json
import signal
import sys
from pathlib import Path

import pytest
from commands import run_script
from typer.testing import CliRunner
from virtual_runs import start, virtual, write

from multigpu.cli import app
from multigpu.errors import UserError
from multigpu.virtual import command, visible

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
NODES = ("--gpus-per-node", "8", "--between-nodes", "HDR200")
# 4 MiB on each of two GPUs, one addition, one transfer.
USE = """
import sys, torch
x = torch.ones(2**20, device="cuda:0")
y = (x + 1).to("cuda:1")
print("sum", y.sum().item())
"""
# Waits until this process has written its record, with the peak of 8 MiB.
WRITTEN = """
import os, signal, time
from pathlib import Path
folder = Path(os.environ["MULTIGPU_VIRTUAL_RECORDS"])
while not any("8388608" in p.read_text() for p in folder.glob(f"{os.getpid()}-*.json")):
    time.sleep(0.01)
"""


def test_a_program_and_its_report(tmp_path):
    script = write(tmp_path, USE)
    flags = ("--gpus", 2, "--gpu", "A100-40GB", "--link", "NVLink3", "--memory", "1GiB")
    files = ("--json", "n.json", "--trace", "t.json", "--picture", "p.svg")
    done = virtual(tmp_path, *flags, *files, script)
    assert done.returncode == 0
    assert "sum 2097152.0" in done.stdout
    assert "simulated: 2 × A100-40GB, NVLink3\nsimulated time: " in done.stdout
    numbers = json.loads((tmp_path / "n.json").read_text())
    first, second = numbers["gpus"]
    assert (first["device"], first["peak_bytes"]) == ("cuda:0", 2**23)
    assert (second["device"], second["capacity_bytes"]) == ("cuda:1", 2**30)
    # The second GPU sends the sum to the host, too.
    assert second["transfer_seconds"] > first["transfer_seconds"] > 0
    for gpu in (first, second):
        assert 0 < gpu["compute_seconds"] < numbers["simulated_seconds"]
        assert 0 < gpu["idle_seconds"] < numbers["simulated_seconds"]
    lanes = {
        row["args"]["name"].split(" (")[0]
        for row in json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        if row["ph"] == "M"
    }
    assert lanes == {"cuda:0", "cuda:1"}
    assert "cuda:1" in (tmp_path / "p.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "n.json", "p.svg", script, "t.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(7)", 7),
        ("import os; os._exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_the_exit_code_is_the_programs(tmp_path, end, code):
    script = write(tmp_path, USE + WRITTEN + end)
    done = virtual(tmp_path, script)
    assert done.returncode == code
    assert "cuda:0     8.00 MiB" in done.stdout, done.stdout
    assert ("without Python's end" in done.stdout) == (code != 7)


def test_a_command_that_fails_before_it_uses_a_gpu(tmp_path):
    done = virtual(tmp_path, write(tmp_path, "raise SystemExit(2)"))
    assert done.returncode == 2
    assert "The command failed before it used a virtual GPU." in done.stdout


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import os; os.environ['LOCAL_RANK']", "KeyError: 'LOCAL_RANK'"),
        ("import torch; torch.distributed.init_process_group('gloo')", "RANK expected"),
    ],
)
def test_a_programs_own_traceback_is_unchanged(tmp_path, line, error):
    """After it stands what to do, if the program needs torchrun."""
    script = write(tmp_path, f"def f():\n    {line}\nf()\n")
    done = virtual(tmp_path, "python", script, "--flag", "a b")
    plain = run_script(script, "--flag", "a b", cwd=tmp_path)
    assert error in plain.stdout
    assert done.stdout.startswith(plain.stdout) and done.returncode == plain.returncode == 1
    command = "`multigpu virtual --gpus 2 torchrun --nproc-per-node=2 program.py --flag 'a b'`"
    assert (command in done.stdout.removeprefix(plain.stdout)) == ("RANK" in error)


def test_standard_input_is_the_programs(tmp_path):
    script = write(tmp_path, "print(input(), input())\nbreakpoint()\nprint('after')\n")
    done = virtual(tmp_path, script, stdin="one\ntwo\np 6 * 7\ncontinue\n")
    assert "one two\n" in done.stdout and "(Pdb) 42\n" in done.stdout
    assert "after" in done.stdout and done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_program(tmp_path, number):
    handled = """
def handle(number, frame):
    sys.exit(f"handled {number}")
signal.signal(signal.SIGTERM, handle)
signal.signal(signal.SIGINT, handle)
print("ready", flush=True)
time.sleep(60)
"""
    script = write(tmp_path, USE + WRITTEN + handled)
    with start(tmp_path, script) as process:
        while "ready" not in process.stdout.readline():
            pass
        process.send_signal(number)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"handled {int(number)}" in text
    assert "simulated time" in text and "without Python's end" not in text


def test_a_command_by_its_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "")
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    for words, of_python in (
        ("program.py -x", "program.py -x"),
        ("python3 -u p.py", "-u p.py"),
        ("-m pkg.mod 1", "-m pkg.mod 1"),
        ("torchrun p.py", "-m torch.distributed.run p.py"),
        ("- 1", "- 1"),
    ):
        assert command.command_line(words.split()) == [sys.executable, *of_python.split()]
    for words in (["./tool", "1"], ["sh", "-c", "true"]):
        assert command.command_line(words) == words
    ranks = command.ranks_of_torchrun
    assert ranks(["torchrun", "--nproc-per-node=4", "p.py", "--nproc-per-node=8"]) == 4
    assert ranks(["python", "-m", "torch.distributed.run", "--nproc_per_node", "3"]) == 3
    assert ranks(["torchrun", "--nproc-per-node=gpu", "p.py"]) == ranks(["p.py"]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["progam.py"], "there is no script progam.py: did you mean 'program.py'?"),
        (["nowhere/x.py"], "there is no script nowhere/x.py: give the path of one"),
        (["--gpuz", "3", "program.py"], "--gpuz is no flag of this command"),
        (["--gpus", "0", "program.py"], "--gpus is 0: give a number from 1 to 128"),
        (["--gpu", "V100", "program.py"], "--gpu is 'V100': did you mean 'V100-"),
        (["--link", "x", "program.py"], "--link is 'x': use one of PCIe3, "),
        (["--memory", "3x", "program.py"], "--memory is '3x': give bytes, or a size"),
        (["--clock", "fast", "program.py"], "--clock is 'fast': give real or simulated"),
        (["--gpus-per-node", "2", "program.py"], "belong together"),
        (
            ["--gpus=8", "--gpus-per-node=3", "--between-nodes=HDR200", "program.py"],
            "--gpus 8 cannot be divided into nodes of 3",
        ),
        (["--json", "nowhere/n.json", "program.py"], "--json is nowhere/n.json, which cannot"),
        (["--report", "no/r.html", "program.py"], "--report is no/r.html, which cannot be"),
        (["--picture", "p.txt", "program.py"], "give a file that ends in .png, .svg, .pdf"),
        (["--world", "8", "--gpus", "2", "z.py"], "--gpus does not go with --world"),
        (["--as-rank", "3", "z.py"], "--as-rank needs --world"),
        (["--world", "0", "z.py"], "--world is 0: give the number of ranks"),
        (["--world", "1024", "z.py"], "--world 1024 does not fit on one node"),
        (["--world", "12", *NODES, "z.py"], "cannot be divided into nodes of 8"),
        (["--world", "8", "--as-rank", "8", "z.py"], "the ranks of --world 8 are 0 to 7"),
        (["--world", "8", "--as-rank", "0,x", "z.py"], "--as-rank is 'x': give ranks"),
        (["--world", "8", "--as-rank", "1,1", "z.py"], "--as-rank names a rank twice"),
        (["--world", "8", "--steps", "0", "z.py"], "--steps is 0: give a number from 1 up"),
        (["--world", "8", "--tokens-per-step", "-1", "z.py"], "--tokens-per-step is -1"),
        (["--world", "8", "--gpus-per-node", "-4", "z.py"], "--gpus-per-node is -4"),
        (["--world", "8", "torchrun", "z.py"], "leave torchrun and its flags out"),
        (
            ["--world", "8", TORCHRUN, "z.py"],
            "leave torchrun and its flags out",
        ),
        (["--world", "8", "-"], "the standard input can be read once: give the file"),
    ],
)
def test_what_is_refused_before_the_start(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    for name in ("program.py", "z.py"):
        write(tmp_path, "raise AssertionError('the program has started')", name)
    numbered = any(word.startswith(("--gpus", "--world")) for word in words)
    gpus = [] if numbered else ["--gpus", "2"]
    done = CliRunner().invoke(app, ["virtual", *gpus, *words])
    assert isinstance(done.exception, UserError)
    assert sentence in str(done.exception)


def test_with_real_gpus_the_number_must_be_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        write(tmp_path / "dev", "", name)
    assert command.real_gpus(tmp_path) == 2
    monkeypatch.setattr(command, "real_gpus", lambda: 2)
    done = CliRunner().invoke(app, ["virtual", "program.py"])
    assert "this machine has 2 GPUs" in str(done.exception)
    assert "--gpus" in str(done.exception)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1, 3 ", [1, 3]),
        ("1,4,0", [1]),
        ("-1", []),
        ("0,-1,1", [0]),
        ("1,1", []),
        ("1gpu,2", [1, 2]),
        ("GPU-5a3b,1", []),
        (f"GPU-{'0' * 8}-0000-0000-0000-{2:012},GPU-{'0' * 8}-0000-0000-0000-{0:012}", [2, 0]),
    ],
)
def test_cuda_visible_devices(text, numbers):
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible.visible_gpus(4, environ) == numbers


def test_a_process_that_sees_one_gpu(tmp_path):
    script = write(
        tmp_path, "import torch\nprint(torch.cuda.device_count(), torch.ones(2).cuda())"
    )
    done = virtual(tmp_path, "--gpus", 4, script, CUDA_VISIBLE_DEVICES="3")
    assert "1 tensor([1., 1.], device='cuda:0')" in done.stdout
    assert "cuda:0 (GPU 3)" in done.stdout
    done = virtual(tmp_path, "--gpus", 4, script, CUDA_VISIBLE_DEVICES="")
    assert "used a virtual GPU. CUDA_VISIBLE_DEVICES='' hides all GPUs" in done.stdout
