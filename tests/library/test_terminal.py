"""At a terminal a command says at once what it starts; a log and a notebook do not change."""

import os
import pty
import sys

import pytest
from commands import clean_environment

from multigpu.launch.terminal import announce


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


ANNOUNCE = "from multigpu.launch.terminal import announce; announce('starting')"


@pytest.mark.slow
def test_a_terminal_has_one_and_a_notebook_has_none(at_a_terminal):
    assert at_a_terminal(sys.executable, "-c", ANNOUNCE).strip() == "starting"
    assert at_a_terminal(sys.executable, "-c", ANNOUNCE, JPY_PARENT_PID="1") == ""
