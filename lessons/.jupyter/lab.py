"""JupyterLab's settings for the course: `make lab` passes this file."""

import getpass
import json
import os
import secrets
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import zmq
from jupyter_core.paths import jupyter_runtime_dir

HERE = Path(__file__).resolve().parent
c = get_config()  # noqa: F821  (JupyterLab puts it there)

c.ServerApp.root_dir = str(HERE.parent.parent)
PAGE = "/lab/tree/my-copy/README.md"
c.LabApp.default_url = PAGE

# overrides.json is in that folder: pages open rendered, and nothing is fetched from outside.
c.LabApp.app_settings_dir = str(HERE)

# jupytext's extension opens Markdown files as notebooks; the lessons' sources are no notebooks
# of a learner.
# jupyter_lsp looks for language servers of other languages, with programs that write logs in
# the home.
c.ServerApp.jpserver_extensions = {"jupyterlab_jupytext": False, "jupyter_lsp": False}

# Other users of the machine can reach a kernel's ports.
c.KernelManager.transport_encryption = "auto" if zmq.has("curve") else "disabled"

# In a container the user is root. The server wants its token.
c.ServerApp.allow_root = True

# The server prints thirty lines when it starts. This file prints only the address.
c.Application.log_level = "ERROR"
# The port that `docker run -p` publishes leads to another address of the container.
c.ServerApp.ip = os.environ.get("JUPYTER_IP", "127.0.0.1")


def print_address(info: Path) -> None:
    """Print the server's address as soon as it answers there with this file's token.

    info   the file in which the server writes its port. It takes the next port if another
           program has taken the first one, which on a shared machine happens at any time.
    """
    token = os.environ["JUPYTER_TOKEN"]
    while True:
        time.sleep(0.1)
        with suppress(OSError, ValueError):
            port = json.loads(info.read_text())["port"]
            server = f"http://127.0.0.1:{port}"
            urllib.request.urlopen(f"{server}/api/status?token={token}", timeout=10).close()
            break
    # SSH_CONNECTION is: client, its port, this machine, its port.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    tunnel = ""
    if len(connection) == 4:
        host = f"{getpass.getuser()}@{connection[2]}"
        tunnel = f"; first, on your computer: ssh -N -L {port}:127.0.0.1:{port} {host}"
    print(f"JupyterLab: {server}{PAGE}?token={token}{tunnel}", flush=True)


# JupyterLab reads this file more than once, and takes the token from this variable.
if "JUPYTER_TOKEN" not in os.environ:
    os.environ["JUPYTER_TOKEN"] = secrets.token_hex(16)
    info = Path(jupyter_runtime_dir(), f"jpserver-{os.getpid()}.json")
    info.unlink(missing_ok=True)  # of a process that had this number before
    threading.Thread(target=print_address, args=(info,), daemon=True).start()

# Over ssh there is no browser, or one for text; in a container there is none.
c.ServerApp.open_browser = not os.environ.keys() & {"SSH_CONNECTION", "JUPYTER_IP"}
