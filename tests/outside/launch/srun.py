"""Start a script once per GPU with Slurm's variables, as `srun` does on one node.

python srun.py COUNT SCRIPT …
"""

import os
import socket
import subprocess
import sys

count = int(sys.argv[1])
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ranks = [
    subprocess.Popen(
        [sys.executable, *sys.argv[2:]],
        env={
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(count),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": str(count),
            "SLURM_NPROCS": str(count),
            "SLURM_JOBID": "1",
            "SLURM_GPUS_ON_NODE": str(count),
            "SLURM_CPUS_PER_TASK": "1",
        },
    )
    for rank in range(count)
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
