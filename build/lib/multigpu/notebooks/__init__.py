"""Make notebooks from their scripts, and report notebooks that no longer match them.

Authors edit scripts/STEM.py (jupytext's percent format); notebooks/STEM.ipynb is the same
text with stored outputs. jupytext's own `--sync` is not used: it compares time stamps, which a
clone does not keep, and leaves old outputs under new code.

pairing   compare a notebook with its script; take over a script's prose
running   execute a script as a notebook, and store it with its outputs
copies    a learner's own notebooks, without outputs and guesses
footers   the links at the end of pages and notebooks, and the tables of lessons
figures   the figures on pages, which notebooks and benchmarks give
"""

from multigpu.notebooks.pairing import check, select, update_text
from multigpu.notebooks.running import CellFailed, run

__all__ = ["CellFailed", "check", "run", "select", "update_text"]
