"""How does the course open in JupyterLab? `make lab` passes this file; nothing is written in the user's home."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
c = get_config()  # noqa: F821  (JupyterLab puts it there)

c.ServerApp.root_dir = str(HERE.parent.parent)
c.LabApp.default_url = "/lab/tree/lessons/README.md"

# overrides.json lies there: pages open rendered, and nothing is fetched from the internet.
c.LabApp.app_settings_dir = str(HERE)

# jupytext's extension writes scripts/STEM.py each time notebooks/STEM.ipynb is saved, because pyproject.toml pairs
# them. A learner's experiments must not change, unnoticed, what the cluster runs. Authors edit the script and call
# `multigpu notebooks run STEM`.
c.ServerApp.jpserver_extensions = {"jupyterlab_jupytext": False}

# In a container the user is root, and the server listens on the loopback only and wants its token.
c.ServerApp.allow_root = True
