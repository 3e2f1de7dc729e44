"""JupyterLab's settings for the course: `make lab` passes this file."""

import getpass
import os
import secrets
import socket
from pathlib import Path

import zmq

HERE = Path(__file__).resolve().parent
c = get_config()  # noqa: F821  (JupyterLab puts it there)

c.ServerApp.root_dir = str(HERE.parent.parent)
PAGE = "/lab/tree/my-copy/README.md"
c.LabApp.default_url = PAGE

# overrides.json is in that folder: pages open rendered, and nothing is fetched from outside.
c.LabApp.app_settings_dir = str(HERE)

# jupytext's extension writes scripts/STEM.py each time notebooks/STEM.ipynb is saved, because
# pyproject.toml pairs them. A learner's experiments must not change the scripts that the
# cluster runs. Authors edit the script and call `multigpu notebooks run STEM`.
# jupyter_lsp looks for language servers of other languages, with programs that write logs in
# the home.
c.ServerApp.jpserver_extensions = {"jupyterlab_jupytext": False, "jupyter_lsp": False}

# Other users of the machine can reach a kernel's ports.
c.KernelManager.transport_encryption = "auto" if zmq.has("curve") else "disabled"

# In a container the user is root. The server listens on the loopback only and wants its token.
c.ServerApp.allow_root = True

# The server prints thirty lines when it starts. This file prints only the address.
c.Application.log_level = "ERROR"
c.ServerApp.ip = "127.0.0.1"


def free_port() -> int:
    """The first free port from 8888 on."""
    for port in range(8888, 8988):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    return 0


# JupyterLab reads this file more than once, and takes the token from this variable.
if "JUPYTER_TOKEN" not in os.environ:
    os.environ["JUPYTER_TOKEN"] = secrets.token_hex(16)
    os.environ["COURSE_LAB_PORT"] = str(free_port())
    port = os.environ["COURSE_LAB_PORT"]
    url = f"http://127.0.0.1:{port}{PAGE}?token={os.environ['JUPYTER_TOKEN']}"
    # SSH_CONNECTION is: client, its port, this machine, its port.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    tunnel = ""
    if len(connection) == 4:
        host = f"{getpass.getuser()}@{connection[2]}"
        tunnel = f"; first, on your computer: ssh -N -L {port}:127.0.0.1:{port} {host}"
    print(f"JupyterLab: {url}{tunnel}", flush=True)

c.ServerApp.port = int(os.environ["COURSE_LAB_PORT"])
# Over ssh there is no browser, or one for text.
c.ServerApp.open_browser = "SSH_CONNECTION" not in os.environ
