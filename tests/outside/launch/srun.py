"""Start a script once per GPU with Slurm's variables, as `srun` does on one node.

python srun.py COUNT SCRIPT …
"""

import sys

import ranks

count = sys.argv[1]
job = {
    "SLURM_NTASKS": count,
    "SLURM_NPROCS": count,
    "SLURM_JOBID": "1",
    "SLURM_GPUS_ON_NODE": count,
    "SLURM_CPUS_PER_TASK": "1",
}
numbers = [str(rank) for rank in range(int(count))]
ranks.run(
    [sys.argv[2:]] * int(count),
    [{**job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in numbers],
)
