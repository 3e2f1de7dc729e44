"""Start a script once per GPU as torch 1's `python -m torch.distributed.launch` did.

python torch1.py COUNT SCRIPT …

torch 2 passes --local-rank; these scripts know --local_rank.
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
        [sys.executable, sys.argv[2], f"--local_rank={rank}", *sys.argv[3:]],
        env={
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(count),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        },
    )
    for rank in range(count)
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
