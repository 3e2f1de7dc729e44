"""Name Slurm's variables as torchrun does, then run a script: the shell file of a course.

python ddp_vars.py SCRIPT …
"""

import os
import runpy
import sys

os.environ["RANK"] = os.environ["SLURM_PROCID"]
os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
del sys.argv[0]
sys.path[0] = os.getcwd()
runpy.run_path(sys.argv[0], run_name="__main__")
