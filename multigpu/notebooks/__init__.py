"""Make notebooks from their sources, and report notebooks that no longer match them.

Authors edit lessons/NN-slug/STEM.md and scripts/STEM.py; notebooks/STEM.ipynb is their text,
with stored outputs.

source    read a notebook's source, with the programs of its script
pairing   compare a notebook with its source; take over prose
running   execute a source or an exercise's script, and store it with its outputs
copies    a learner's own notebooks, without outputs and guesses
footers   the links at the end of pages and notebooks, and the tables of lessons
claims    lessons/claims.md, from the stored outputs
"""

from multigpu.notebooks.pairing import check, select, update_text
from multigpu.notebooks.running import CellFailed, run

__all__ = ["CellFailed", "check", "run", "select", "update_text"]
