"""At a terminal a command says at once what it starts; a log and a notebook do not change."""

import os
import pty
import sys

import pytest
from commands import ROOT, SUPPORT, clean_environment, run

from multigpu.terminal import announce


@pytest.fixture
def at_a_terminal():
    """at_a_terminal(command) runs it at a terminal and returns all that it prints."""

    def run(*command: object, **environment: object) -> str:
        pid, terminal = pty.fork()
        if pid == 0:
            variables = clean_environment(**environment)
            variables.pop("JPY_PARENT_PID", None)
            os.execvpe(
                str(command[0]), [str(part) for part in command], variables | environment
            )
        text = b""
        while True:
            try:
                part = os.read(terminal, 4096)
            except OSError:  # Linux raises EIO when the last process has closed the terminal.
                part = b""
            if not part:
                break
            text += part
        os.waitpid(pid, 0)
        os.close(terminal)
        return text.decode()

    return run


def test_a_log_has_no_announcement(capsys):
    announce("starting")
    assert capsys.readouterr() == ("", "")


ANNOUNCE = "from multigpu.terminal import announce; announce('starting')"


@pytest.mark.slow
def test_a_terminal_has_one_and_a_notebook_has_none(at_a_terminal):
    assert at_a_terminal(sys.executable, "-c", ANNOUNCE).strip() == "starting"
    assert at_a_terminal(sys.executable, "-c", ANNOUNCE, JPY_PARENT_PID="1") == ""


@pytest.mark.slow
def test_spawn_says_what_starts(at_a_terminal, tmp_path, npz):
    flags = ("--data", npz(), "--batch-size", 8, "--epochs", 1, "--out", tmp_path / "o")
    script = SUPPORT / "library_script.py"
    command = (sys.executable, script, "--spawn", 2, "--prove", *flags)
    text = at_a_terminal(*command, PYTHONPATH=str(ROOT))
    assert text.startswith("starting 2 ") and "test accuracy" in text, text
    assert 0 < text.find("serially for 1 epoch") < text.find("max difference"), text
    assert "\n    1 " in text.replace("\r", "\n"), "a bar leaves the table as it is"


PROGRESS = """
import sys, termios, time
from multigpu import launch, metrics
if sys.stderr.isatty():
    termios.tcsetwinsize(2, (24, 80))
for _ in metrics.progress(range(3), launch.World()): time.sleep(0.2)
"""


@pytest.mark.slow
def test_a_terminal_has_a_bar_and_a_log_has_none(at_a_terminal):
    assert "it/s" in at_a_terminal(sys.executable, "-c", PROGRESS)
    assert run(sys.executable, "-c", PROGRESS).stdout == ""
