"""`python -m multigpu.cli` is the command `multigpu`."""

from multigpu.cli import main

main()
