"""JupyterLab's settings for the course: `make lab` passes this file."""

from pathlib import Path

import zmq

HERE = Path(__file__).resolve().parent
c = get_config()  # noqa: F821  (JupyterLab puts it there)

c.ServerApp.root_dir = str(HERE.parent.parent)
c.LabApp.default_url = "/lab/tree/my-copy/README.md"

# overrides.json is in that folder: pages open rendered, and nothing is fetched from outside.
c.LabApp.app_settings_dir = str(HERE)

# jupytext's extension writes scripts/STEM.py each time notebooks/STEM.ipynb is saved, because
# pyproject.toml pairs them. A learner's experiments must not change the scripts that the
# cluster runs. Authors edit the script and call `multigpu notebooks run STEM`.
# jupyter_lsp looks for language servers of other languages, with programs that write logs in
# the home.
c.ServerApp.jpserver_extensions = {"jupyterlab_jupytext": False, "jupyter_lsp": False}

# Only warnings, and the address to open: over ssh it is copied from the terminal.
c.Application.log_level = "WARN"

# Other users of the machine can reach a kernel's ports.
c.KernelManager.transport_encryption = "auto" if zmq.has("curve") else "disabled"

# In a container the user is root. The server listens on the loopback only and wants its token.
c.ServerApp.allow_root = True
