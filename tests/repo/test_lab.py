"""`make lab` prints where it is, also for a login by ssh, and writes only into this folder."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import ROOT, clean_environment

pytest.importorskip("jupyterlab")
pytestmark = pytest.mark.slow

INSTALLED = Path(sys.prefix, "installed")


def answer(url: str) -> int:
    """The status of the server's answer; 0 if nothing answers."""
    try:
        return urllib.request.urlopen(url, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def address(log: Path, server: subprocess.Popen) -> re.Match:
    """The address that the server prints, its port and its path, as soon as it is there."""
    deadline = time.monotonic() + 180
    while not (
        found := re.search(r"http://127\.0\.0\.1:(\d+)(\S+)\?token=\w+", log.read_text())
    ):
        assert time.monotonic() < deadline and server.poll() is None, log.read_text()
        time.sleep(0.2)
    return found


@contextmanager
def lab(
    command: list[str | Path], environment: dict[str, str], log: Path
) -> Iterator[re.Match]:
    """Start a server, which writes to `log`; its address, as in `address`. End it after."""
    environment.pop("JUPYTER_TOKEN", None)
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield address(log, server)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_make_lab_by_ssh(tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    log = tmp_path / "log"
    environment = clean_environment(HOME=home, SSH_CONNECTION="10.0.0.1 50000 10.0.0.7 22")
    with lab(
        ["make", "-o", INSTALLED, "lab", f"VENV={sys.prefix}"], environment, log
    ) as found:
        assert answer(found[0]) == 200
        assert (ROOT / found[2].removeprefix("/lab/tree/")).is_file()
        assert answer(f"http://127.0.0.1:{found[1]}/api/contents") == 403, "without the token"
    *_, started, line = log.read_text().splitlines()
    assert str(ROOT) in started
    assert f"ssh -N -L {found[1]}:127.0.0.1:{found[1]} " in line and "@10.0.0.7" in line
    assert list(home.iterdir()) == []


PORT_TAKEN_LATE = """
import socket
from contextlib import suppress

from jupyter_server.serverapp import ServerApp
from jupyterlab.labapp import main

bind = ServerApp.init_httpserver
others = []


def another_program_is_first(server):
    with suppress(OSError):  # the port was taken before
        others.append(socket.create_server(("127.0.0.1", server.port)))
    bind(server)


ServerApp.init_httpserver = another_program_is_first
main()
"""


def test_the_address_is_that_of_this_server_if_another_program_takes_the_port(tmp_path: Path):
    """The other program takes it after JupyterLab has read its settings."""
    (tmp_path / "late.py").write_text(PORT_TAKEN_LATE)
    log = tmp_path / "log"
    folders = {
        name: tmp_path
        for name in ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    environment = clean_environment(**folders, SSH_CONNECTION="10.0.0.1 50000 10.0.0.7 22")
    command = [sys.executable, tmp_path / "late.py", "--config=lessons/.jupyter/lab.py"]
    with lab(command, environment, log) as found:
        assert answer(found[0]) == 200
