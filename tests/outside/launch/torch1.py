"""Start a script once per GPU as torch 1's `python -m torch.distributed.launch` did.

python torch1.py COUNT SCRIPT …

torch 2 passes --local-rank; these scripts know --local_rank.
"""

import sys

import ranks

script, *flags = sys.argv[2:]
numbers = [str(rank) for rank in range(int(sys.argv[1]))]
ranks.run(
    [[script, f"--local_rank={rank}", *flags] for rank in numbers],
    [{"RANK": rank, "LOCAL_RANK": rank} for rank in numbers],
)
