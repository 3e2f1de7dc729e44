"""`make lab` prints where it is, also for a login by ssh, and writes only into this folder."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
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


def test_make_lab_by_ssh(tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    log = tmp_path / "log"
    environment = clean_environment(HOME=home, SSH_CONNECTION="10.0.0.1 50000 10.0.0.7 22")
    environment.pop("JUPYTER_TOKEN", None)
    with log.open("w") as output:
        server = subprocess.Popen(
            ["make", "-o", INSTALLED, "lab", f"VENV={sys.prefix}"],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 180
        while not (
            found := re.search(r"http://127\.0\.0\.1:(\d+)(\S+)\?token=\w+", log.read_text())
        ):
            assert time.monotonic() < deadline and server.poll() is None, log.read_text()
            time.sleep(0.2)
        while answer(found[0]) != 200:
            assert time.monotonic() < deadline and server.poll() is None, log.read_text()
            time.sleep(0.2)
        assert (ROOT / found[2].removeprefix("/lab/tree/")).is_file()
        assert answer(f"http://127.0.0.1:{found[1]}/api/contents") == 403, "without the token"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    *_, started, line = log.read_text().splitlines()
    assert str(ROOT) in started
    assert f"ssh -N -L {found[1]}:127.0.0.1:{found[1]} " in line and "@10.0.0.7" in line
    assert list(home.iterdir()) == []
